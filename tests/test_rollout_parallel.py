"""Engines of several workers: each agrees with transformers, gets all weights of a sync, and says so for all its workers."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from rollout_fixtures import VOCABULARY, Reference, RunningEngine, make_checkpoint, settings
from safetensors.torch import load_file, save_file

from beam_rl.adapter_stacks import stacked
from beam_rl.checksum import SentChecksum
from beam_rl.errors import InputError
from beam_rl.lora import ALL_TARGETS, Adapter, adapter_modules, adapter_tensors, repeated_tensors
from beam_rl.recipe.tree import EngineParallel
from beam_rl.rollout.compat import STAGE_BUFFER_MADE
from beam_rl.rollout.engine import Engine
from beam_rl.rollout.launch import refuse_on_cpu
from beam_rl.rollout.sync.link import Link, open_sender
from beam_rl.rollout.sync.transport import WeightSender
from beam_rl.samples import Request

pytest_plugins = ["rollout_fixtures"]

LOGP_TOLERANCE = 2e-5
ADAPTER = Adapter(rank=8, alpha=16.0, expert_rank=2, expert_alpha=4.0, targets=ALL_TARGETS)
SPLIT = EngineParallel(tp=2)
STAGED = EngineParallel(tp=2, pp=2)


@dataclass
class Fleet:
    split: RunningEngine  # tp 2, with an adapter
    staged: RunningEngine  # tp 2 in each of two stages, synced whole


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parallel")
    return {name: make_checkpoint(root / name, seed) for seed, name in enumerate(("old", "new"))}


@pytest.fixture(scope="module")
def config(weights: dict[str, Path]) -> dict[str, Any]:
    return json.loads((weights["old"] / "config.json").read_text())


@pytest.fixture(scope="module")
def fleet(ray_here: str, weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    logs, old = tmp_path_factory.mktemp("parallel_logs"), weights["old"]
    asked = {
        "split": settings(old, "fp32", "split", logs, parallel=SPLIT, adapter=ADAPTER),
        "staged": settings(old, "fp32", "staged", logs, parallel=STAGED),
    }
    actors = {name: ray.remote(Engine).remote(each) for name, each in asked.items()}
    starting = {name: actor.start.remote() for name, actor in actors.items()}
    return Fleet(**{name: RunningEngine(actors[name], ray.get(starting[name], timeout=400), old) for name in asked})


@pytest.fixture(scope="module")
def senders(fleet: Fleet) -> dict[str, WeightSender]:
    return {"split": sender(fleet.split, SPLIT.workers), "staged": sender(fleet.staged, STAGED.workers)}


def sender(engine: RunningEngine, workers: int) -> WeightSender:
    assert len(engine.call("sync_places")) == workers
    link = Link("gloo", 64 * 1024, deadline_s=60, checksums=True, host="127.0.0.1")
    made = open_sender(link, [workers], torch.device("cpu"))
    made.connect([engine.actor.join_sync.remote(made.join_infos()[0]).future()])
    return made


def sync(sender: WeightSender, engine: RunningEngine, tensors: Any, version: int) -> Any:
    engine.call("begin_update")
    sender.send(tensors, lambda bucket: [engine.actor.update.remote(bucket).future()])
    return engine.call("finish_update", version)


def requests(count: int, seed: int, prompt: int = 8, response: int = 12) -> list[Request]:
    rng = np.random.default_rng(seed)
    draw = lambda: rng.integers(3, VOCABULARY, prompt).tolist()  # noqa: E731
    return [Request(f"{seed}-{i}", draw(), 1000 * seed + i, response, 1.0) for i in range(count)]


def assert_agrees(engine: RunningEngine, reference: Reference, asked: list[Request], every: int = 1) -> None:
    got = engine.sample(asked)
    for request in asked[::-every]:  # the last is the one that is preempted first
        done = got[request.id]
        logp, routes = reference.score(request.prompt_ids, done.token_ids)
        np.testing.assert_allclose(done.logp, logp, atol=LOGP_TOLERANCE, rtol=0)
        assert done.routes is not None
        np.testing.assert_array_equal(np.sort(done.routes, -1), routes)


@pytest.mark.parametrize("name", ["split", "staged"])
def test_logp_and_routes_are_those_of_transformers(fleet: Fleet, weights: dict[str, Path], name: str) -> None:
    """Also of prompts in chunks, and of requests that sit out steps, as they do between stages."""
    reference, engine = Reference(weights["old"]), getattr(fleet, name)
    assert_agrees(engine, reference, requests(16, seed=1))
    assert_agrees(engine, reference, requests(3, seed=2, prompt=150, response=6))
    assert engine.call("counters").routes_held == 0


def test_preempted_requests_keep_every_row(fleet: Fleet, weights: dict[str, Path]) -> None:
    before = fleet.staged.call("counters").preemptions
    assert_agrees(fleet.staged, Reference(weights["old"]), requests(60, seed=3, prompt=30, response=40), every=4)
    assert fleet.staged.call("counters").preemptions > before


def test_synced_weights_are_in_every_worker(
    fleet: Fleet, weights: dict[str, Path], senders: dict[str, WeightSender]
) -> None:
    new = load_file(weights["new"] / "model.safetensors")
    sync(senders["staged"], fleet.staged, new.items(), 1)
    for name in list(new)[::7]:
        shards = fleet.staged.call("weight_shards", name)
        assert len(shards) in (2, 4)  # the embedding and the last norm are in both stages
        for stage in (shards[:2], shards[2:]):
            assert not stage or is_whole(stage, new[name].numpy()), name
    assert_agrees(fleet.staged, Reference(weights["new"]), requests(12, seed=4))


def is_whole(shards: list[np.ndarray], tensor: np.ndarray) -> bool:
    """Whether the shards are the tensor put together along one dimension, or all of them the whole tensor, or, as with few
    KV heads, copies of it."""
    if shards[0].shape == tensor.shape:
        return all(np.array_equal(shard, tensor) for shard in shards)
    cut = [dim for dim, size in enumerate(tensor.shape) if shards[0].shape[dim] != size]
    return np.array_equal(np.concatenate(shards, cut[0]), tensor)


def test_adapter_is_held_by_all_workers_and_added_as_if_merged(
    fleet: Fleet, weights: dict[str, Path], config: dict[str, Any], senders: dict[str, WeightSender], tmp_path: Path
) -> None:
    generator, repeated = torch.Generator().manual_seed(5), repeated_tensors(ADAPTER, config)
    shapes = {n: s for n, s in adapter_tensors(ADAPTER, config).items() if n not in repeated}
    given = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    sent = SentChecksum(ADAPTER, config, torch.float32)
    held = sync(senders["split"], fleet.split, sent.watch(stacked(given.items(), config)), 1)
    assert held == sent.value() == fleet.split.call("adapter_checksum")

    merged = load_file(weights["old"] / "model.safetensors")
    for m in adapter_modules(ADAPTER, config):
        merged[f"{m.name}.weight"] += m.scale * given[m.b] @ given[repeated.get(m.a, m.a)]
    save_file(merged, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_agrees(fleet.split, Reference(tmp_path), requests(16, seed=6))


def test_workers_that_hold_different_adapters_are_found_out(weights: dict[str, Path], tmp_path: Path) -> None:
    engine = Engine(settings(weights["old"], "fp32", "none", tmp_path, parallel=STAGED, adapter=ADAPTER))
    first, second = ["a", {"x": "1"}], ["b", {"y": "2"}]
    assert engine._checksum([first, ["a", {}], second, ["b", {}]]) != engine._checksum([first, first, first, first])
    with pytest.raises(RuntimeError, match="hold different adapters"):
        engine._checksum([first, ["a", {}], second, ["c", {}]])


@pytest.mark.parametrize(
    ("parallel", "use"), [(EngineParallel(dp=2), "engines"), (EngineParallel(tp=2, ep=2), "tp alone")]
)
def test_what_a_cpu_cannot_do_is_refused_at_the_start(parallel: EngineParallel, use: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.parallel.[de]p = 2: needs GPUs; on a CPU use .*{use}"):
        refuse_on_cpu(parallel)


def test_core_and_workers_are_forked_not_started_anew(fleet: Fleet) -> None:
    def at_start(pid: int) -> bytes:
        """The environment that the process's program was started with; a fork keeps its parent's."""
        return Path(f"/proc/{pid}/environ").read_bytes()

    core = psutil.Process(fleet.staged.info.child_pids[0])
    workers = [p for p in core.children() if not any("resource_tracker" in part for part in p.cmdline())]
    assert len(workers) == STAGED.workers
    assert {at_start(p.pid) for p in (core, *workers)} == {at_start(fleet.staged.info.pid)}


def test_vllm_still_makes_no_input_buffer_for_a_later_stage(fleet: Fleet) -> None:
    """When this fails, `compat.make_stage_buffer` can go."""
    assert Path(fleet.staged.info.log).read_text().count(STAGE_BUFFER_MADE) == STAGED.tp


def test_parity_looks_into_one_worker_only(fleet: Fleet) -> None:
    with pytest.raises(InputError, match=r"rollout.parallel: parity .* use tp, pp and dp = 1"):
        fleet.split.call("probe", [3, 4, 5, 6], None, 1.0)


def test_nothing_listens_beyond_loopback(fleet: Fleet) -> None:
    for engine in (fleet.split, fleet.staged):
        core = psutil.Process(engine.info.child_pids[0])
        assert len(core.children(recursive=True)) >= 2
        listening = [
            c for p in (core, *core.children(recursive=True)) for c in p.net_connections("inet") if c.status == "LISTEN"
        ]
        assert {c.laddr.ip for c in listening} <= {"127.0.0.1", "::ffff:127.0.0.1"}


def gone(processes: list[psutil.Process], patience_s: float = 15) -> bool:
    end = time.monotonic() + patience_s
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize(("name", "killed"), [("staged", "core"), ("split", "actor")])
def test_nothing_is_left_of_an_engine_whose_core_or_actor_is_killed(fleet: Fleet, name: str, killed: str) -> None:
    """The last test: it ends the engines."""
    engine: RunningEngine = getattr(fleet, name)
    core = psutil.Process(engine.info.child_pids[0])
    workers = core.children(recursive=True)
    assert len(workers) >= 2
    os.kill(core.pid if killed == "core" else engine.info.pid, signal.SIGKILL)
    assert gone([core, *workers])
