"""LoRA of dense layers at decode in two kernels: shrink, t = x Aᵀ in partial sums, and expand, y += t Bᵀ.

The partial sums over the hidden size are added by expand itself: nothing to clear, no atomics, the same bits each time.
One layer has up to four slices (such as q, k and v) side by side in y, each with its own A and B. A slot that is
none of the adapter's, such as −1, means a token without LoRA.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SLICES = 4


@dataclass(frozen=True)
class Tiles:
    """How the two kernels cut their work; found by a sweep on one H200 at rank 64, 32 tokens."""

    shrink_k: int = 128
    shrink_splits: int = 4
    shrink_ranks: int = 32
    shrink_warps: int = 4
    shrink_stages: int = 3
    expand_n: int = 64
    expand_warps: int = 4


@triton.jit
def _choose(i, a, b, c, d):
    return tl.where(i == 0, a, tl.where(i == 1, b, tl.where(i == 2, c, d)))


@triton.jit
def _linear_shrink_kernel(
    x, a0, a1, a2, a3, out, slot_of_token,
    tokens, hidden, x_row, a_slot, a_rank,
    RANK: tl.constexpr, SLICES: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[split, slice, token, rank] = x · A[slice]ᵀ over the split's part of the hidden size."""
    split, token_block = tl.program_id(0), tl.program_id(2)
    rank_blocks: tl.constexpr = (RANK + BR - 1) // BR
    part, rank_block = tl.program_id(1) // rank_blocks, tl.program_id(1) % rank_blocks
    token = token_block * BM + tl.arange(0, BM)
    valid = token < tokens
    r = rank_block * BR + tl.arange(0, BR)
    a = _choose(part, a0, a1, a2, a3)
    per_split = tl.cdiv(tl.cdiv(hidden, BK), SPLITS) * BK
    first = split * per_split
    last = tl.minimum(first + per_split, hidden)
    slot = tl.load(slot_of_token + token, mask=valid, other=-1)
    total = tl.zeros((BM, BR), tl.float32)
    for s in tl.static_range(SLOTS):
        mine = valid & (slot == s)
        end = last
        if SLOTS > 1:
            end = tl.where(tl.max(mine.to(tl.int32), 0) > 0, last, first)
        for k0 in range(first, end, BK):
            k = k0 + tl.arange(0, BK)
            inside = k < last
            rows = tl.load(x + token[:, None] * x_row + k[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            cols = tl.load(a + r[:, None] * a_rank + k[None, :], mask=(r < RANK)[:, None] & inside[None, :], other=0.0)
            total = tl.dot(rows, tl.trans(cols), total)
        a += a_slot
    places = out + ((split * SLICES + part) * tokens + token)[:, None] * RANK + r[None, :]
    tl.store(places, total, mask=valid[:, None] & (r < RANK)[None, :])


@triton.jit
def _linear_expand_kernel(
    t, b0, b1, b2, b3, y, slot_of_token,
    tokens, y_row, n0, n1, n2, n3,
    RANK: tl.constexpr, RANKS: tl.constexpr, SLICES: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y[:, slice] += t[slice] · B[slice]ᵀ; each program has BN columns of one slice."""
    tile, token_block = tl.program_id(0), tl.program_id(1)
    part = 0
    column = 0  # where the slice begins in y
    width = n0
    if SLICES > 1:
        for i in tl.static_range(SLICES - 1):
            tiles = tl.cdiv(_choose(i, n0, n1, n2, n3), BN)
            if (part == i) & (tile >= tiles):
                tile -= tiles
                column += _choose(i, n0, n1, n2, n3)
                part = i + 1
                width = _choose(i + 1, n0, n1, n2, n3)
    token = token_block * BM + tl.arange(0, BM)
    valid = token < tokens
    r = tl.arange(0, RANKS)
    n = tile * BN + tl.arange(0, BN)
    b_at = _choose(part, b0, b1, b2, b3) + n[None, :] * RANK + r[:, None]
    b_mask = (n < width)[None, :] & (r < RANK)[:, None]
    dtype = y.dtype.element_ty
    b = tl.load(b_at, mask=b_mask, other=0.0)
    slot = tl.load(slot_of_token + token, mask=valid, other=-1)
    total = tl.zeros((BM, RANKS), tl.float32)
    for split in tl.static_range(SPLITS):
        places = t + ((split * SLICES + part) * tokens + token)[:, None] * RANK + r[None, :]
        total += tl.load(places, mask=valid[:, None] & (r < RANK)[None, :], other=0.0)
    delta = tl.dot(tl.where((slot == 0)[:, None], total, 0.0).to(dtype), b)
    for s in tl.static_range(1, SLOTS):
        b_at += width * RANK
        b = tl.load(b_at, mask=b_mask, other=0.0)
        delta = tl.dot(tl.where((slot == s)[:, None], total, 0.0).to(dtype), b, delta)
    places = y + token[:, None].to(tl.int64) * y_row + (column + n)[None, :]
    mask = valid[:, None] & (n < width)[None, :]
    total = tl.load(places, mask=mask, other=0.0).to(tl.float32) + delta.to(dtype).to(tl.float32)
    tl.store(places, total.to(dtype), mask=mask)


def supported(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether the slots have the form that the kernels read: contiguous, one rank, at most four slices."""
    return (
        len(a) == len(b) <= MAX_SLICES
        and all(t.is_contiguous() for t in (*a, *b))
        and len({t.shape[-2] for t in a} | {t.shape[-1] for t in b}) == 1
    )


def shrink(x: Tensor, a: Sequence[Tensor], slots: Tensor, tiles: Tiles) -> Tensor:
    """x Aᵀ of each slice.

    Args:
        x: (tokens, hidden). a: (slots, 1, rank, hidden) of each slice. slots: (≥ tokens,) int32 slot of each token.
    Returns:
        (splits, slices, tokens, rank) FP32 partial sums.
    """
    tokens, hidden = x.shape
    rank = a[0].shape[-2]
    block = _token_block(tokens)
    t = torch.empty(tiles.shrink_splits, len(a), tokens, rank, dtype=torch.float32, device=x.device)
    ranks = min(tiles.shrink_ranks, _ranks(rank))
    grid = (tiles.shrink_splits, len(a) * triton.cdiv(rank, ranks), triton.cdiv(tokens, block))
    _linear_shrink_kernel[grid](
        x, *_four(a), t, slots, tokens, hidden, x.stride(0), a[0].stride(0), a[0].stride(-2),
        RANK=rank, SLICES=len(a), SLOTS=a[0].shape[0], SPLITS=tiles.shrink_splits, BM=block, BR=ranks,
        BK=tiles.shrink_k, num_warps=tiles.shrink_warps, num_stages=tiles.shrink_stages,
    )  # fmt: skip
    return t


def expand(y: Tensor, t: Tensor, b: Sequence[Tensor], slots: Tensor, tiles: Tiles) -> None:
    """y += t Bᵀ slice by slice.

    Args:
        y: (tokens, sum of the slices' widths). t: what `shrink` gave. b: (slots, 1, width, rank) of each slice.
    """
    splits, _, tokens, rank = t.shape
    block, widths = _token_block(tokens), [s.shape[-2] for s in b]
    _linear_expand_kernel[(sum(triton.cdiv(w, tiles.expand_n) for w in widths), triton.cdiv(tokens, block))](
        t, *_four(b), y, slots, tokens, y.stride(0), *_four(widths),
        RANK=rank, RANKS=_ranks(rank), SLICES=len(b), SLOTS=b[0].shape[0], SPLITS=splits, BM=block,
        BN=tiles.expand_n, num_warps=tiles.expand_warps,
    )  # fmt: skip


def _token_block(tokens: int) -> int:
    return min(64, max(16, triton.next_power_of_2(tokens)))


def _ranks(rank: int) -> int:
    """The rank as a power of two, and 16 at least for the tensor cores."""
    return max(16, triton.next_power_of_2(rank))


def _four(values: Sequence) -> list:
    """Filled up with the last one: kernels take four of each."""
    return [*values, *[values[-1]] * (MAX_SLICES - len(values))]


def reference(x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], slots: Tensor) -> Tensor:
    """What `shrink` and `expand` add, in plain torch: (tokens, sum of widths), rounded as the kernels round."""
    dtype, rows = x.dtype, []
    for row, slot in zip(x, slots[: len(x)].tolist(), strict=True):
        parts, held = [], 0 <= slot < len(a[0])
        for a_slice, b_slice in zip(a, b, strict=True):
            t = (row.float() @ a_slice[slot * held, 0].float().T).to(dtype).float()
            parts.append((b_slice[slot * held, 0].float() @ t).to(dtype) * held)
        rows.append(torch.cat(parts))
    return torch.stack(rows)
