"""Adapters of the tiny Beam of `megatron_tiny` for tests: their shape, values that matter, and what transformers makes of
them."""

from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beam_rl.adapter_files import write_adapter
from beam_rl.lora import ALL_TARGETS, Adapter, adapter_modules, adapter_of
from beam_rl.recipe.tree import Lora
from beam_rl.samples import MicroBatch

RANK, ALPHA = 16, 32.0


def adapter(*targets: str, **changes: Any) -> Adapter:
    return adapter_of(Lora(rank=RANK, alpha=ALPHA, targets=list(targets or ALL_TARGETS), **changes), tiny.TOP_K)


def values(shape: Adapter, config: dict[str, Any]) -> dict[str, Tensor]:
    """A whole adapter that moves log-probabilities by about 1; A's that must be equal are."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    for m in adapter_modules(shape, config):
        shared = m.shares_a_with and found[f"{m.shares_a_with}.lora_A.weight"]
        new = torch.randn(m.rank, m.inputs, generator=generator) * m.inputs**-0.5
        found[m.a] = new if shared is None else shared
        found[m.b] = torch.randn(m.outputs, m.rank, generator=generator) * 0.05
    return found


def folder(path: Path, shape: Adapter) -> Path:
    """`values` as an adapter folder."""
    config = tiny.config()
    write_adapter(values(shape, config).items(), shape, config, path, str(tiny.checkpoint()))
    return path


@torch.no_grad()
def logprobs(model: Any, batch: MicroBatch) -> NDArray[np.float32]:
    """(tokens,) of a transformers model, for the batch's targets."""
    samples = np.split(batch.tokens, batch.cu_tokens[1:-1])
    logits = torch.cat([model(torch.tensor(sample)[None]).logits[0] for sample in samples])
    chosen = logits.log_softmax(-1).gather(-1, torch.tensor(batch.targets)[:, None])
    return chosen.squeeze(-1).numpy()
