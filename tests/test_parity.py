"""The parity tool finds faults that people make, and names the layer and the sub-layer.

Each fault is planted in the trainer, compared with transformers, and taken away again. The first layers with each kind
of sub-layer: 0 is dense and sliding, 3 is sparse, 5 is the first with full attention.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import megatron_tiny as tiny
import numpy as np
import pytest
import torch
from torch import Tensor

from beam_rl.megatron import attention, logprobs, router
from beam_rl.megatron.model import BeamRMSNorm, SandwichResidual
from beam_rl.megatron.probe import probe, replaced
from beam_rl.megatron.trainer import Trainer
from beam_rl.parity.check import LOGPROB_MEAN_BOUND, SUBLAYER_BOUND
from beam_rl.parity.compare import Comparison, Side, compare
from beam_rl.parity.record import AFTER, BEFORE, LAYER, Records, concatenate
from beam_rl.parity.reference import Reference

LENGTHS = (24, 40)
FIRST_SPARSE, FIRST_FULL = 3, 5


@dataclass
class Pair:
    """A trainer and the same checkpoint in transformers, with what the latter says about the tokens."""

    precision: str
    trainer: Trainer
    reference: Side
    sequences: list[tiny.MicroBatch]

    def compare(self) -> Comparison:
        found = probe(self.trainer, self.sequences)
        sides = {"reference": self.reference, "trainer": side([found[i] for i in range(len(self.sequences))])}
        bounds = {"sublayer_bound": SUBLAYER_BOUND, "logprob_mean_bound": LOGPROB_MEAN_BOUND}
        return compare(sides, replayed=True, **{name: by[self.precision] for name, by in bounds.items()})


def side(records: list[Records]) -> Side:
    whole = concatenate(records)
    return Side(whole, whole[None, "log_probabilities"][:, 0])


def make_pair(precision: str) -> Pair:
    settings = tiny.settings(precision=precision, numerics="engine")
    folder = str(tiny.checkpoint(precision))
    trainer = Trainer(folder, settings, 0, 1, tiny.meeting_point())
    reference = Reference(folder, precision, rounded_logits=True, temperature=1.0)
    for name, buffer in [*trainer.model.named_buffers(), *reference.model.named_buffers()]:
        if name.endswith(("expert_bias", "e_score_correction_bias")):
            buffer.add_(8.0)  # for every expert: changes no choice, until somebody rounds it
    sequences = [tiny.micro_batch([n], seed=n) for n in LENGTHS]
    ids = [np.append(s.tokens, 3) for s in sequences]
    sequences = [replace(s, targets=i[1:]) for s, i in zip(sequences, ids, strict=True)]
    found = [reference.probe(i, s.routes) for i, s in zip(ids, sequences, strict=True)]
    return Pair(precision, trainer, side(found), sequences)


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {precision: make_pair(precision) for precision in ("fp32", "bf16")}


# --- the faults -------------------------------------------------------------------------------------------


def softcap_of_x(model: Any) -> AbstractContextManager:
    true = logprobs._Plain._logits

    def logits(self: Any, hidden: Tensor, head: Tensor, keep_tanh: bool) -> Any:
        capped, *buffers = true(self, hidden, head, keep_tanh)
        z = hidden @ head.T
        return capped.copy_(z * torch.tanh(z / self.softcap)), *buffers

    return replaced(logprobs._Plain, "_logits", logits)


def ssmax_from_zero(model: Any) -> AbstractContextManager:
    true = attention.scalable_softmax
    return replaced(attention, "scalable_softmax", lambda query, positions: true(query, positions - 1))


def window_one_longer(model: Any) -> AbstractContextManager:
    core = model.decoder.layers[0].self_attention.core_attention
    return replaced(core, "window", core.window + 1)


@contextmanager
def residual_index_one_more(model: Any) -> Iterator[None]:
    add = model.decoder.layers[1].self_attn_bda  # the 4th add
    with replaced(add, "x_scale", 1 / math.sqrt(5)), replaced(add, "residual_scale", math.sqrt(4 / 5)):
        yield


def residual_added_before_rounding(model: Any) -> AbstractContextManager:
    def add(self: SandwichResidual, out: Any, residual: Tensor, dropout: float) -> Tensor:
        x = self.norm(out[0])
        return (x.float() * self.x_scale + residual.float() * self.residual_scale).to(x.dtype)

    return replaced(SandwichResidual, "add", add)


def factor_twice(model: Any) -> AbstractContextManager:
    return replaced(model.config, "routed_scaling_factor", 2.5 * 2.5)


def correction_bias_in_bf16(model: Any) -> AbstractContextManager:
    true = router.choose_experts
    return replaced(
        router, "choose_experts", lambda scores, bias, *sizes: true(scores, bias.bfloat16().float(), *sizes)
    )


def groups_by_their_best(model: Any) -> AbstractContextManager:
    def choose(scores: Tensor, correction: Tensor, groups: int, top_groups: int, top_k: int) -> Tensor:
        grouped = (scores + correction).view(len(scores), groups, -1)
        best = grouped.amax(-1).topk(top_groups, dim=-1).indices
        closed = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(closed[..., None], -math.inf).flatten(1).topk(top_k, dim=-1).indices

    return replaced(router, "choose_experts", choose)


def gate_without_bias(model: Any) -> AbstractContextManager:
    def apply(self: Any, x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.sigmoid(gate).reshape(x.shape)

    return replaced(attention.BeamSelfAttention, "_apply_output_gate", apply)


def key_and_value_swapped(model: Any) -> AbstractContextManager:
    true = attention.BeamSelfAttention.get_query_key_value_tensors

    def swapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, gate = true(self, *args, **kwargs)
        return query, value, key, gate

    return replaced(attention.BeamSelfAttention, "get_query_key_value_tensors", swapped)


def rope_on_a_nope_layer(model: Any) -> AbstractContextManager:
    return replaced(model.decoder.layers[FIRST_FULL].self_attention.core_attention, "rope_theta", 1e4)


def another_theta(model: Any) -> AbstractContextManager:
    return replaced(model.decoder.layers[2].self_attention.core_attention, "rope_theta", 1e6)


def norm_weight_after_rounding(model: Any) -> AbstractContextManager:
    def forward(self: BeamRMSNorm, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    return replaced(BeamRMSNorm, "forward", forward)


def router_in_bf16(model: Any) -> AbstractContextManager:
    def forward(self: Any, hidden: Tensor, *args: Any) -> Any:
        logits = hidden.view(-1, hidden.size(-1)) @ self.weight.to(hidden.dtype).T
        return self.routing(logits.float(), *args)

    return replaced(router.BeamRouter, "forward", forward)


def weights_not_normalized(model: Any) -> AbstractContextManager:
    return replaced(router, "expert_weights", lambda scores, experts: scores.gather(1, experts))


def no_query_norm(model: Any) -> AbstractContextManager:
    return replaced(model.decoder.layers[4].self_attention.q_layernorm, "forward", lambda x: x)


@contextmanager
def embedding_rounded(model: Any) -> Iterator[None]:
    hook = model.embedding.register_forward_hook(lambda m, i, out: out.bfloat16().float())
    with ExitStack() as stack:
        stack.callback(hook.remove)
        yield


Fault = Callable[[Any], AbstractContextManager]
FAULTS: list[tuple[Fault, str, int | None, str]] = [
    (embedding_rounded, "fp32", None, "embedding"),
    (key_and_value_swapped, "fp32", 0, "k"),
    (window_one_longer, "fp32", 0, "attention"),
    (gate_without_bias, "fp32", 0, "gate"),
    (residual_index_one_more, "fp32", 1, "residual_attention"),
    (another_theta, "fp32", 2, "q"),
    (correction_bias_in_bf16, "fp32", FIRST_SPARSE, "experts"),
    (groups_by_their_best, "fp32", FIRST_SPARSE, "experts"),
    (weights_not_normalized, "fp32", FIRST_SPARSE, "experts"),
    (factor_twice, "fp32", FIRST_SPARSE, "mlp"),
    (no_query_norm, "fp32", 4, "q"),
    (ssmax_from_zero, "fp32", FIRST_FULL, "q"),
    (rope_on_a_nope_layer, "fp32", FIRST_FULL, "q"),
    (softcap_of_x, "fp32", None, "logits"),
    (norm_weight_after_rounding, "bf16", 0, "input_norm"),
    (residual_added_before_rounding, "bf16", 0, "residual_attention"),
    (router_in_bf16, "bf16", FIRST_SPARSE, "router_logits"),
    (gate_without_bias, "bf16", 0, "gate"),
    (factor_twice, "bf16", FIRST_SPARSE, "mlp"),
]


@pytest.mark.parametrize(
    ("fault", "precision", "layer", "sublayer"), FAULTS, ids=[f"{f.__name__}-{p}" for f, p, _, _ in FAULTS]
)
def test_a_planted_fault_is_named_at_its_layer_and_sublayer(
    pairs: dict[str, Pair], fault: Fault, precision: str, layer: int | None, sublayer: str
) -> None:
    pair = pairs[precision]
    with fault(pair.trainer.model):
        found = pair.compare()
    first = found.first_departure
    assert not found.within_bounds
    assert first is not None and (first.pair, first.layer, first.sublayer) == ("trainer_reference", layer, sublayer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_fault_trainer_and_reference_agree_at_every_sublayer(pairs: dict[str, Pair], precision: str) -> None:
    found = pairs[precision].compare()
    errors = found.errors["trainer_reference"]
    dense, sparse = [name for name in LAYER if name not in ("router_logits", "experts")], list(LAYER)
    names = [(None, n) for n in BEFORE] + [(i, n) for i in range(7) for n in (dense if i < 3 else sparse)]
    assert list(errors) == [*names, *((None, n) for n in AFTER)]
    assert found.within_bounds and found.first_departure is None
    assert max(errors.values()) < {"fp32": 1e-6, "bf16": 5e-3}[precision]


def test_a_probe_leaves_nothing_behind(pairs: dict[str, Pair]) -> None:
    model = pairs["fp32"].trainer.model

    def state() -> list[Any]:
        per_module = [(dict(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        return [[sorted(attributes), hooks, pre] for attributes, hooks, pre in per_module]

    before, settings = state(), pairs["fp32"].trainer.settings
    pairs["fp32"].compare()
    assert state() == before and pairs["fp32"].trainer.settings is settings
    assert logprobs._softmax.__name__ == "_softmax" and attention.SdpaCore.forward.__name__ == "forward"
