"""The sampling engine against transformers: real vLLM engines in Ray actors, a tiny random Beam."""

import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from rollout_fixtures import EOS, VOCABULARY, Engines, Reference, RunningEngine
from safetensors.torch import load_file

from beam_rl.engines import Engines as AllEngines
from beam_rl.engines import Slot
from beam_rl.policy import Policy
from beam_rl.recipe.load import load
from beam_rl.rollout.sync.link import Link, open_sender
from beam_rl.rollout.sync.transport import Announce, SyncError, SyncStats, WeightSender
from beam_rl.samples import Completion, Request
from beam_rl.seats import Seat
from beam_rl.sync import WeightSync
from beam_rl.tiny.checkpoint import tiny_tokenizer

pytest_plugins = ["rollout_fixtures"]

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"

LOGP_TOLERANCE = 1e-5


def requests(count: int, prompt: int, response: int, seed: int, temperature: float = 1.0) -> list[Request]:
    rng = np.random.default_rng(seed)
    draw = lambda: rng.integers(3, VOCABULARY, prompt).tolist()  # noqa: E731
    return [Request(f"{seed}-{i}", draw(), 1000 * seed + i, response, temperature) for i in range(count)]


def assert_agrees(
    reference: Reference, asked: list[Request], got: dict[str, Completion], tolerance: float = LOGP_TOLERANCE
) -> None:
    """Log-probabilities and expert sets of every completion are transformers' own; there is a row for each token."""
    assert set(got) == {r.id for r in asked}
    for request in asked:
        done = got[request.id]
        logp, routes = reference.score(request.prompt_ids, done.token_ids, request.temperature)
        np.testing.assert_allclose(done.logp, logp, atol=tolerance, rtol=0)
        assert done.routes is not None and done.routes.dtype == np.uint8
        assert len(done.routes) == len(request.prompt_ids) + len(done.token_ids) - 1
        np.testing.assert_array_equal(np.sort(done.routes, -1), routes)


def test_logp_and_routes_are_those_of_transformers(engines: Engines, references: dict[str, Reference]) -> None:
    asked = requests(48, prompt=8, response=16, seed=1)
    assert_agrees(references["old"], asked, engines.fp32.sample(asked))


def test_routes_name_global_layers(engines: Engines) -> None:
    assert engines.fp32.info.moe_layers == (3, 4, 5, 6)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_logp_is_of_the_distribution_sampled_from(
    engines: Engines, references: dict[str, Reference], temperature: float
) -> None:
    asked = requests(8, prompt=8, response=8, seed=2, temperature=temperature)
    assert_agrees(references["old"], asked, engines.fp32.sample(asked))


def test_temperature_zero_takes_the_most_likely_token(engines: Engines, references: dict[str, Reference]) -> None:
    asked = requests(4, prompt=8, response=8, seed=3, temperature=0.0)
    for request in asked:
        done = engines.fp32.sample([request])[request.id]
        ids = torch.tensor([[*request.prompt_ids, *done.token_ids.tolist()]])
        with torch.no_grad():
            best = references["old"].model(ids[:, :-1]).logits[0, 7:].argmax(-1)
        np.testing.assert_array_equal(done.token_ids, best.numpy())


def test_response_ends_with_the_stop_token_or_at_its_length(engines: Engines) -> None:
    got = engines.fp32.sample(requests(60, prompt=4, response=60, seed=4)).values()
    stopped = [c for c in got if c.finish_reason == "stop"]
    assert stopped and len(stopped) < len(got)
    for done in got:
        assert len(done.logp) == len(done.token_ids)
        assert EOS not in done.token_ids[:-1]
        assert (done.token_ids[-1] == EOS) if done.finish_reason == "stop" else len(done.token_ids) == 60


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(
    engines: Engines, references: dict[str, Reference]
) -> None:
    """Everything until there is as it was without, and what the engine did beyond is gone."""
    asked, decode = requests(24, prompt=8, response=40, seed=14), tiny_tokenizer().decode
    free = engines.fp32.sample(asked)
    # The end of the third token and the beginning of the fourth one.
    stops = {name: decode(done.token_ids[2:4])[1:-1] for name, done in free.items() if len(done.token_ids) > 8}
    stopping = [replace(r, stop_strings=("never", stops[r.id])) for r in asked if r.id in stops]
    got = engines.fp32.sample(stopping)
    assert_agrees(references["old"], [replace(r, stop_strings=()) for r in stopping], got)
    for name, done in got.items():
        np.testing.assert_array_equal(done.token_ids, free[name].token_ids[: len(done.token_ids)])
        assert (done.finish_reason, done.ended_by) == ("stop", stops[name])
        assert stops[name] in decode(done.token_ids) and stops[name] not in decode(done.token_ids[:-1])
    assert sum(len(done.token_ids) == 4 for done in got.values()) > 12 and _idle(engines.fp32)
    assert {done.ended_by for done in free.values()} == {None}


