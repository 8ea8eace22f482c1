"""The boundary between two sub-layers: RMSNorm, depth-scaled residual add, RMSNorm, in one pass over memory.

    y = norm(x) · weight                                     FP32 inside, rounded once
    h = round(y · x_scale) + round(residual · residual_scale)
    n = norm(h) · next_weight

One kernel each way does y alone, h, or h and n. Bytes a token of `width` values of b bytes: y 2·width·b forward and
3·width·b backward; h 3 and 4; h and n 4 and 6; and 4 for what each norm multiplied by, which the backward pass reads. A row
is one program's, so a width of up to 8192 is covered.
"""

from typing import Any

import torch
from torch import Tensor

from beam_rl.megatron.kernels import at_one_time, covers, rounded, store_rounded, tl, triton

MAX_WIDTH = 8192
VALUES_PER_WARP, MAX_WARPS = 256, 16  # forward
# Of the backward pass without and with a second norm: so that at 8192 registers suffice and shared memory has room.
BACKWARD = {False: (512, 3), True: (256, 2)}  # values a warp, and rows on their way to a program
WARPS_PER_SM = 32  # of programs in the backward pass, where each has a partial sum of the weights' gradients
STAGED_BYTES = 200 * 2**10  # the room for rows on their way


@triton.jit
def _unit(x, width, eps):
    """x divided by its root mean square, and what it was multiplied by."""
    factor = tl.rsqrt(tl.div_rn(tl.sum(x * x, 0), width * 1.0) + eps)
    return x * factor, factor


@triton.jit
def _unit_backward(grad, unit, factor, width):
    """The gradient of x from that of `unit`."""
    return factor * (grad - unit * (tl.sum(grad * unit, 0) / width))


