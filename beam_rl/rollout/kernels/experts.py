"""LoRA of routed experts in four kernels, two of which take the place of kernels that run without LoRA too.

An expert layer without LoRA is: gate-up GEMM, SiLU and product, down GEMM, weighted sum over the token's experts. Here:

    shrink      t1 = x A1ᵀ                                                  may run beside the gate-up GEMM
    activate    a = SiLU(gate + t1 B_gateᵀ) · (up + t1 B_upᵀ), t2 = a A2ᵀ    in the place of SiLU and product
    expand      delta = Σ over experts weight · t2 B2ᵀ                      may run beside the down GEMM
    combine     y = delta + Σ over experts down                             in the place of the sum

so what LoRA costs is hardly more than the reading of its own weights. A rank of 8 is too small for a GEMM of its own: what
counts is that each adapter byte is read once, in the shadow of what has to run anyway. Sums over a long dimension are
split over programs into partial sums, which the next kernel adds: no atomics, so the same input gives the same bits.

The rows of all intermediates are pairs: token · top_k + position in the token's top-k list. `Blocks` says which pairs
share an expert; it is what the base GEMM uses. A slot that is none of the
adapter's, such as −1, means a token without LoRA: vLLM leaves what it likes in the rows that pad a step.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Pairs grouped by expert, each group padded to whole blocks of `size` pairs."""

    experts: Tensor  # (blocks,) int32 expert of each block, −1 for none
    pairs: Tensor | None  # (blocks · size,) int32, ≥ number of pairs where padded; None: block i is pair i alone
    padded: Tensor | None  # (1,) int32 length of `pairs` in use
    size: int


@dataclass(frozen=True)
class ExpertAdapter:
    """Slots of one layer's expert adapters; each expert's part contiguous.

    a_in: (slots, experts, rank, hidden) of gate and of up, or of the two fused; b_in: (slots, experts, inner, rank) of gate
    and of up, or one (slots, experts, 2 · inner, rank), gate's rows first; a_out: (slots, experts, rank, inner); b_out:
    (slots, experts, hidden, rank).
    """

    a_in: tuple[Tensor, ...]
    b_in: tuple[Tensor, ...]
    a_out: Tensor
    b_out: Tensor


@dataclass(frozen=True)
class Tiles:
    """How the kernels cut their work; found by sweeps on one H200 at rank 8 and 32 tokens."""

    shrink_k: int = 128
    shrink_splits: int = 4
    shrink_warps: int = 1
    shrink_stages: int = 3
    activate_n: int = 64
    activate_warps: int = 1
    expand_n: int = 64
    expand_warps: int = 1
    combine_n: int = 256
    combine_warps: int = 1


@triton.jit
def _block(experts, pairs, padded, block, n_pairs, SORTED: tl.constexpr, BM: tl.constexpr):
    """(expert, pairs) of a block; the expert is −1 where nothing is to be done."""
    lane = tl.arange(0, BM)
    expert = tl.load(experts + block)
    if SORTED:
        expert = tl.where(block * BM < tl.load(padded), expert, -1)
        pair = tl.load(pairs + block * BM + lane)
    else:
        pair = tl.where(lane == 0, block, n_pairs)
    return expert.to(tl.int64), pair


