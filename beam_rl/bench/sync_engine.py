"""How long a real engine pauses for a weight sync: from the sync's begin to the first token sampled after it."""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES, DEADLINE_S = 32 * 2**20, 120.0


@dataclass(frozen=True)
class Pause:
    """Of a real engine: seconds of the sync, and from its begin to the first token sampled after it."""

    sync_s: float
    pause_s: float
    bytes: int


def run_engine() -> Pause:
    """Starts an engine and syncs all of its weights twice, the way a run does; to be called in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_pause(Path(folder)))


async def _pause(folder: Path) -> Pause:
    import torch

    from beam_rl.bench.moe_lora import SMALL, engine_settings, model_config
    from beam_rl.rollout.engine import Engine
    from beam_rl.rollout.sync.link import Link
    from beam_rl.rollout.sync.local import LocalSync
    from beam_rl.samples import Request

    config = model_config(SMALL)
    (folder / "config.json").write_text(json.dumps(config))
    engine = Engine(engine_settings(SMALL, folder, None))
    await engine.start()
    try:
        link = Link("shm", BUCKET_BYTES, DEADLINE_S, checksums=True, host="127.0.0.1")
        way = LocalSync(engine, link, torch.device("cpu"))
        await way.join()
        found = []
        for version in (1, 2):  # the first warms up
            prompt = Request(f"after-{version}", [3, 4, 5], version, 1, 1.0)
            start = time.perf_counter()
            stats, _ = await way.load(_weights(config), version)
            synced = time.perf_counter()
            _ = [done async for done in engine.generate([prompt])]
            found.append(Pause(synced - start, time.perf_counter() - start, stats.bytes))
        return found[-1]
    finally:
        await engine.stop()


def _weights(config: dict[str, Any]) -> Iterator[tuple[str, "Tensor"]]:
    """Random weights of a checkpoint with this config, in its dtypes."""
    import torch

    from beam_rl.rollout.names import checkpoint_names

    generator = torch.Generator().manual_seed(0)
    for name in sorted(checkpoint_names(SimpleNamespace(**config))):
        yield name, 0.02 * torch.randn(_shape(name, config), generator=generator)


def _shape(name: str, config: dict[str, Any]) -> tuple[int, ...]:
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    kv_heads, experts = config["num_key_value_heads"], config["num_experts"]
    inner = config["moe_intermediate_size"] if ".experts." in name else config["intermediate_size"]
    of_attention = {
        "q_proj": (heads * dim, hidden),
        "k_proj": (kv_heads * dim, hidden),
        "v_proj": (kv_heads * dim, hidden),
        "gate_proj": (heads * dim, hidden),
        "o_proj": (hidden, heads * dim),
        "q_norm": (dim,),
        "k_norm": (dim,),
        "gate_bias": (heads,),
    }
    others = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "gate": (experts, hidden),
        "e_score_correction_bias": (experts,),
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
    }
    module = name.removesuffix(".weight").rpartition(".")[2]
    return (of_attention if ".self_attn." in name else others).get(module, (hidden,))
