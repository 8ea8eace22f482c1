"""Routed experts in plain torch, for vLLM on a CPU.

Promises: the weights stay as the checkpoint has them (so a weight update is a copy), SiLU and the product in FP32, and a
token's result that does not depend on which other tokens run in the step: its experts are summed in FP32 in the order of
its own top-k list, and rounded once. Knows nothing about routing or weight transfer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from beam_rl.mxfp8.format import rounded
from beam_rl.rollout import compat
from beam_rl.rollout.low_rank import RowSlots, add_low_rank

LowRank = tuple[Tensor, Tensor]  # A (slots, experts, rank, inputs) and B (slots, experts, outputs, rank)
Operand = Callable[[Tensor], Tensor]


def plain_operand(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class ExpertAdapters:
    """What each expert's three projections get added, by the slot of the token: (tokens,), −1 for none."""

    slots: Tensor
    gate: LowRank
    up: LowRank
    down: LowRank


def mix_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    adapters: ExpertAdapters | None = None,
    operand: Operand = plain_operand,
) -> Tensor:
    """SwiGLU experts of each token, weighted and summed.

    Args:
        x: (tokens, hidden) activations.
        gate_up: (experts, 2 · intermediate, hidden), gate's rows first. down: (experts, hidden, intermediate).
        weights, ids: (tokens, top_k) of each token's experts.
        operand: what the experts' weights are multiplied with, made of the activations; adapters get those.
    Returns:
        (tokens, hidden) FP32 sum over the token's experts, in the order of `ids`.
    """
    tokens, top_k = ids.shape
    by_expert = ids.flatten().long().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=gate_up.shape[0]).tolist()
    rows = x[by_expert // top_k]
    inner = x.new_empty(len(rows), gate_up.shape[1])
    outer = x.new_empty(len(rows), x.shape[1])
    spans = [(e, sum(counts[:e]), sum(counts[: e + 1])) for e in range(len(counts)) if counts[e]]
    left = operand(rows)
    for e, start, end in spans:
        torch.mm(left[start:end], gate_up[e].t(), out=inner[start:end])
    gate, up = inner.chunk(2, -1)
    if adapters is not None:
        slots = RowSlots(adapters.slots[by_expert // top_k])
        _add_adapters(gate, rows, adapters.gate, slots, spans)
        _add_adapters(up, rows, adapters.up, slots, spans)
    active = (F.silu(gate.float()) * up.float()).to(x.dtype)
    left = operand(active)
    for e, start, end in spans:
        torch.mm(left[start:end], down[e].t(), out=outer[start:end])
    if adapters is not None:
        _add_adapters(outer, active, adapters.down, slots, spans)
    in_order = torch.empty_like(outer)
    in_order[by_expert] = outer
    return (in_order.view(tokens, top_k, -1).float() * weights.float()[..., None]).sum(1)


def _add_adapters(
    out: Tensor, x: Tensor, low_rank: LowRank, slots: RowSlots, spans: list[tuple[int, int, int]]
) -> None:
    """Adds B·A·x of each row's expert and slot; `spans` are (expert, first row, last row + 1)."""
    a, b = low_rank
    for slot, mask in slots.masks(x):
        for e, start, end in spans:
            rows = None if mask is None else mask[start:end]
            add_low_rank(out[start:end], x[start:end], a[slot, e], b[slot, e], rows)


class TorchExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """vLLM's expert kernel interface over `mix_experts`."""

    operand: Operand = staticmethod(plain_operand)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to do: no prepacking (see `compat.plain_expert_method`)."""

    def apply(self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor,
              topk_ids: Tensor, *unused: Any, **also_unused: Any) -> None:  # fmt: skip
        adapters = None if (held := compat.expert_adapters(self, len(hidden_states))) is None else ExpertAdapters(*held)
        output.copy_(mix_experts(hidden_states, w1, w2, topk_weights, topk_ids, adapters, self.operand))


class RoundingExperts(TorchExperts):
    """Multiplies with inputs rounded to MXFP8."""

    operand: Operand = staticmethod(rounded)


class PlainExperts(RoutedExperts):
    """vLLM's holder of expert weights, bound to `TorchExperts`."""

    kernel: type = TorchExperts

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        if quant_config is not None:
            raise ValueError("quantized experts can't run on a CPU; they need a GPU")
        if moe_config.activation.value != "silu" or moe_config.has_bias:
            raise ValueError(
                f"experts on a CPU are SwiGLU without biases; this model's are {moe_config.activation.value}"
            )
        return compat.plain_expert_method(moe_config, self.kernel)


class Mxfp8Experts(PlainExperts):
    """The same, bound to `RoundingExperts`."""

    kernel = RoundingExperts
