"""The engine's adapter against transformers with the adapter merged into its weights: one real engine, a tiny Beam."""

import json
from collections.abc import Iterable, Iterator
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

from beam_rl.checksum import SentChecksum
from beam_rl.lora import Adapter, adapter_modules, adapter_tensors, repeated_tensors
from beam_rl.recipe.tree import ALL_TARGETS
from beam_rl.rollout.engine import Engine
from beam_rl.rollout.sync.transport import SyncStats, WeightSender
from beam_rl.samples import Completion, Request

pytest_plugins = ["rollout_fixtures"]

LOGP_TOLERANCE = 2e-5
TOP_K = 4
ADAPTER = Adapter(rank=8, alpha=16.0, expert_rank=2, expert_alpha=4.0, targets=ALL_TARGETS)
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / "base", seed=0)


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def random_adapter(config: dict[str, Any], seed: int) -> Tensors:
    """What a trainer sends: no repeated tensors, B without its scale."""
    generator = torch.Generator().manual_seed(seed)
    repeated = repeated_tensors(ADAPTER, config)
    shapes = {n: s for n, s in adapter_tensors(ADAPTER, config).items() if n not in repeated}
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
def engine(cluster: None, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    class MixingEngine(Engine):  # Ray's workers can't import this file: a class in a function travels by value
        """Serves the checkpoint alone to requests whose name says so, in one batch with the adapter's."""

        def _adapter_of(self, request: Request) -> Any:
            return None if request.id.startswith("base") else super()._adapter_of(request)

    logs = tmp_path_factory.mktemp("lora_logs")
    actor = ray.remote(MixingEngine).remote(settings(folder, "fp32", "lora", logs, adapter=ADAPTER))
    yield RunningEngine(actor, ray.get(actor.start.remote(), timeout=300), folder)
    ray.get(actor.stop.remote(), timeout=60)


@pytest.fixture(scope="module")
def sender(engine: RunningEngine) -> WeightSender:
    sender = WeightSender("127.0.0.1", 0, engine_ranks=1, deadline_s=20)
    sender.connect([engine.actor.join_sync.remote("127.0.0.1", sender.port, 1, 2, 20.0).future()])
    return sender


class Syncs:
    """Sends adapters to the engine under new versions."""

    def __init__(self, sender: WeightSender, engine: RunningEngine, config: dict[str, Any]) -> None:
        self.sender, self.engine, self.config, self.version = sender, engine, config, 0
        self.stats: SyncStats

    def __call__(self, tensors: Tensors) -> tuple[str, str]:
        """The checksum that the engine's slots should have, and what they have."""
        self.version += 1
        watched = SentChecksum(ADAPTER, self.config, torch.float32)
        return self.send(watched.watch(tensors.items())), watched.value()

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        self.engine.call("begin_update")
        announce = lambda bucket: [self.engine.actor.update.remote(bucket).future()]  # noqa: E731
        self.stats = self.sender.send(tensors, 16 * 1024, announce)
        return self.engine.call("finish_update", self.version)


@pytest.fixture(scope="module")
def sync(sender: WeightSender, engine: RunningEngine, config: dict[str, Any]) -> Syncs:
    return Syncs(sender, engine, config)


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
