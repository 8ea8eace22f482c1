"""What travels with one micro-batch through every layer: where its samples lie, their positions, their routes.

Megatron hands one `packed_seq_params` object to each layer, also when it recomputes a layer in the backward pass and
when a pipeline has several micro-batches in flight. Whatever belongs to a micro-batch therefore lives here and nowhere
in the layers. Knows nothing about the model.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class Agreement:
    """How often the router, left alone, would have chosen the very set of experts that was replayed."""

    agree: int = 0
    total: int = 0  # (token, MoE layer) pairs


@dataclass
class Pack(PackedSeqParams):
    """Samples laid end to end.

    cu_seqlens_q: (samples + 1,) int32, where each sample begins, and at last the number of tokens.
    routes: (tokens, MoE layers, top-k) int64 expert ids to replay, MoE layers in the model's order; None: route freely.
    agreement: filled by the routers when present; set it only for passes without recomputation, which counts twice.
    """

    routes: Tensor | None = None
    agreement: Agreement | None = None
    _rotary: dict[tuple[float, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def lengths(self) -> Tensor:
        return (self.cu_seqlens_q[1:] - self.cu_seqlens_q[:-1]).long()

    @cached_property
    def sample(self) -> Tensor:
        """(tokens,) the sample of each token."""
        lengths = self.lengths
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    @cached_property
    def positions(self) -> Tensor:
        """(tokens,) the place of each token in its sample, from 0."""
        starts = self.cu_seqlens_q[:-1].long()
        tokens = torch.arange(int(self.cu_seqlens_q[-1]), device=starts.device)
        return tokens - starts[self.sample]

    @cached_property
    def padded_row(self) -> Tensor:
        """(tokens,) the row of each token when samples are padded to the longest and stacked."""
        return self.sample * self.max_seqlen_q + self.positions

    def rotary(self, theta: float, dim: int) -> tuple[Tensor, Tensor]:
        """FP32 cos and sin, (tokens, dim), the half-split layout: frequencies repeat in the second half."""
        if (theta, dim) not in self._rotary:
            exponent = torch.arange(0, dim, 2, dtype=torch.float, device=self.positions.device) / dim
            angle = self.positions[:, None].float() * (1.0 / theta**exponent)
            angle = torch.cat((angle, angle), dim=-1)
            self._rotary[theta, dim] = (angle.cos(), angle.sin())
        return self._rotary[theta, dim]


def pack(cu_tokens: Tensor, routes: Tensor | None = None, agreement: Agreement | None = None) -> Pack:
    """The `Pack` for samples that begin at `cu_tokens[:-1]` and end at `cu_tokens[1:]`."""
    longest = int((cu_tokens[1:] - cu_tokens[:-1]).max())
    cu_tokens = cu_tokens.to(torch.int32)
    return Pack(
        qkv_format="thd",
        cu_seqlens_q=cu_tokens,
        cu_seqlens_kv=cu_tokens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        routes=routes,
        agreement=agreement,
    )