def test_a_stop_string_is_found_where_it_begins_in_what_was_sampled_before(engines: Engines) -> None:
    (asked,), decode = requests(1, prompt=8, response=40, seed=15), tiny_tokenizer().decode
    asked = replace(asked, temperature=0.0)
    ids = engines.fp32.sample([asked])[asked.id].token_ids
    stop = decode(ids[2:4])
    rest = replace(asked, prompt_ids=[*asked.prompt_ids, *ids[:3].tolist()], stop_strings=(stop,))
    resumed = engines.fp32.sample([replace(rest, begun=3)])[asked.id]
    assert (resumed.token_ids.tolist(), resumed.ended_by) == ([ids[3]], stop)
    assert len(engines.fp32.sample([rest])[asked.id].token_ids) > 1, "a prompt ends nothing"


def test_chunked_prefill_and_prefix_cache_hits_keep_every_row(
    engines: Engines, references: dict[str, Reference]
) -> None:
    asked = requests(3, prompt=150, response=10, seed=5)  # prompts longer than a step holds
    assert_agrees(references["old"], asked, engines.fp32.sample(asked))
    before = engines.fp32.call("counters")
    again = [Request(f"again-{r.id}", r.prompt_ids, r.seed + 1, r.max_tokens, r.temperature) for r in asked[-1:]]
    assert_agrees(references["old"], again, engines.fp32.sample(again))
    assert engines.fp32.call("counters").cached_prompt_tokens - before.cached_prompt_tokens >= 128


def test_preempted_requests_keep_every_row_and_their_random_numbers(
    engines: Engines, references: dict[str, Reference]
) -> None:
    asked = requests(40, prompt=30, response=40, seed=6)
    before = engines.fp32.call("counters").preemptions
    got = engines.fp32.sample(asked)
    assert engines.fp32.call("counters").preemptions > before
    assert_agrees(references["old"], asked, got)
    alone = engines.fp32.sample(asked[-1:])
    np.testing.assert_array_equal(alone[asked[-1].id].token_ids, got[asked[-1].id].token_ids)


def test_same_seeds_give_the_same_tokens_in_any_order_and_batch(engines: Engines) -> None:
    asked = requests(24, prompt=8, response=12, seed=7)
    first = engines.fp32.sample(asked)
    for others in (asked[::-1], asked[5:6], asked[:7]):
        for name, done in engines.fp32.sample(others).items():
            np.testing.assert_array_equal(done.token_ids, first[name].token_ids)
            np.testing.assert_allclose(done.logp, first[name].logp, atol=LOGP_TOLERANCE, rtol=0)


def test_same_batch_gives_the_same_bits(engines: Engines) -> None:
    asked = requests(24, prompt=8, response=12, seed=8)
    first, second = engines.fp32.sample(asked), engines.fp32.sample(asked)
    for name, done in first.items():
        assert done.logp.tobytes() == second[name].logp.tobytes()


def test_other_seeds_give_other_tokens(engines: Engines) -> None:
    prompt = requests(1, prompt=8, response=12, seed=9)[0].prompt_ids
    got = engines.fp32.sample([Request(f"s{i}", prompt, i, 12, 1.0) for i in range(8)])
    assert len({c.token_ids.tobytes() for c in got.values()}) == 8


def test_request_beyond_the_context_is_refused_in_one_line(engines: Engines) -> None:
    with pytest.raises(ValueError, match="request long: 200 prompt tokens .* 100 exceed max_model_len 256"):
        engines.fp32.sample([Request("long", [5] * 200, 0, 100, 1.0)])


def test_abandoned_requests_leave_no_routes(engines: Engines) -> None:
    stream = engines.fp32.actor.generate.options(num_returns="streaming").remote(
        [*requests(1, prompt=8, response=1, seed=10), *requests(20, prompt=8, response=200, seed=11)]
    )
    assert len(ray.get(next(stream)).token_ids) == 1
    assert engines.fp32.call("counters").in_flight >= 15
    ray.cancel(stream)
    assert _idle(engines.fp32)
    engines.fp32.sample(requests(4, prompt=8, response=4, seed=12))
    assert _idle(engines.fp32)