@triton.jit
def _expert_shrink_kernel(
    x, a_gate, a_up, out, slot_of_token, experts, pairs, padded,
    n_pairs, hidden, x_row, a_slot, a_expert, a_rank,
    TOP_K: tl.constexpr, RANK: tl.constexpr, HALVES: tl.constexpr, COLS: tl.constexpr, SLOTS: tl.constexpr,
    SORTED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """out[split, pair, :] = x[token] · [A_gate; A_up]ᵀ over the split's part of the hidden size; a block a program."""
    block, split = tl.program_id(0), tl.program_id(1)
    expert, pair = _block(experts, pairs, padded, block, n_pairs, SORTED, BM)
    if expert < 0:
        return
    valid = pair < n_pairs
    token = tl.where(valid, pair // TOP_K, 0)
    col = tl.arange(0, COLS)
    used = col < RANK * HALVES
    a = tl.where(col < RANK, a_gate, a_up) + expert * a_expert + (col % RANK) * a_rank
    per_split = tl.cdiv(tl.cdiv(hidden, BK), SPLITS) * BK
    first = split * per_split
    last = tl.minimum(first + per_split, hidden)
    slot = tl.load(slot_of_token + token, mask=valid, other=-1)
    total = tl.zeros((BM, COLS), tl.float32)
    for s in tl.static_range(SLOTS):
        end = last
        if SLOTS > 1:
            end = tl.where(tl.max((slot == s).to(tl.int32), 0) > 0, last, first)
        of_slot = tl.zeros((BM, COLS), tl.float32)
        for k0 in range(first, end, BK):
            k = k0 + tl.arange(0, BK)
            inside = k < last
            rows = tl.load(x + token[:, None] * x_row + k[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
            part = tl.load(a[:, None] + k[None, :], mask=used[:, None] & inside[None, :], other=0.0)
            of_slot = tl.dot(rows, tl.trans(part), of_slot)
        total = tl.where((slot == s)[:, None], of_slot, total)
        a += a_slot
    places = out + (split * n_pairs + pair)[:, None] * (RANK * HALVES) + col[None, :]
    tl.store(places, total, mask=valid[:, None] & used[None, :])


@triton.jit
def _expert_activate_kernel(
    gate_up, t_in, b_gate, b_up, a_out, active, t_out, ids, slot_of_token,
    n_pairs, inner, gate_up_row, active_row, b_slot, b_expert, a_slot, a_expert, a_rank,
    TOP_K: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, HALVES: tl.constexpr, SLOTS: tl.constexpr,
    SPLITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds gate's and up's LoRA, applies SiLU and the product, multiplies the result with A of down; a pair a program."""
    pair, part = tl.program_id(0), tl.program_id(1)
    n = part * BN + tl.arange(0, BN)
    inside = n < inner
    gate = tl.load(gate_up + pair.to(tl.int64) * gate_up_row + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + pair.to(tl.int64) * gate_up_row + inner + n, mask=inside, other=0.0).to(tl.float32)
    expert = tl.load(ids + pair).to(tl.int64)
    slot = tl.load(slot_of_token + pair // TOP_K).to(tl.int64)
    dtype = active.dtype.element_ty
    r = tl.arange(0, RANKS)
    used = (r < RANK) & (slot >= 0) & (slot < SLOTS) & (expert >= 0)
    t_gate = tl.zeros((RANKS,), tl.float32)
    t_up = tl.zeros((RANKS,), tl.float32)
    for split in tl.static_range(SPLITS):
        places = t_in + (split * n_pairs + pair) * (RANK * HALVES) + r
        t_gate += tl.load(places, mask=r < RANK, other=0.0)
        t_up += tl.load(places + RANK * (HALVES - 1), mask=r < RANK, other=0.0)  # a fused A serves both
    b_at = slot * b_slot + expert * b_expert + n[:, None] * RANK + r[None, :]
    b_mask = inside[:, None] & used[None, :]
    bg = tl.load(b_gate + b_at, mask=b_mask, other=0.0).to(tl.float32)
    bu = tl.load(b_up + b_at, mask=b_mask, other=0.0).to(tl.float32)
    a_at = a_out + slot * a_slot + expert * a_expert + r[:, None] * a_rank + n[None, :]
    a = tl.load(a_at, mask=used[:, None] & inside[None, :], other=0.0).to(tl.float32)

    gate_delta = tl.sum(bg * t_gate.to(dtype).to(tl.float32)[None, :], 1)
    up_delta = tl.sum(bu * t_up.to(dtype).to(tl.float32)[None, :], 1)
    gate = (gate + gate_delta.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    up = (up + up_delta.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    product = (gate / (1.0 + tl.exp(-gate)) * up).to(dtype)
    tl.store(active + pair.to(tl.int64) * active_row + n, product, mask=inside)
    t = tl.sum(a * product.to(tl.float32)[None, :], 1)
    tl.store(t_out + (part * n_pairs + pair) * RANK + r, t, mask=r < RANK)


@triton.jit
def _expert_expand_kernel(
    t_out, b_out, weights, ids, slot_of_token, delta,
    n_pairs, hidden, b_slot, b_expert,
    TOP_K: tl.constexpr, RANK: tl.constexpr, COLS: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
    PARTS2: tl.constexpr, VECTOR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """delta[token] = Σ over the token's experts of weight · t2 · B2ᵀ.

    The adapters of the token's experts stand side by side as one matrix of top_k · rank columns.
    """
    token, tile = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    inside = n < hidden
    col = tl.arange(0, COLS)
    used = col < TOP_K * RANK
    pair, r = token * TOP_K + col // RANK, col % RANK
    expert = tl.load(ids + pair, mask=used, other=0).to(tl.int64)
    slot = tl.load(slot_of_token + token).to(tl.int64)
    part = tl.arange(0, PARTS2)
    places = t_out + (part[:, None] * n_pairs + pair[None, :]) * RANK + r[None, :]
    parts = tl.load(places, mask=(part < PARTS)[:, None] & used[None, :], other=0.0)
    weight = tl.load(weights + pair, mask=used, other=0.0)
    offsets = expert[None, :] * b_expert + n[:, None] * RANK + r[None, :]
    offsets = tl.max_contiguous(tl.multiple_of(offsets, (1, VECTOR)), (1, VECTOR))
    used &= (slot >= 0) & (slot < SLOTS) & (expert >= 0)
    b_mask = inside[:, None] & used[None, :]
    b = tl.load(b_out + slot * b_slot + offsets, mask=b_mask, other=0.0)
    t = weight * tl.sum(parts, 0).to(b_out.dtype.element_ty).to(tl.float32)
    tl.store(delta + token * hidden + n, tl.sum(b.to(tl.float32) * t[None, :], 1), mask=inside)


@triton.jit
def _expert_combine_kernel(
    down, delta, y, hidden, down_row, y_row, TOP_K: tl.constexpr, TOP_K2: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """y[token] = delta[token] + Σ over the token's experts of down, which is weighted already."""
    token, tile = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    inside = n < hidden
    j = tl.arange(0, TOP_K2)
    places = down + (token * TOP_K + j)[:, None].to(tl.int64) * down_row + n[None, :]
    rows = tl.load(places, mask=(j < TOP_K)[:, None] & inside[None, :], other=0.0)
    total = tl.load(delta + token * hidden + n, mask=inside, other=0.0) + tl.sum(rows.to(tl.float32), 0)
    tl.store(y + token.to(tl.int64) * y_row + n, total.to(y.dtype.element_ty), mask=inside)


def _columns(rank: int) -> int:
    """Columns of a tile that holds `rank` of them: a power of two, and 16 at least for the tensor cores."""
    return max(16, triton.next_power_of_2(rank))


def _grid(blocks: Blocks) -> int:
    return len(blocks.experts) if blocks.pairs is None else triton.cdiv(len(blocks.pairs), blocks.size)


def shrink(x: Tensor, adapter: ExpertAdapter, slots: Tensor, blocks: Blocks, top_k: int, tiles: Tiles) -> Tensor:
    """x A1ᵀ of every pair.

    Args:
        x: (tokens, hidden). slots: (≥ tokens,) int32 adapter slot of each token.
    Returns:
        (splits, pairs, rank of gate + rank of up) FP32 partial sums.
    """
    a = adapter.a_in
    rank, halves = a[0].shape[2], len(a)
    n_pairs = len(x) * top_k
    out = torch.empty(tiles.shrink_splits, n_pairs, rank * halves, dtype=torch.float32, device=x.device)
    _expert_shrink_kernel[(_grid(blocks), tiles.shrink_splits)](
        x, a[0], a[-1], out, slots, blocks.experts, blocks.pairs, blocks.padded,
        n_pairs, x.shape[1], x.stride(0), a[0].stride(0), a[0].stride(1), a[0].stride(2),
        TOP_K=top_k, RANK=rank, HALVES=halves, COLS=_columns(rank * halves), SLOTS=a[0].shape[0],
        SORTED=blocks.pairs is not None, BM=blocks.size, BK=tiles.shrink_k, SPLITS=tiles.shrink_splits,
        num_warps=tiles.shrink_warps, num_stages=tiles.shrink_stages,
    )  # fmt: skip
    return out


def activate(
    gate_up: Tensor, t_in: Tensor, adapter: ExpertAdapter, slots: Tensor, ids: Tensor, active: Tensor, tiles: Tiles
) -> Tensor:
    """SiLU and product of gate and up with their LoRA, into `active`, and `active` A2ᵀ.

    Args:
        gate_up: (pairs, 2 · inner) of the base GEMM. t_in: what `shrink` gave. ids: (tokens, top_k) experts.
        active: (pairs, inner), written.
    Returns:
        (parts, pairs, rank) FP32 partial sums.
    """
    n_pairs, inner = active.shape
    a, b_gate = adapter.a_out, adapter.b_in[0]
    rank, halves = a.shape[2], len(adapter.a_in)
    b_up = adapter.b_in[1] if halves == 2 else b_gate[:, :, inner:]
    block = min(tiles.activate_n, triton.next_power_of_2(inner))
    parts = triton.cdiv(inner, block)
    t_out = torch.empty(parts, n_pairs, rank, dtype=torch.float32, device=active.device)
    _expert_activate_kernel[(n_pairs, parts)](
        gate_up, t_in, b_gate, b_up, a, active, t_out, ids, slots,
        n_pairs, inner, gate_up.stride(0), active.stride(0), *b_gate.stride()[:2], *a.stride()[:3],
        TOP_K=ids.shape[1], RANK=rank, RANKS=triton.next_power_of_2(rank), HALVES=halves, SLOTS=a.shape[0],
        SPLITS=len(t_in), BN=block, num_warps=tiles.activate_warps,
    )  # fmt: skip
    return t_out


def expand(t_out: Tensor, adapter: ExpertAdapter, slots: Tensor, weights: Tensor, ids: Tensor, tiles: Tiles) -> Tensor:
    """(tokens, hidden) FP32: the weighted sum of the down projections' LoRA over each token's experts.

    Args:
        t_out: what `activate` gave. weights, ids: (tokens, top_k) of each token's experts.
    """
    tokens, top_k = ids.shape
    b = adapter.b_out
    rank, parts, hidden = b.shape[3], len(t_out), b.shape[2]
    delta = torch.empty(tokens, hidden, dtype=torch.float32, device=b.device)
    _expert_expand_kernel[(tokens, triton.cdiv(hidden, tiles.expand_n))](
        t_out, b, weights, ids, slots, delta, tokens * top_k, hidden, *b.stride()[:2],
        TOP_K=top_k, RANK=rank, COLS=triton.next_power_of_2(top_k * rank), SLOTS=b.shape[0],
        PARTS=parts, PARTS2=triton.next_power_of_2(parts), VECTOR=min(8, rank & -rank), BN=tiles.expand_n,
        num_warps=tiles.expand_warps,
    )  # fmt: skip
    return delta


def combine(down: Tensor, delta: Tensor, y: Tensor, tiles: Tiles) -> None:
    """Sum over each token's experts of the down projections, and `delta`, into `y`.

    Args:
        down: (pairs, hidden) of the base GEMM, multiplied by the routing weight. delta: what `expand` gave.
        y: (tokens, hidden), written.
    """
    tokens, hidden = y.shape
    top_k = len(down) // tokens
    _expert_combine_kernel[(tokens, triton.cdiv(hidden, tiles.combine_n))](
        down, delta, y, hidden, down.stride(0), y.stride(0),
        TOP_K=top_k, TOP_K2=triton.next_power_of_2(top_k), BN=tiles.combine_n, num_warps=tiles.combine_warps,
    )  # fmt: skip


def reference(
    x: Tensor, gate_up: Tensor, w2: Tensor, adapter: ExpertAdapter, slots: Tensor, weights: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The same layer in plain torch, pair by pair: (active, y), with the roundings of the kernels.

    Args:
        gate_up: (pairs, 2 · inner) of the base GEMM. w2: (experts, hidden, inner), for the down projection.
    """
    top_k, inner, dtype = ids.shape[1], gate_up.shape[1] // 2, x.dtype
    active = torch.empty(len(gate_up), inner, dtype=dtype, device=x.device)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)

    def lora(v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return ((v.float() @ a.float().T).to(dtype).float() @ b.float().T).to(dtype).float()

    for pair in range(len(gate_up)):
        token, j = divmod(pair, top_k)
        expert, slot = int(ids[token, j]), int(slots[token])
        gate, up = gate_up[pair].float().split(inner)
        if 0 <= slot < adapter.a_out.shape[0]:
            a, b = [t[slot, expert] for t in adapter.a_in], [t[slot, expert] for t in adapter.b_in]
            b = b if len(b) == 2 else list(b[0].split(inner))
            gate = (gate + lora(x[token], a[0], b[0])).to(dtype).float()
            up = (up + lora(x[token], a[-1], b[1])).to(dtype).float()
        active[pair] = (torch.nn.functional.silu(gate) * up).to(dtype)
        y[token] += (weights[token, j] * (active[pair].float() @ w2[expert].float().T)).to(dtype).float()
        if 0 <= slot < adapter.a_out.shape[0]:
            t = (active[pair].float() @ adapter.a_out[slot, expert].float().T).to(dtype).float()
            y[token] += weights[token, j] * (adapter.b_out[slot, expert].float() @ t)
    return active, y.to(dtype)