@triton.jit
def _load(pointer, inside):
    return tl.load(pointer, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    x, weight, residual, next_weight, out, normed, factors, width, eps, next_eps, x_scale, residual_scale,
    ADD: tl.constexpr, NEXT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program. out: h, or y without ADD; normed: n, with NEXT; factors: (1 or 2, rows) FP32."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    dtype: tl.constexpr = out.dtype.element_ty
    unit, factor = _unit(_load(x + at, inside), width, eps)
    tl.store(factors + tl.program_id(0), factor)
    y = _load(weight + column, inside) * unit
    if ADD:
        scaled = rounded(rounded(y, dtype) * x_scale, dtype)
        y = rounded(scaled + rounded(_load(residual + at, inside) * residual_scale, dtype), dtype)
    store_rounded(out + at, y, inside)
    if NEXT:
        unit, factor = _unit(y, width, next_eps)
        tl.store(factors + tl.num_programs(0) + tl.program_id(0), factor)
        store_rounded(normed + at, _load(next_weight + column, inside) * unit, inside)


@triton.jit
def _backward_kernel(
    x, weight, h, next_weight, factors, d_out, d_normed, dx, d_residual, d_weight, d_next_weight,
    rows, width, x_scale, residual_scale,
    ADD: tl.constexpr, NEXT: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so many-th row a program. d_weight, d_next_weight: (programs, width) FP32 partial sums, with WEIGHTS."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    first = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    next_total = tl.zeros((BLOCK,), tl.float32)
    if not NEXT:  # else there are no registers for it
        w = _load(weight + column, inside)
    for row in tl.range(first, rows, tl.num_programs(0), num_stages=STAGES):
        at = row * width + column
        grad = _load(d_out + at, inside)
        if NEXT:
            factor = tl.load(factors + rows + row)
            unit = _load(h + at, inside) * factor
            of_normed = _load(d_normed + at, inside)
            next_total += of_normed * unit
            grad += _unit_backward(of_normed * _load(next_weight + column, inside), unit, factor, width)
            w = _load(weight + column, inside)
        if ADD:
            store_rounded(d_residual + at, grad * residual_scale, inside)
            grad *= x_scale
        factor = tl.load(factors + row)
        unit = _load(x + at, inside) * factor
        total += grad * unit
        store_rounded(dx + at, _unit_backward(grad * w, unit, factor, width), inside)
    if WEIGHTS:
        tl.store(d_weight + first * width + column, total, mask=inside)
        if NEXT:
            tl.store(d_next_weight + first * width + column, next_total, mask=inside)


class Fused(torch.autograd.Function):
    """(x, weight, eps[, residual, x_scale, residual_scale[, next_weight, next_eps]]) → y, h, or (h, n)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None = None,
        x_scale: float = 1.0,
        residual_scale: float = 1.0,
        next_weight: Tensor | None = None,
        next_eps: float = 0.0,
    ) -> Any:
        x, width = x.contiguous(), x.size(-1)
        out = torch.empty_like(x)
        normed = None if next_weight is None else torch.empty_like(x)
        factors = x.new_empty(1 if normed is None else 2, x.numel() // width, dtype=torch.float32)
        ctx.scales = x_scale, residual_scale
        ctx.kinds = {"ADD": residual is not None, "NEXT": normed is not None, "BLOCK": triton.next_power_of_2(width)}
        ctx.save_for_backward(x, weight, next_weight, out if normed is not None else None, factors)
        if residual is not None:
            residual = residual.contiguous()
        if x.numel():
            _forward_kernel[(x.numel() // width,)](
                x, weight, residual, next_weight, out, normed, factors, width, eps, next_eps, *ctx.scales, **ctx.kinds,
                num_warps=_warps(width), enable_fp_fusion=False,
            )  # fmt: skip
        return out if normed is None else (out, normed)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_normed: Tensor | None = None) -> Any:
        x, weight, next_weight, h, factors = ctx.saved_tensors
        width = x.size(-1)
        rows = x.numel() // width
        d_out, d_normed = d_out.contiguous(), None if d_normed is None else d_normed.contiguous()
        dx = torch.empty_like(x)
        d_residual = torch.empty_like(x) if ctx.kinds["ADD"] else None
        needs_weight, needs_next = ctx.needs_input_grad[1], ctx.kinds["NEXT"] and ctx.needs_input_grad[6]
        warps, stages = _backward_launch(x, ctx.kinds["NEXT"])
        programs = min(rows, at_one_time(x, warps, WARPS_PER_SM))
        partial = x.new_empty(2 if needs_weight or needs_next else 0, programs, width, dtype=torch.float32)
        if x.numel():
            _backward_kernel[(programs,)](
                x, weight, h, next_weight, factors, d_out, d_normed, dx, d_residual,
                *(partial if len(partial) else (None, None)), rows, width, *ctx.scales, **ctx.kinds,
                WEIGHTS=len(partial) > 0, STAGES=stages, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
        d_weight = partial[0].sum(0).to(weight.dtype) if needs_weight else None
        d_next_weight = partial[1].sum(0).to(next_weight.dtype) if needs_next else None
        return (dx, d_weight, None, d_residual, None, None, d_next_weight, None)[: len(ctx.needs_input_grad)]


def _warps(width: int) -> int:
    return min(max(triton.next_power_of_2(width) // VALUES_PER_WARP, 1), MAX_WARPS)


def _backward_launch(x: Tensor, has_next: bool) -> tuple[int, int]:
    """Warps of a program, and how many rows are on their way to it at a time."""
    values_per_warp, stages = BACKWARD[has_next]
    block = triton.next_power_of_2(x.size(-1))
    read = block * x.element_size() * (4 if has_next else 2)
    warps = min(max(block // values_per_warp, 1), 32)
    return warps, max(1, min(stages, STAGED_BYTES // read))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x's last dimension in FP32, the weight's product included, rounded once. weight: (width,)."""
    return Fused.apply(x, weight, eps) if _covered(x, weight) else reference(x, weight, eps)


def norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor, x_scale: float, residual_scale: float) -> Tensor:
    """h: the norm of a sub-layer's output x, scaled and added to the scaled residual. residual: of x's shape."""
    function = Fused.apply if _covered(x, residual, weight) else reference
    return function(x, weight, eps, residual, x_scale, residual_scale)


def norm_add_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor,
    x_scale: float,
    residual_scale: float,
    next_weight: Tensor,
    next_eps: float,
) -> tuple[Tensor, Tensor]:
    """`norm_add`'s h, and n, its norm for the next sub-layer."""
    function = Fused.apply if _covered(x, residual, weight, next_weight) else reference
    return function(x, weight, eps, residual, x_scale, residual_scale, next_weight, next_eps)


def _covered(x: Tensor, *others: Tensor) -> bool:
    return x.size(-1) <= MAX_WIDTH and covers(x, *others)


def reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    x_scale: float = 1.0,
    residual_scale: float = 1.0,
    next_weight: Tensor | None = None,
    next_eps: float = 0.0,
) -> Any:
    """y, h, or (h, n) in plain torch."""
    unit = x.float()
    unit = unit * torch.rsqrt(unit.square().mean(-1, keepdim=True) + eps)
    y = (weight.float() * unit).to(x.dtype)
    if residual is None:
        return y
    h = y * x_scale + residual * residual_scale
    return h if next_weight is None else (h, reference(h, next_weight, next_eps))
