"""How long a real engine pauses for a weight sync: from the sync's begin to the first token sampled after it."""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUCKET_BYTES, DEADLINE_S = 32 * 2**20, 120.0


@dataclass(frozen=True)
class Pause:
    """Of a real engine: the sync, and from its begin to the first token sampled after it."""

    sync_seconds: float
    pause_seconds: float
    sync_bytes: int
    sync_tensors: int


def run_engine() -> Pause:
    """Starts an engine and syncs all of its weights twice, the way a run does; to be called in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_pause(Path(folder)))


async def _pause(folder: Path) -> Pause:
    from dataclasses import replace

    from beam_rl.bench import measure
    from beam_rl.bench.moe_lora import SMALL, engine_settings, model_config
    from beam_rl.rollout.engine import Engine
    from beam_rl.rollout.sync.link import Link
    from beam_rl.rollout.sync.local import LocalSync
    from beam_rl.samples import Request

    # Many small experts, as Beam has: what a tensor costs shows beside what its bytes cost.
    where, case = measure.device(), replace(SMALL, layers=10, expert=64, experts=64)
    link = Link("shm", BUCKET_BYTES, DEADLINE_S, checksums=True, host="127.0.0.1")
    if where.type == "cuda":
        sizes = {"hidden": 2048, "layers": 8, "heads": 16, "kv_heads": 4, "dense": 4096, "expert": 512, "experts": 64}
        case = replace(SMALL, **sizes, vocabulary=16384, dtype="bf16")
        link = Link("ipc", 8 * BUCKET_BYTES, DEADLINE_S, checksums=False, host="127.0.0.1")
    config = model_config(case)
    (folder / "config.json").write_text(json.dumps(config))
    engine = Engine(engine_settings(case, folder, None))
    await engine.start()
    try:
        way = LocalSync(engine, link, where)
        await way.join()
        found = []
        for version in (1, 2):  # the first warms up
            weights = list(_weights(config, case.dtype, where))
            start = time.perf_counter()
            stats, _ = await way.load(weights, version)
            synced = time.perf_counter()
            _ = [done async for done in engine.generate([Request(f"after-{version}", [3, 4, 5], version, 1, 1.0)])]
            found.append(Pause(synced - start, time.perf_counter() - start, stats.bytes, len(weights)))
        return found[-1]
    finally:
        await engine.stop()


def _weights(config: dict[str, Any], dtype: str, where: "torch.device") -> Iterator[tuple[str, "Tensor"]]:
    """Random weights of a checkpoint with this config; the router's are FP32."""
    import torch

    from beam_rl.checkpoint_shapes import checkpoint_shapes, is_fp32

    generator = torch.Generator(where).manual_seed(0)
    for name, shape in checkpoint_shapes(config).items():
        kept = torch.float32 if dtype == "fp32" or is_fp32(name) else torch.bfloat16
        yield name, torch.randn(shape, generator=generator, device=where).mul_(0.02).to(kept)
