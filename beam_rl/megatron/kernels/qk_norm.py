"""RMSNorm of each head of Q or K, rounded, and then its position: RoPE, SSMax's scale, or none; rounded again.

Bytes a head of a token, of `dim` values of b bytes: 2·dim·b forward, 3·dim·b backward; besides these 4·dim a token for cos
and sin, of which the first halves are read (their second halves repeat them), or 4 a token for the scale.
"""

from typing import Any

import torch
from torch import Tensor

from beam_rl.megatron.kernels import at_one_time, covers, norm_residual, rounded, store_rounded, summed, tl, triton

MAX_DIM = 256
VALUES, WARPS = 2048, 4  # of a program in the forward pass
# And in the backward pass, where it takes many times as many in turn, has a partial sum of the weight's gradient, and
# has as many groups of them on their way to it as there are stages, itself at work on one.
BACKWARD_VALUES, BACKWARD_WARPS, WARPS_PER_SM, STAGES = 1024, 4, 24, 3


@triton.jit
def _places(first, rows, HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """(row, token and head, each (ROWS, 1), column of the first half, which values there are) from row `first` on."""
    row = first + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = row < rows
    if HALF * 2 != DIM:
        inside = inside & (column < DIM // 2)
    token = row // HEADS
    return row.to(tl.int64), token.to(tl.int64), row - token * HEADS, column, inside


@triton.jit
def _load(pointer, inside):
    return tl.load(pointer, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _factor(first, second, DIM: tl.constexpr, eps):
    mean = tl.div_rn(tl.sum(first * first, 1) + tl.sum(second * second, 1), DIM * 1.0)
    return tl.rsqrt(mean + eps)[:, None]


@triton.jit
def _forward_kernel(
    x, weight, cos, sin, scale, out, rows, token_stride, head_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, token, head, column, inside = _places(tl.program_id(0) * ROWS, rows, HEADS, DIM, ROWS, HALF)
    here = x + token * token_stride + head * head_stride + column
    first, second = _load(here, inside), _load(here + DIM // 2, inside)
    factor = _factor(first, second, DIM, eps)
    dtype: tl.constexpr = out.dtype.element_ty
    first = rounded(_load(weight + column, column < DIM // 2) * (first * factor), dtype)
    second = rounded(_load(weight + DIM // 2 + column, column < DIM // 2) * (second * factor), dtype)
    if ROPE:
        c, s = _load(cos + token * DIM + column, inside), _load(sin + token * DIM + column, inside)
        first, second = first * c - second * s, second * c + first * s
    if SCALE:
        by = tl.load(scale + token, mask=row < rows, other=0.0)
        first, second = first * by, second * by
    there = out + row * DIM + column
    store_rounded(there, first, inside)
    store_rounded(there + DIM // 2, second, inside)


@triton.jit
def _backward_kernel(
    x, weight, cos, sin, scale, d_out, dx, d_weight, rows, token_stride, head_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, SCALE: tl.constexpr, WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so many-th group of rows a program. d_weight: (programs, dim) FP32 partial sums, with WEIGHTS."""
    half = tl.arange(0, HALF)
    w_first = _load(weight + half, half < DIM // 2)[None, :]
    w_second = _load(weight + DIM // 2 + half, half < DIM // 2)[None, :]
    total_first = tl.zeros((ROWS, HALF), tl.float32)
    total_second = tl.zeros((ROWS, HALF), tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, token, head, column, inside = _places(start, rows, HEADS, DIM, ROWS, HALF)
        there = row * DIM + column
        here = x + token * token_stride + head * head_stride + column
        d_first, d_second = _load(d_out + there, inside), _load(d_out + there + DIM // 2, inside)
        first, second = _load(here, inside), _load(here + DIM // 2, inside)
        if ROPE:
            c, s = _load(cos + token * DIM + column, inside), _load(sin + token * DIM + column, inside)
            d_first, d_second = d_first * c + d_second * s, d_second * c - d_first * s
        factor = tl.rsqrt(tl.sum(first * first + second * second, 1)[:, None] / DIM + eps)
        by = factor
        if SCALE:
            by = factor * tl.load(scale + token, mask=row < rows, other=0.0)
        d_first, d_second = d_first * by, d_second * by
        total_first += d_first * first
        total_second += d_second * second
        d_first, d_second = d_first * w_first, d_second * w_second
        along = tl.sum(d_first * first + d_second * second, 1)[:, None] * (factor * factor / DIM)
        store_rounded(dx + there, d_first - first * along, inside)
        store_rounded(dx + there + DIM // 2, d_second - second * along, inside)
    if WEIGHTS:
        partial = d_weight + tl.program_id(0).to(tl.int64) * DIM + half
        tl.store(partial, tl.sum(total_first, 0), mask=half < DIM // 2)
        tl.store(partial + DIM // 2, tl.sum(total_second, 0), mask=half < DIM // 2)


class Fused(torch.autograd.Function):
    """As `reference`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        tokens, heads, dim = x.shape
        ctx.eps = eps
        ctx.kinds = {"HEADS": heads, "DIM": dim, "ROPE": cos is not None, "SCALE": scale is not None}
        ctx.save_for_backward(x, weight, cos, sin, scale)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            tiles = _tiles(dim, VALUES)
            _forward_kernel[(triton.cdiv(tokens * heads, tiles["ROWS"]),)](
                x, weight, cos, sin, scale, out, tokens * heads, *x.stride()[:2], eps,
                **ctx.kinds, **tiles, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        x, weight, cos, sin, scale = ctx.saved_tensors
        tokens, heads, dim = x.shape
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tiles = _tiles(dim, BACKWARD_VALUES)
        groups = triton.cdiv(tokens * heads, tiles["ROWS"])
        programs = min(groups, at_one_time(x, BACKWARD_WARPS, WARPS_PER_SM))
        partial = x.new_empty(1, programs, dim, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if x.numel():
            _backward_kernel[(programs,)](
                x, weight, cos, sin, scale, d_out.contiguous(), dx, partial,
                tokens * heads, *x.stride()[:2], ctx.eps,
                **ctx.kinds, **tiles, WEIGHTS=partial is not None, STAGES=STAGES, num_warps=BACKWARD_WARPS,
            )  # fmt: skip
        d_weight = None if partial is None else summed(partial, weight.dtype)[0]
        return dx, d_weight, None, None, None, None


def _tiles(dim: int, values: int) -> dict[str, int]:
    """How many rows a program takes at a time, and its columns of each half."""
    half = triton.next_power_of_2(dim // 2)
    return {"ROWS": max(values // (2 * half), 1), "HALF": half}


def fuses(x: Tensor, weight: Tensor) -> bool:
    """Whether `Fused` is for these: on a GPU, and halves that a program can hold."""
    return covers(x, weight) and x.size(-1) % 2 == 0 and x.size(-1) <= MAX_DIM


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, half-split layout, FP32 inside and one rounding. x: (tokens, heads, dim); cos, sin: (tokens, dim) FP32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos[:, None] + turned * sin[:, None]).to(x.dtype)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """x · scale in FP32 and one rounding. x: (tokens, heads, dim); scale: (tokens,) FP32."""
    return (x.float() * scale[:, None, None]).to(x.dtype)


def reference(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None, scale: Tensor | None
) -> Tensor:
    """x: (tokens, heads, dim), of any strides; weight: (dim,); cos, sin: (tokens, dim) FP32; scale: (tokens,) FP32."""
    x = norm_residual.reference(x, weight, eps)
    if cos is not None and sin is not None:
        x = rotate(x, cos, sin)
    return x if scale is None else scaled(x, scale)
