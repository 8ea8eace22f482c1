"""Beam's attention over packed samples: positions, the core in torch or Transformer Engine, the output gate.

Q and K come normalized and rounded from Megatron's SelfAttention, or as they are where one kernel does that and the rest;
this module gives them positions, attends inside each sample (causal, within the layer's window) and gates the output.
Knows nothing about the rest of the layer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from beam_rl.megatron import compat
from beam_rl.megatron.kernels import gate as gate_kernel
from beam_rl.megatron.kernels import qk_norm
from beam_rl.megatron.kernels.qk_norm import rotate, scaled
from beam_rl.megatron.packing import Pack

SSMAX_LENGTH, SSMAX_EXPONENT = 2048, 0.1


def ssmax_scale(positions: Tensor) -> Tensor:
    """SSMax's factor of a query: (1 + p/2048)^0.1 in FP32, p the position counted from 1. positions: (tokens,) from 0."""
    return torch.exp(SSMAX_EXPONENT * torch.log1p((positions.float() + 1) / SSMAX_LENGTH))


def scalable_softmax(query: Tensor, positions: Tensor) -> Tensor:
    """SSMax: the query by its factor, FP32 inside and one rounding. query: (tokens, heads, dim)."""
    return scaled(query, ssmax_scale(positions))


def attend(query: Tensor, key: Tensor, value: Tensor, pack: Pack, window: int | None, scale: float) -> Tensor:
    """Causal attention inside each sample, over the last `window` tokens (the token itself included; None: all).

    query: (tokens, heads, dim), this rank's rows; key, value: (whole pack, KV heads, dim). Returns (tokens, heads · dim).
    Samples are padded to the longest at their end, where causality hides the padding from every real token.
    """
    distance = pack.distance
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    samples, (here, there) = len(pack.cu_seqlens_q) - 1, pack.stacked
    queries, keys = mask.shape[-2:]

    def stacked(x: Tensor, length: int, rows: Tensor) -> Tensor:
        padded = x.new_zeros(samples * length, *x.shape[1:]).index_copy(0, rows, x)
        return padded.view(samples, length, *x.shape[1:]).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        stacked(query, queries, here),
        stacked(key, keys, there),
        stacked(value, keys, there),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2).reshape(samples * queries, -1).index_select(0, here)


class SdpaCore(MegatronModule):
    """Megatron's core-attention slot without Transformer Engine: torch's attention over padded samples.

    Context-parallel ranks gather each other's keys and values; the backward pass sums what each owes to the others.
    """

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, packed_seq_params: Pack, **_: Any
    ) -> Tensor:
        if self.context_group is not None:
            order = packed_seq_params.gathered_order
            key, value = (
                gather_from_sequence_parallel_region(x, group=self.context_group).index_select(0, order)
                for x in (key, value)
            )
        return attend(query, key, value, packed_seq_params, self.window, self.scale)


if compat.has_transformer_engine():
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    _Core: Any = TEDotProductAttention
else:
    _Core = SdpaCore


class BeamCore(_Core):
    """RoPE (sliding layers) or SSMax (full layers), on a GPU with the norms of Q and K; then the core attention."""

    norms: tuple[Any, Any]  # of Q and K: the attention's modules

    def __init__(self, config: Any, layer_number: int, **kwargs: Any) -> None:
        super().__init__(config=config, layer_number=layer_number, **kwargs)
        self.rope_theta = None if config.no_rope_freq[layer_number - 1] else config.rope_theta

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, packed_seq_params: Pack, **kwargs: Any
    ) -> Tensor:
        query, key = self.placed(query, key, packed_seq_params)
        return super().forward(query, key, value, mask, packed_seq_params=packed_seq_params, **kwargs)

    def placed(self, query: Tensor, key: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
        """Q and K, (tokens, heads, dim), with their positions."""
        if qk_norm.fuses(query, self.norms[0].weight):
            return self._normalized_and_placed(query, key, pack)
        if self.rope_theta is None:
            return scalable_softmax(query, pack.positions), key
        cos, sin = pack.rotary(self.rope_theta, query.size(-1))
        return rotate(query, cos, sin), rotate(key, cos, sin)

    def _normalized_and_placed(self, query: Tensor, key: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
        of_query: tuple[Tensor | None, ...] = (None, None, ssmax_scale(pack.positions))
        of_key: tuple[Tensor | None, ...] = (None, None, None)
        if self.rope_theta is not None:
            of_query = of_key = (*pack.rotary(self.rope_theta, query.size(-1)), None)
        q_norm, k_norm = self.norms
        return (
            qk_norm.Fused.apply(query, q_norm.weight, q_norm.eps, *of_query),
            qk_norm.Fused.apply(key, k_norm.weight, k_norm.eps, *of_key),
        )


class BeamSelfAttention(SelfAttention):
    """Megatron's SelfAttention with Beam's output gate: full width, and one bias a head."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads = self.num_attention_heads_per_partition
        self.gate_bias = nn.Parameter(torch.zeros(heads, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(self.gate_bias, True, 0, 1)
        self.core_attention.norms = (self.q_layernorm, self.k_layernorm)  # in a tuple: no modules of the core's own

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x: (tokens, 1, heads · dim); gate: (tokens, 1, heads, dim). Bias, sigmoid and product each round."""
        return gate_kernel.output_gate(x, gate.squeeze(1), self.gate_bias)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state |= make_sharded_tensors_for_checkpoint(
            {"gate_bias": self.gate_bias},
            prefix,
            {"gate_bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state
