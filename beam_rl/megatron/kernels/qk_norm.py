"""RMSNorm of each head of Q or K, rounded, and then its position: RoPE, SSMax's scale, or none; rounded again.

Bytes a head of a token, of `dim` values of b bytes: 2·dim·b forward, 3·dim·b backward; besides these 4·dim a token for cos
and sin, of which the first halves are read (their second halves repeat them), or 4 a token for the scale.
"""

from typing import Any

import torch
from torch import Tensor

from beam_rl.megatron.kernels import covers, norm_residual, rounded, store_rounded, tl, triton

MAX_DIM = 256
VALUES, WARPS = 2048, 4  # of a program


@triton.jit
def _places(rows, heads, DIM: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """(token and head, each (ROWS, 1), column of the first half, which values there are) of this program's rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    return (row // heads).to(tl.int64), row % heads, column, (row < rows) & (column < DIM // 2)


@triton.jit
def _load(pointer, inside):
    return tl.load(pointer, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _factor(first, second, DIM: tl.constexpr, eps):
    mean = tl.div_rn(tl.sum(first * first, 1) + tl.sum(second * second, 1), DIM * 1.0)
    return tl.rsqrt(mean + eps)[:, None]


@triton.jit
def _forward_kernel(
    x, weight, cos, sin, scale, out, rows, heads, token_stride, head_stride, eps,
    DIM: tl.constexpr, ROPE: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token, head, column, inside = _places(rows, heads, DIM, ROWS, HALF)
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
        by = tl.load(scale + token, mask=token * heads + head < rows, other=0.0)
        first, second = first * by, second * by
    there = out + (token * heads + head) * DIM + column
    store_rounded(there, first, inside)
    store_rounded(there + DIM // 2, second, inside)


@triton.jit
def _backward_kernel(
    x, weight, cos, sin, scale, d_out, dx, d_weight, rows, heads, token_stride, head_stride, eps,
    DIM: tl.constexpr, ROPE: tl.constexpr, SCALE: tl.constexpr, WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """d_weight: (programs, dim) FP32 partial sums, with WEIGHTS."""
    token, head, column, inside = _places(rows, heads, DIM, ROWS, HALF)
    there = (token * heads + head) * DIM + column
    d_first, d_second = _load(d_out + there, inside), _load(d_out + there + DIM // 2, inside)
    if ROPE:
        c, s = _load(cos + token * DIM + column, inside), _load(sin + token * DIM + column, inside)
        d_first, d_second = d_first * c + d_second * s, d_second * c - d_first * s
    if SCALE:
        by = tl.load(scale + token, mask=token * heads + head < rows, other=0.0)
        d_first, d_second = d_first * by, d_second * by
    here = x + token * token_stride + head * head_stride + column
    first, second = _load(here, inside), _load(here + DIM // 2, inside)
    factor = _factor(first, second, DIM, eps)
    first, second = first * factor, second * factor
    if WEIGHTS:
        partial = d_weight + tl.program_id(0).to(tl.int64) * DIM + tl.arange(0, HALF)
        tl.store(partial, tl.sum(d_first * first, 0), mask=tl.arange(0, HALF) < DIM // 2)
        tl.store(partial + DIM // 2, tl.sum(d_second * second, 0), mask=tl.arange(0, HALF) < DIM // 2)
    d_first *= _load(weight + column, column < DIM // 2)
    d_second *= _load(weight + DIM // 2 + column, column < DIM // 2)
    mean = ((tl.sum(d_first * first, 1) + tl.sum(d_second * second, 1)) / DIM)[:, None]
    store_rounded(dx + there, factor * (d_first - first * mean), inside)
    store_rounded(dx + there + DIM // 2, factor * (d_second - second * mean), inside)


class Fused(torch.autograd.Function):
    """As `reference`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        tokens, heads, dim = x.shape
        half = triton.next_power_of_2(dim // 2)
        rows = max(VALUES // (2 * half), 1)
        ctx.eps, ctx.grid = eps, (triton.cdiv(tokens * heads, rows),)
        ctx.kinds = {"DIM": dim, "ROPE": cos is not None, "SCALE": scale is not None, "ROWS": rows, "HALF": half}
        ctx.save_for_backward(x, weight, cos, sin, scale)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            _forward_kernel[ctx.grid](
                x, weight, cos, sin, scale, out, tokens * heads, heads, *x.stride()[:2], eps,
                **ctx.kinds, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        x, weight, cos, sin, scale = ctx.saved_tensors
        tokens, heads, dim = x.shape
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partial = x.new_empty(*ctx.grid, dim, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if x.numel():
            _backward_kernel[ctx.grid](
                x, weight, cos, sin, scale, d_out.contiguous(), dx, partial,
                tokens * heads, heads, *x.stride()[:2], ctx.eps,
                **ctx.kinds, WEIGHTS=partial is not None, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        d_weight = None if partial is None else partial.sum(0).to(weight.dtype)
        return dx, d_weight, None, None, None, None


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
