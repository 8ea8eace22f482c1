"""Every tensor of a checkpoint that a plan counts, by its name on disk, without its weights.

Beam's are a pure function of its config.json; another model's are those of transformers' own class on torch's meta device,
with the experts that it holds fused told apart. `tests/test_plan_other.py` compares them with checkpoints.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beam_rl.checkpoint_shapes import Shape, checkpoint_shapes, is_fp32, stored_shapes
from beam_rl.errors import InputError

FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # in memory → on disk


class NotCounted(InputError):
    """A model that can be trained and has layers that a plan can't count."""


@dataclass(frozen=True)
class Stored:
    shape: Shape
    fp32: bool = False  # in every precision

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def beam_tensors(config: Mapping[str, Any]) -> dict[str, Stored]:
    return {name: Stored(shape, is_fp32(name)) for name, shape in checkpoint_shapes(config).items()}


def other_tensors(folder: Path) -> dict[str, Stored]:
    """Of the model whose config.json is in that folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    held = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        held.pop("lm_head.weight", None)
    return {
        name: Stored(shape, name.endswith("e_score_correction_bias"))
        for fused, whole in held.items()
        for name, shape in _on_disk(fused, whole)
    }


def stored_tensors(folder: Path, config: Mapping[str, Any]) -> dict[str, Stored]:
    """Of the checkpoint in that folder, by its files' headers; experts that lie there fused are told apart."""
    held = stored_shapes(folder, config).items()
    return {name: Stored(shape) for fused, whole in held for name, shape in _on_disk(fused, whole)}


def _on_disk(name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    """The tensors that one of the model in memory is."""
    layer, fused, projection = name.partition(".experts.")
    if not fused or projection not in FUSED:
        yield name, shape
        return
    experts, rows, *columns = shape
    parts = FUSED[projection]
    for expert in range(experts):
        yield from ((f"{layer}.experts.{expert}.{part}.weight", (rows // len(parts), *columns)) for part in parts)