def _idle(engine: RunningEngine) -> bool:
    """Whether within 10 s nothing is in flight and no routes are kept."""
    for _ in range(100):
        counters = engine.call("counters")
        if counters.in_flight == counters.routes_held == 0:
            return True
        time.sleep(0.1)
    return False


def join(engine: RunningEngine, transport: str) -> WeightSender:
    """A sender of small buckets that the engine has joined."""
    link = Link(transport, 64 * 1024, deadline_s=20, checksums=True, host="127.0.0.1")
    sender = open_sender(link, [1], torch.device("cpu"))
    sender.connect([engine.actor.join_sync.remote(sender.join_infos()[0]).future()])
    return sender


@pytest.fixture(scope="module")
def sender(engines: Engines) -> WeightSender:
    return join(engines.fp32, "shm")


def sync(sender: WeightSender, engine: RunningEngine, tensors: dict[str, torch.Tensor], version: int) -> SyncStats:
    engine.call("begin_update")
    stats = sender.send(tensors.items(), lambda bucket: [engine.actor.update.remote(bucket).future()])
    engine.call("finish_update", version)
    return stats


def test_synced_engine_serves_the_new_weights(
    engines: Engines, references: dict[str, Reference], checkpoints: dict[str, Path], sender: WeightSender
) -> None:
    engine, asked = engines.fp32, requests(12, prompt=40, response=8, seed=13)
    weights = {name: load_file(checkpoints[name] / "model.safetensors") for name in ("old", "new")}
    assert_agrees(references["old"], asked, before := engine.sample(asked))
    for version, name in enumerate(("new", "old", "new"), start=before["13-0"].version + 1):
        stats = sync(sender, engine, weights[name], version)
        assert stats.buckets > 20
        assert stats.bytes == sum(t.nbytes for t in weights[name].values())
        got = engine.sample(asked)  # the same prompts: what the prefix cache held of the old weights would show
        assert {c.version for c in got.values()} == {version}
        assert_agrees(references[name], asked, got)
        for tensor in weights[name]:
            np.testing.assert_array_equal(engine.call("weight", tensor), weights[name][tensor].numpy(), err_msg=tensor)


