"""The engine's adapter against transformers with the adapter merged into its weights: one real engine, a tiny Beam."""

import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from rollout_fixtures import VOCABULARY, Reference, RunningEngine, make_checkpoint, settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from beam_rl.adapter_stacks import stacked, tensor_in
from beam_rl.checksum import SentChecksum
from beam_rl.lora import ALL_TARGETS, Adapter, adapter_modules, adapter_tensors, repeated_tensors, sync_shapes
from beam_rl.parity import reference as parity
from beam_rl.parity.compare import Side, compare
from beam_rl.rollout.engine import Engine, EngineInfo
from beam_rl.rollout.launch import EngineSettings
from beam_rl.rollout.sync.link import Link, open_sender
from beam_rl.rollout.sync.transport import SyncError, SyncStats
from beam_rl.samples import Completion, Request

pytest_plugins = ["rollout_fixtures"]

LOGP_TOLERANCE = 2e-5
TOP_K = 4
ADAPTER = Adapter(rank=8, alpha=16.0, expert_rank=2, expert_alpha=4.0, targets=ALL_TARGETS)
ODD_ADAPTER = Adapter(rank=12, alpha=18.0, expert_rank=3, expert_alpha=4.5, targets=ALL_TARGETS[:5])
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / "base", seed=0)


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def random_adapter(config: dict[str, Any], seed: int, adapter: Adapter = ADAPTER) -> Tensors:
    """What a trainer sends: no repeated tensors, B without its scale."""
    generator = torch.Generator().manual_seed(seed)
    repeated = repeated_tensors(adapter, config)
    shapes = {n: s for n, s in adapter_tensors(adapter, config).items() if n not in repeated}
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def adapters(config: dict[str, Any]) -> dict[str, Tensors]:
    one = random_adapter(config, 1)
    zero = {name: torch.zeros_like(t) if ".lora_B." in name else t for name, t in one.items()}
    return {"one": one, "two": random_adapter(config, 2), "zero": zero}


@pytest.fixture(scope="module")
def references(
    folder: Path, config: dict[str, Any], adapters: dict[str, Tensors], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Reference]:
    """Transformers with each adapter merged; `base`: with none."""
    found = {"base": Reference(folder), "zero": Reference(folder)}
    repeated = repeated_tensors(ADAPTER, config)
    for name in ("one", "two"):
        merged, given = load_file(folder / "model.safetensors"), adapters[name]
        for m in adapter_modules(ADAPTER, config):
            merged[f"{m.name}.weight"] += m.scale * given[m.b] @ given[repeated.get(m.a, m.a)]
        there = tmp_path_factory.mktemp(name)
        save_file(merged, there / "model.safetensors", metadata={"format": "pt"})
        (there / "config.json").write_text(json.dumps(config))
        found[name] = Reference(there)
    return found


