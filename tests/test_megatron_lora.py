"""LoRA in the trainer: the same adapter from every layout, at our ranks and scales, and nothing else is trained."""

import dataclasses
from pathlib import Path
from typing import Any

import lora_tiny
import megatron_layouts as layouts
import megatron_tiny as tiny
import numpy as np
import pytest
import torch
from layout_table import BOUND, LAYOUTS, ONE, rows
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.lora import ATTENTION_OUTPUT, DENSE_INPUTS, DENSE_OUTPUT, EXPERTS, adapter_tensors, repeated_tensors
from beam_rl.megatron.lora_layers import AdaptedLinear
from beam_rl.recipe.tree import Parallel

LR = 1e-3
BATCH = tiny.micro_batch([12, 30, 5])
WITH_ADAPTER = [
    layouts.Layout("DP2, selective recompute", Parallel(dp=2), "selective"),
    layouts.Layout("TP2+SP", Parallel(tp=2, sp=True)),
    layouts.Layout("TP2+SP, EP2", Parallel(tp=2, sp=True, ep=2)),
    layouts.Layout("DP2, EP2", Parallel(dp=2, ep=2)),
    layouts.Layout("DP2, ETP2", Parallel(dp=2, etp=2)),
    layouts.Layout("CP2", Parallel(cp=2)),
    layouts.Layout("PP2, full recompute", Parallel(pp=2), "full"),
]


def compare(chosen: list[layouts.Layout], targets: tuple[str, ...], folder: Path) -> None:
    shape = lora_tiny.adapter(*targets)
    given = {"adapter": shape, "adapter_folder": str(lora_tiny.folder(folder / "start", shape))}
    chosen = [dataclasses.replace(layout, **given) for layout in chosen]
    for layout, errors, bits in rows(chosen, folder, dataclasses.replace(ONE, **given)):
        wrong = {name: value for name, value in errors.items() if not value <= BOUND}
        wrong |= {name: same for name, same in bits.items() if not same}
        assert not wrong, f"{layout.name}: {wrong}"


def test_layouts_train_the_adapter_of_one_process(tmp_path: Path) -> None:
    """Scores, gradients, two updates of a given adapter; its base, export, resume and checkpoints to the bit."""
    compare(WITH_ADAPTER, (), tmp_path)


def test_a_pipeline_stage_may_have_no_adapter(tmp_path: Path) -> None:
    stages = layouts.Layout("PP2, the first without experts", Parallel(pp=2, pp_layers=[3, 4]), "selective")
    compare([stages], EXPERTS, tmp_path)


def test_recomputation_reaches_an_adapter_below_which_nothing_is_trained() -> None:
    """The first experts' input has no gradient of its own."""
    found = []
    for recompute in ("none", "selective", "full"):
        trainer = tiny.trainer(adapter=lora_tiny.adapter(*EXPERTS), recompute=recompute)
        trainer.update([BATCH], tiny.squared_objective, LR)
        found.append(dict(trainer.sync_tensors()))
    first = [tensor for name, tensor in found[0].items() if ".3.mlp" in name and "lora_B" in name]
    assert first and all(tensor.any() for tensor in first)
    assert all(torch.equal(other[name], tensor) for other in found[1:] for name, tensor in found[0].items())
