"""vLLM's own Beam over two GPUs: tensor- and expert-parallel, it samples as on one, before and after a sync."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch
from test_rollout_native import ADAPTER, CONFIG, PROMPTS, Firsts, Served, Tensors, make_adapter, make_checkpoint, merged

from beam_rl.adapter_stacks import stacked
from beam_rl.checksum import SentChecksum
from beam_rl.recipe.tree import EngineParallel

pytestmark = pytest.mark.gpu

LAYOUTS = {"one": EngineParallel(), "tp": EngineParallel(tp=2), "ep": EngineParallel(tp=2, ep=2)}


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


async def sample(folder: Path, logs: Path, name: str, weights: Tensors) -> tuple[Firsts, Firsts, Firsts]:
    """Before a sync, with an adapter, and, of an engine that is synced whole, with that adapter merged."""
    adapter, watched = make_adapter(CONFIG, "dense"), SentChecksum(ADAPTER, CONFIG, torch.bfloat16)
    found = []
    for shape in (ADAPTER, None):
        served = Served(folder, logs, shape)
        served.engine.settings = dataclasses.replace(
            served.engine.settings, parallel=LAYOUTS[name], name=f"{name}-{'lora' if shape else 'whole'}"
        )
        await served.start()
        if shape:
            found.append(await served.firsts())
            assert await served.load(watched.watch(stacked(adapter.items(), CONFIG))) == watched.value()
        else:
            await served.load(merged(weights, adapter, CONFIG))
        found.append(await served.firsts())
        await served.engine.stop()
    return found[0], found[1], found[2]


@pytest.fixture(scope="module")
def sampled(two_gpus: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Firsts, Firsts, Firsts]]:
    folder, logs = tmp_path_factory.mktemp("split"), tmp_path_factory.mktemp("split_logs")
    weights = make_checkpoint(folder)
    return {name: asyncio.run(sample(folder, logs, name, weights)) for name in LAYOUTS}


@pytest.mark.parametrize("name", ["tp", "ep"])
@pytest.mark.parametrize("case", [0, 1, 2], ids=["start", "adapter", "merged"])
def test_two_gpus_sample_as_one(sampled: dict[str, tuple[Firsts, Firsts, Firsts]], name: str, case: int) -> None:
    one, two = sampled["one"][case][::5], sampled[name][case][::5]  # the first of each prompt's tokens
    gaps = [abs(a[1] - b[1]) for a, b in zip(one, two, strict=True) if a[0] == b[0]]
    print(f"{name}: the same first tokens {len(gaps) / PROMPTS:.0%}, mean |Δlogp| {sum(gaps) / max(1, len(gaps)):.4f}")
    assert len(gaps) / PROMPTS > 0.85 and sum(gaps) / len(gaps) < 0.1  # BF16 sums in another order, and routes flip
