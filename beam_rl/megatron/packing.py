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

from beam_rl.layout import context_rows


@dataclass
class Agreement:
    """How often the router, left alone, would have chosen the very set of experts that was replayed.

    counts: (router's tokens,) bool, the tokens to count: padding is none of them.
    """

    counts: Tensor
    agree: Tensor | int = 0
    total: Tensor | int = 0  # (token, MoE layer) pairs


@dataclass
class Pack(PackedSeqParams):
    """Samples laid end to end, of which a context-parallel rank holds some rows.

    cu_seqlens_q: (samples + 1,) int32, where each sample begins, and at last the number of tokens; of the whole samples.
    routes: (router's tokens, MoE layers on this rank, top-k) expert ids to replay; None: route freely.
    agreement: filled by the routers when present; set it only for passes without recomputation, which counts twice.
    context: the number of context-parallel ranks, and this one's index.
    """

    routes: Tensor | None = None
    agreement: Agreement | None = None
    context: tuple[int, int] = (1, 0)
    _rotary: dict[tuple[float, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def rows(self) -> Tensor:
        """(tokens,) this rank's rows of the whole pack."""
        cp, index = self.context
        if cp == 1:
            return torch.arange(int(self.cu_seqlens_q[-1]), device=self.cu_seqlens_q.device)
        return self._rows_of(index)

    @cached_property
    def gathered_order(self) -> Tensor:
        """(whole pack,) where each row of the pack is when all context-parallel ranks' rows stand one after another."""
        return torch.cat([self._rows_of(index) for index in range(self.context[0])]).argsort()

    def _rows_of(self, index: int) -> Tensor:
        rows = context_rows(self.cu_seqlens_q.cpu().numpy(), self.context[0], index)
        return torch.from_numpy(rows).to(self.cu_seqlens_q.device)

    @cached_property
    def whole_sample(self) -> Tensor:
        """(whole pack,) the sample of each token."""
        lengths = (self.cu_seqlens_q[1:] - self.cu_seqlens_q[:-1]).long()
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    @cached_property
    def whole_positions(self) -> Tensor:
        """(whole pack,) the place of each token in its sample, from 0."""
        tokens = torch.arange(len(self.whole_sample), device=self.whole_sample.device)
        return tokens - self.cu_seqlens_q.long()[self.whole_sample]

    @cached_property
    def positions(self) -> Tensor:
        """(tokens,) the place of each token in its sample, from 0."""
        return self.whole_positions[self.rows]

    @cached_property
    def stacked(self) -> tuple[Tensor, Tensor]:
        """Where tokens go when samples are padded to the longest and stacked: (tokens,) here, (whole pack,) there."""
        sample, cp = self.whole_sample[self.rows], self.context[0]
        first = self.cu_seqlens_q.long()[sample] // cp  # samples are cut evenly, so they begin at these rows here
        here = torch.arange(len(sample), device=sample.device) - first
        longest = self.max_seqlen_q
        return sample * (longest // cp) + here, self.whole_sample * longest + self.whole_positions

    @cached_property
    def distance(self) -> Tensor:
        """(samples or 1, 1, queries, keys) how far back a key lies, in stacked samples; negative for later keys."""
        key = torch.arange(self.max_seqlen_q, device=self.positions.device)
        if self.context[0] == 1:
            return (key[:, None] - key[None])[None, None]
        samples, queries = len(self.cu_seqlens_q) - 1, self.max_seqlen_q // self.context[0]
        position = key.new_zeros(samples * queries).index_copy(0, self.stacked[0], self.positions)
        return (position.view(samples, queries, 1) - key)[:, None]

    def rotary(self, theta: float, dim: int) -> tuple[Tensor, Tensor]:
        """FP32 cos and sin, (tokens, dim), the half-split layout: frequencies repeat in the second half."""
        if (theta, dim) not in self._rotary:
            exponent = torch.arange(0, dim, 2, dtype=torch.float, device=self.positions.device) / dim
            angle = self.positions[:, None].float() * (1.0 / theta**exponent)
            angle = torch.cat((angle, angle), dim=-1)
            self._rotary[theta, dim] = (angle.cos(), angle.sin())
        return self._rotary[theta, dim]


def pack(
    cu_tokens: Tensor,
    routes: Tensor | None = None,
    agreement: Agreement | None = None,
    context: tuple[int, int] = (1, 0),
) -> Pack:
    """The `Pack` for samples that begin at `cu_tokens[:-1]` and end at `cu_tokens[1:]`."""
    longest = int((cu_tokens[1:] - cu_tokens[:-1]).max())
    cu_tokens = cu_tokens.to(torch.int32)
    return Pack(
        qkv_format="thd",
        cu_seqlens_q=cu_tokens,
        cu_seqlens_kv=cu_tokens,
        # Where Transformer Engine cuts samples for context parallelism: at their ends, the padding in them included.
        cu_seqlens_q_padded=cu_tokens if context[0] > 1 else None,
        cu_seqlens_kv_padded=cu_tokens if context[0] > 1 else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        routes=routes,
        agreement=agreement,
        context=context,
    )