@pytest.fixture(scope="module")
def engine(ray_here: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    class TestEngine(Engine):  # Ray's workers can't import this file: a class in a function travels by value
        async def _add(self, request: Request) -> Any:
            """The checkpoint alone for requests whose name says so, in one batch with the adapter's."""
            served = self.adapter_id
            self.adapter_id = 0 if request.id.startswith("base") else served
            try:
                return await super()._add(request)
            finally:
                self.adapter_id = served

        async def restart(self, settings: EngineSettings) -> EngineInfo:
            """Another engine in the same process: vLLM is imported already."""
            await self.stop()
            Engine.__init__(self, settings)
            return await self.start()

    logs = tmp_path_factory.mktemp("lora_logs")
    actor = ray.remote(TestEngine).remote(settings(folder, "fp32", "lora", logs, adapter=ADAPTER))
    yield RunningEngine(actor, ray.get(actor.start.remote(), timeout=300), folder)
    ray.get(actor.stop.remote(), timeout=60)


class Syncs:
    """Sends adapters to one engine under new versions."""

    def __init__(self, engine: RunningEngine, adapter: Adapter, config: dict[str, Any], dtype: torch.dtype) -> None:
        self.engine, self.adapter, self.config, self.dtype, self.version = engine, adapter, config, dtype, 0
        link = Link("shm", 16 * 1024, deadline_s=20, checksums=True, host="127.0.0.1")
        self.sender = open_sender(link, [1], torch.device("cpu"))
        self.sender.connect([engine.actor.join_sync.remote(self.sender.join_infos()[0]).future()])
        self.stats: SyncStats

    def __call__(self, tensors: Tensors) -> tuple[str, str]:
        """The checksum of what the engine's slots hold, and what it should be."""
        watched = SentChecksum(self.adapter, self.config, self.dtype)
        return self.send(watched.watch(stacked(tensors.items(), self.config))), watched.value()

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        self.engine.call("begin_update")
        announce = lambda bucket: [self.engine.actor.update.remote(bucket).future()]  # noqa: E731
        self.stats = self.sender.send(tensors, announce)
        held = self.engine.call("finish_update", self.version + 1)
        self.version += 1
        return held


@pytest.fixture(scope="module")
def sync(engine: RunningEngine, config: dict[str, Any]) -> Syncs:
    return Syncs(engine, ADAPTER, config, torch.float32)


def requests(count: int, prompt: int, response: int, seed: int, name: str = "") -> list[Request]:
    rng = np.random.default_rng(seed)
    draw = lambda: rng.integers(3, VOCABULARY, prompt).tolist()  # noqa: E731
    return [Request(f"{name}{seed}-{i}", draw(), 1000 * seed + i, response, 1.0) for i in range(count)]


def assert_agrees(reference: Reference, asked: list[Request], got: dict[str, Completion]) -> None:
    """Log-probabilities and expert sets of every completion are the reference's."""
    for request in asked:
        done = got[request.id]
        logp, routes = reference.score(request.prompt_ids, done.token_ids, request.temperature)
        np.testing.assert_allclose(done.logp, logp, atol=LOGP_TOLERANCE, rtol=0)
        assert done.routes is not None
        np.testing.assert_array_equal(np.sort(done.routes, -1), routes)


def test_before_the_first_sync_the_engine_serves_the_checkpoint(
    engine: RunningEngine, references: dict[str, Reference]
) -> None:
    asked = requests(8, prompt=8, response=8, seed=1)
    got = engine.sample(asked)
    assert_agrees(references["base"], asked, got)
    assert {c.version for c in got.values()} == {0}


def test_adapter_served_is_the_adapter_merged(
    engine: RunningEngine, references: dict[str, Reference], adapters: dict[str, Tensors], sync: Syncs
) -> None:
    held, sent = sync(adapters["one"])
    assert held == sent
    asked = requests(24, prompt=8, response=12, seed=2)
    got = engine.sample(asked)
    assert_agrees(references["one"], asked, got)
    assert {c.version for c in got.values()} == {sync.version}


def test_zero_adapter_gives_the_checkpoints_bits(
    engine: RunningEngine, adapters: dict[str, Tensors], sync: Syncs
) -> None:
    sync(adapters["zero"])
    asked = requests(12, prompt=8, response=8, seed=3)
    with_adapter = engine.sample(asked)
    alone = engine.sample([replace(r, id=f"base{r.id}") for r in asked])
    for request in asked:
        assert with_adapter[request.id].logp.tobytes() == alone[f"base{request.id}"].logp.tobytes()


def test_tokens_without_an_adapter_in_the_same_step_stay_without(
    engine: RunningEngine, references: dict[str, Reference], adapters: dict[str, Tensors], sync: Syncs
) -> None:
    sync(adapters["two"])
    ours, others = requests(8, prompt=30, response=8, seed=4), requests(8, prompt=30, response=8, seed=5, name="base")
    got = engine.sample([r for pair in zip(ours, others, strict=True) for r in pair])
    assert_agrees(references["two"], ours, got)
    assert_agrees(references["base"], others, got)


def test_expert_rank_is_r_over_top_k_in_the_slots_and_dense_modules_keep_r(
    engine: RunningEngine, config: dict[str, Any]
) -> None:
    slots = engine.call("adapter_slots")
    experts = [s for s in slots if s.module.endswith(".experts")]
    assert len(experts) == 4 * 3 and len(slots) - len(experts) == 7 * 5 + 3 * 3
    for slot in slots:
        rank = ADAPTER.rank // TOP_K if slot in experts else ADAPTER.rank
        assert (slot.a[0], slot.a[2], slot.b[3]) == (1, rank, rank)
    padded = 4 * 16 * 4 * ADAPTER.rank * 3 * (64 + 32)  # FP32 bytes of 4 layers, 16 experts, 3 projections of 64 and 32
    assert sum(s.bytes for s in experts) * TOP_K == padded
    of_adapter = sum(4 * rows * columns for rows, columns in adapter_tensors(ADAPTER, config).values())
    assert sum(s.bytes for s in slots) == of_adapter


def test_sync_moves_the_adapters_bytes_and_repeated_tensors_once(
    engine: RunningEngine, adapters: dict[str, Tensors], sync: Syncs
) -> None:
    sync(adapters["one"])
    assert sync.stats.bytes == sum(t.nbytes for t in adapters["one"].values())


def test_experts_travel_together(adapters: dict[str, Tensors], sync: Syncs, config: dict[str, Any]) -> None:
    travelling = dict(stacked(adapters["one"].items(), config))
    assert {name: tuple(tensor.shape) for name, tensor in travelling.items()} == sync_shapes(ADAPTER, config)
    assert len(travelling) == 7 * 7 + 3 * 5 + 4 * 5 < len(adapters["one"]) / 4
    assert all(torch.equal(tensor_in(travelling, name), tensor) for name, tensor in adapters["one"].items())
    lacking = [(name, tensor) for name, tensor in adapters["one"].items() if ".4.mlp.experts.7.up" not in name]
    with pytest.raises(ValueError, match=r"layers.4.mlp.experts.\*.up_proj.lora_B.weight: 15 experts of 16 are there"):
        list(stacked(lacking, config))


def test_base_weights_stay_readable_and_untouched(
    engine: RunningEngine, adapters: dict[str, Tensors], sync: Syncs
) -> None:
    sync(adapters["one"])
    for name, tensor in load_file(engine.checkpoint / "model.safetensors").items():
        np.testing.assert_array_equal(engine.call("weight", name), tensor.numpy(), err_msg=name)


def test_prefixes_of_older_versions_are_not_reused(
    engine: RunningEngine, references: dict[str, Reference], adapters: dict[str, Tensors], sync: Syncs
) -> None:
    asked = requests(3, prompt=150, response=8, seed=6)
    for name in ("one", "two", "one"):
        sync(adapters[name])
        before = engine.call("counters").cached_prompt_tokens
        got = engine.sample(asked)
        assert_agrees(references[name], asked, got)
        assert engine.call("counters").cached_prompt_tokens == before
        assert {c.version for c in got.values()} == {sync.version}
    assert_agrees(references["one"], asked[-1:], engine.sample(asked[-1:]))
    assert engine.call("counters").cached_prompt_tokens >= before + 128  # the cache works, within a version


def test_outputs_follow_twenty_syncs_and_memory_is_flat(
    engine: RunningEngine, references: dict[str, Reference], adapters: dict[str, Tensors], sync: Syncs
) -> None:
    asked = requests(4, prompt=8, response=8, seed=7)
    worker = psutil.Process(engine.info.child_pids[0])
    memory = []
    for i in range(22):
        name = ("one", "two")[i % 2]
        held, sent = sync(adapters[name])
        assert held == sent
        assert_agrees(references[name], asked, engine.sample(asked))
        memory.append(worker.memory_info().rss)
    assert memory[-1] - memory[1] < 10 * sync.stats.bytes  # half of what 20 adapters take


def spoilt(tensors: Tensors, how: str) -> tuple[Iterable[tuple[str, Tensor]], str]:
    """An adapter, as it travels, with something wrong, and what the refusal says."""
    name = "model.layers.4.mlp.experts.*.up_proj.lora_B.weight"
    rest = {n: t for n, t in tensors.items() if n != name}
    if how == "nan" or how == "inf":
        wrong = tensors[name].clone()
        wrong[7, 3, 1] = float(how)
        return [*rest.items(), (name, wrong)], f"{re.escape(name)} holds a NaN or an infinity"
    if how == "shape":
        turned = tensors[name].mT.contiguous()
        return [*rest.items(), (name, turned)], rf"{re.escape(name)} has shape \(16, 2, 32\), .* \(16, 32, 2\)"
    if how == "unknown":
        other = name.replace("*", "7")  # one expert's does not travel alone
        return [*tensors.items(), (other, tensors[name][7])], f"{other} is not a tensor that this adapter consists of"
    if how == "base":
        other = "model.layers.4.mlp.experts.7.up_proj.weight"
        return [
            (other, torch.zeros(32, 64)),
            *tensors.items(),
        ], f"{other} is not a tensor that this adapter consists of"
    if how == "twice":
        return [*tensors.items(), (name, tensors[name])], f"{re.escape(name)} came twice"
    return rest.items(), f"left out 1 tensors, the first is {re.escape(name)}"


@pytest.mark.parametrize("how", ["nan", "inf", "shape", "unknown", "base", "twice", "missing"])
def test_wrong_adapter_is_refused_in_a_line_and_the_version_before_it_is_served_on(
    engine: RunningEngine, adapters: dict[str, Tensors], sync: Syncs, how: str
) -> None:
    held, _ = sync(adapters["one"])
    asked = requests(4, prompt=8, response=8, seed=8)
    before = engine.sample(asked)
    tensors, message = spoilt(dict(stacked(adapters["two"].items(), sync.config)), how)
    with pytest.raises(ValueError, match=message) as refused:
        sync.send(tensors)
    assert "\n" not in str(refused.value.cause)
    assert engine.call("adapter_checksum") == held
    for name, done in engine.sample(asked).items():
        assert done.logp.tobytes() == before[name].logp.tobytes() and done.version == sync.version


@pytest.mark.parametrize("how", ["damaged", "cut off"])
def test_sync_that_fails_half_way_leaves_the_adapter_before_it_serving(
    engine: RunningEngine, adapters: dict[str, Tensors], sync: Syncs, how: str
) -> None:
    held, _ = sync(adapters["one"])
    asked = requests(4, prompt=8, response=8, seed=10)
    before = engine.sample(asked)

    def announce(bucket: dict[str, Any]) -> list[Future]:
        if how == "damaged" and bucket["number"] == 3:
            sync.sender.end.buffers[bucket["slot"]][bucket["nbytes"] // 2] ^= 1
        return [engine.actor.update.remote(bucket).future()]

    engine.call("begin_update")
    if how == "damaged":
        with pytest.raises(SyncError, match="bucket 3 .*: engine 0 failed: .*bucket 3 arrived damaged"):
            sync.sender.send(stacked(adapters["two"].items(), sync.config), announce)
    else:
        sync.sender.send(list(stacked(adapters["two"].items(), sync.config))[:40], announce)
        engine.call("abandon_update")  # as when another engine has died
    assert engine.call("adapter_checksum") == held
    for name, done in engine.sample(asked).items():
        assert done.logp.tobytes() == before[name].logp.tobytes() and done.version == sync.version
    after, sent = sync(adapters["two"])
    assert after == sent != held


def test_checksum_differs_with_any_bit_and_is_of_the_adapter_held(
    engine: RunningEngine, adapters: dict[str, Tensors], sync: Syncs, config: dict[str, Any]
) -> None:
    held, sent = sync(adapters["two"])
    other = adapters["two"] | {"model.layers.0.mlp.down_proj.lora_B.weight": torch.zeros(64, 8)}
    watched = SentChecksum(ADAPTER, config, torch.float32)
    travelling = dict(stacked(other.items(), config))
    assert dict(watched.watch(travelling.items())) == travelling  # passed on as they are
    assert watched.value() != held == sent == engine.call("adapter_checksum")
    assert sync(adapters["one"])[0] != held


@pytest.mark.parametrize("replayed", [False, True])
def test_probe_sees_the_adapter_at_every_sublayer(
    engine: RunningEngine, references: dict[str, Reference], adapters: dict[str, Tensors], sync: Syncs, replayed: bool
) -> None:
    sync(adapters["one"])
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, VOCABULARY, 130).tolist()  # more than a step takes
    routes = np.array([[rng.permutation(16)[:4] for _ in range(4)] for _ in range(129)], np.uint8) if replayed else None
    ours = engine.call("probe", tokens, routes, 0.7)
    theirs = parity.Reference(str(references["one"].folder), "fp32", True, 0.7).probe(np.array(tokens), routes)
    sides = {n: Side(r, r[None, "log_probabilities"][:, 0]) for n, r in (("reference", theirs), ("engine", ours))}
    found = compare(sides, replayed=replayed, sublayer_bound=LOGP_TOLERANCE, logprob_mean_bound=LOGP_TOLERANCE)
    assert max(found.errors["engine_reference"].values()) < LOGP_TOLERANCE


def test_only_the_targets_have_slots_at_a_rank_that_vllm_does_not_list(
    engine: RunningEngine, config: dict[str, Any], tmp_path: Path
) -> None:
    """In BF16; the last test, since it starts another engine in the place of the others'."""
    rounded = make_checkpoint(tmp_path / "base", seed=0, dtype=torch.bfloat16)
    engine.call("restart", settings(rounded, "bf16", "odd", tmp_path, adapter=ODD_ADAPTER))
    slots = engine.call("adapter_slots")
    assert {s.module.rpartition(".")[2] for s in slots} == {"qkv_proj", "output_gate_proj", "o_proj"}
    assert {s.a[2] for s in slots} == {12}
    asked = requests(8, prompt=8, response=8, seed=9)
    before = engine.sample(asked)
    sync = Syncs(engine, ODD_ADAPTER, config, torch.bfloat16)
    held, sent = sync(random_adapter(config, 3, ODD_ADAPTER))
    assert held == sent
    after = engine.sample(asked)
    assert all(not np.array_equal(before[r.id].logp, after[r.id].logp) for r in asked)