def test_after_updates_that_ended_half_way_a_whole_one_leaves_exactly_its_weights(
    engines: Engines, references: dict[str, Reference], checkpoints: dict[str, Path], sender: WeightSender
) -> None:
    engine, asked = engines.fp32, requests(12, prompt=8, response=8, seed=18)
    whole = load_file(checkpoints["old"] / "model.safetensors")
    wrong = {name: 3 * whole[name] for name in sorted(whole)[: len(whole) // 2]}  # ends within a layer's experts
    load: Announce = lambda bucket: [engine.actor.update.remote(bucket).future()]  # noqa: E731

    def damaged(bucket: dict[str, Any]) -> list[Future]:
        if bucket["number"] == 9:
            sender.end.buffers[bucket["slot"]][bucket["nbytes"] // 2] ^= 1
        return load(bucket)

    engine.call("begin_update")
    sender.send(wrong.items(), load)
    engine.call("abandon_update")  # as when another engine has died
    with pytest.raises(
        RuntimeError, match="cannot sample: a weight update was cut off half way; sync all weights again"
    ):
        engine.sample(asked)
    engine.call("begin_update")
    with pytest.raises(SyncError, match="engine 0 failed: .*bucket 9 arrived damaged"):
        sender.send(wrong.items(), damaged)
    with pytest.raises(RuntimeError, match="cannot sample: a weight update failed half way"):
        engine.sample(asked)
    engine.call("begin_update")
    sender.send(wrong.items(), load)  # and nobody even says that it is over

    sync(sender, engine, whole, 77)
    for tensor in whole:
        np.testing.assert_array_equal(engine.call("weight", tensor), whole[tensor].numpy(), err_msg=tensor)
    assert_agrees(references["old"], asked, engine.sample(asked))


def test_update_cut_off_before_its_first_bucket_leaves_the_engine_as_it_was(engines: Engines) -> None:
    asked = requests(4, prompt=8, response=8, seed=19)
    before = engines.fp32.sample(asked)
    engines.fp32.call("begin_update")
    with pytest.raises(RuntimeError, match="cannot sample: a weight update is under way"):
        engines.fp32.sample(asked)
    engines.fp32.call("abandon_update")
    for name, done in engines.fp32.sample(asked).items():
        assert done.logp.tobytes() == before[name].logp.tobytes() and done.version == before[name].version


def test_update_is_refused_while_requests_run(engines: Engines) -> None:
    stream = engines.fp32.actor.generate.options(num_returns="streaming").remote(
        [*requests(1, prompt=8, response=1, seed=14), *requests(2, prompt=8, response=200, seed=15)]
    )
    ray.get(next(stream))
    with pytest.raises(RuntimeError, match="2 requests are still sampling"):
        engines.fp32.call("begin_update")
    ray.cancel(stream)
    assert _idle(engines.fp32)


def test_bf16_departs_from_transformers_no_further_than_bf16_itself(
    engines: Engines, references: dict[str, Reference]
) -> None:
    asked = requests(48, prompt=8, response=16, seed=16)
    got = engines.bf16.sample(asked)
    rounded = Reference(engines.bf16.checkpoint, torch.bfloat16)
    gaps, noise = [], []
    for request in asked:
        tokens = got[request.id].token_ids
        hf = rounded.score(request.prompt_ids, tokens)[0]
        gaps.append(np.abs(got[request.id].logp - hf))
        noise.append(np.abs(references["bf16"].score(request.prompt_ids, tokens)[0] - hf))
    assert np.concatenate(gaps).mean() < 1.1 * np.concatenate(noise).mean()


def test_bf16_engine_holds_the_router_in_fp32(engines: Engines) -> None:
    on_disk = load_file(engines.bf16.checkpoint / "model.safetensors")
    for name in ("model.layers.3.mlp.gate.weight", "model.layers.6.mlp.gate.e_score_correction_bias"):
        held = engines.bf16.call("weight", name)
        assert held.dtype == np.float32
        np.testing.assert_array_equal(held, on_disk[name].numpy())


def test_incomplete_update_is_refused_and_the_engine_serves_nothing_until_a_whole_one(engines: Engines) -> None:
    engine = engines.bf16
    sender = join(engine, "gloo")
    weights = load_file(engine.checkpoint / "model.safetensors")
    left_out = "model.layers.4.mlp.experts.7.up_proj.weight"
    del weights[left_out]
    with pytest.raises(Exception, match=f"left out 1 tensors, the first is {left_out}"):
        sync(sender, engine, weights, 1)
    with pytest.raises(RuntimeError, match="cannot sample: a weight update did not finish"):
        engine.sample(requests(1, prompt=4, response=4, seed=17))
    sync(sender, engine, load_file(engine.checkpoint / "model.safetensors"), 2)
    assert engine.sample(requests(1, prompt=4, response=4, seed=17))["17-0"].version == 2


def test_engine_that_cannot_start_says_why_in_its_own_words_and_can_be_started_again(engines: Engines) -> None:
    message = str(engines.start_error)
    assert "vLLM did not start" in message and "Last lines of" in message
    assert "weights were not initialized from checkpoint" in message
    assert "layers.1.self_attn.q_norm.weight" in message


def test_engine_killed_in_a_sync_is_named_at_once_leaves_no_process_and_the_other_gets_the_weights(
    engines: Engines, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    recipe = load(TINY, ["sync.bucket_bytes=65536", "sync.deadline_s=60"])
    killed, other = engines.bf16, engines.fp32
    children = [psutil.Process(pid) for pid in killed.info.child_pids]
    assert children and all(child.is_running() for child in children)
    all_engines = AllEngines(recipe, checkpoints["old"], tmp_path)
    all_engines.slots = [Slot(i, Seat(), e.actor, None, "serving") for i, e in enumerate((other, killed))]
    with Policy(recipe, checkpoints["old"], tmp_path) as policy:
        policy.wait_ready()
        way = WeightSync(policy, all_engines, recipe.sync)
        way.load(version=20)
        deaths: list[float] = []

        def kill() -> None:
            os.kill(killed.info.pid, signal.SIGKILL)
            deaths.append(time.monotonic())

        threading.Timer(0.5, kill).start()
        with pytest.raises(SyncError, match="engine 1") as failed:
            for version in range(21, 200):  # one after the other, so that the kill finds one under way
                way.load(version)
        assert failed.value.engines == (1,) and time.monotonic() - deaths[0] < 10
        assert psutil.wait_procs(children, timeout=5)[1] == []
        way.load(200, engines=[0])
    whole = load_file(checkpoints["old"] / "model.safetensors")
    for name in whole:
        np.testing.assert_array_equal(other.call("weight", name), whole[name].numpy(), err_msg=name)
    assert other.sample(requests(1, prompt=4, response=4, seed=20))["20-0"].version == 200


def test_stopped_engine_leaves_no_process(engines: Engines) -> None:
    children = [psutil.Process(pid) for pid in engines.fp32.info.child_pids]
    engines.fp32.call("stop")
    assert psutil.wait_procs(children, timeout=0)[1] == []
