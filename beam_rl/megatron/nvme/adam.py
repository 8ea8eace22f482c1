"""An optimizer's own Adam applied to one block: its class does the arithmetic, on views of the block.

Adam works element by element, so a block may end anywhere in a parameter. Knows nothing about files or Megatron.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beam_rl.megatron.nvme.layout import Block, Kind
from beam_rl.megatron.nvme.store import Sections

CPU_PIECE = 2**17  # elements whose state fits into a core's cache: Adam goes over them eight times


@dataclass(frozen=True)
class Target:
    """What a shard belongs to: its values in the model's weight, and where Megatron leaves the gradient of them."""

    weight: Tensor  # (numel,) live; FP32 where the shard has no main copy
    key: Tensor  # whose `.grad` has numel FP32 values when it is time to update


class BlockAdam:
    """Works with one optimizer object, whose parameters and state it exchanges for those of the block at hand."""

    def __init__(self, adam: torch.optim.Optimizer, targets: Sequence[Target]) -> None:
        self.adam, self.targets = adam, targets
        self._scratch: dict[Kind, Tensor] = {}

    def update(self, block: Block, sections: Sections, group: dict[str, Any], updates: int) -> None:
        """One update of a block in place, and of the weights that belong to it.

        Args:
            group: learning rate, weight decay and the like; its "params" are not looked at.
            updates: made before this one.
        """
        moments = {kind: self._as_fp32(kind, sections[kind]) for kind in sections if kind != "main"}
        parts, states, written = [], {}, []
        for shard, begin, at, numel in _pieces(block, sections["exp_avg"].device):
            target = self.targets[shard]
            weight = target.weight[begin : begin + numel]
            part = sections["main"][at : at + numel] if block.has_main else weight.view(-1)
            assert target.key.grad is not None, "an update without gradients"
            part.grad = target.key.grad.view(-1)[begin : begin + numel]
            states[part] = {kind: whole[at : at + numel] for kind, whole in moments.items()}
            parts.append(part)
            if block.has_main:
                written.append((weight, part))
        self._step(parts, states, group, updates)
        for weight, part in written:
            weight.copy_(part)
        for part in parts:
            part.grad = None
        for kind, whole in moments.items():
            if whole is not sections[kind]:
                sections[kind].copy_(whole)

    def _step(self, parts: list[Tensor], states: dict[Tensor, Any], group: dict[str, Any], updates: int) -> None:
        per_parameter = counts_per_parameter(self.adam)
        for state in states.values():
            if per_parameter:
                state["step"] = torch.tensor(float(updates))
        shared = {} if per_parameter else {"step": updates}
        self.adam.param_groups = [{**group, **shared, "params": parts}]
        self.adam.state = defaultdict(dict, states)
        self.adam.step()
        self.adam.param_groups, self.adam.state = [], defaultdict(dict)

    def _as_fp32(self, kind: Kind, values: Tensor) -> Tensor:
        """The values themselves, or an FP32 copy in memory that is used again."""
        if values.dtype == torch.float32:
            return values
        scratch = self._scratch.get(kind)
        if scratch is None or len(scratch) < len(values):
            scratch = self._scratch[kind] = torch.empty_like(values, dtype=torch.float32)
        return scratch[: len(values)].copy_(values)


def counts_per_parameter(adam: torch.optim.Optimizer) -> bool:
    """torch's Adam does; Transformer Engine's fused one has a step for each group."""
    return isinstance(adam, torch.optim.Adam | torch.optim.AdamW)


def _pieces(block: Block, device: torch.device) -> list[tuple[int, int, int, int]]:
    """(shard, begin, at, numel), small ones on a CPU."""
    largest = CPU_PIECE if device.type == "cpu" else block.numel
    return [
        (piece.shard, piece.begin + done, piece.at + done, min(largest, piece.numel - done))
        for piece in block.pieces
        for done in range(0, piece.numel, largest)
    ]
