"""The boundary between two sub-layers: RMSNorm, depth-scaled residual add, RMSNorm, in one pass over memory.

    y = norm(x) · weight                                     FP32 inside, rounded once
    h = round(y · x_scale) + round(residual · residual_scale)
    n = norm(h) · next_weight

One kernel each way does y alone, h, or h and n. Bytes a token of `width` values of b bytes: y 2·width·b forward and
3·width·b backward; h 3 and 4; h and n 4 and 6; and 4 for what each norm multiplied by, which the backward pass reads. A row
is one program's, so a width of up to 8192 is covered.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from beam_rl.megatron.kernels import at_one_time, covers, rounded, stages, store_rounded, summed, tl, triton

MAX_WIDTH = 8192


class Launch(NamedTuple):
    """How a row is shared out: in parts of 1/`parts` of its width's next power of two, so that little is masked."""

    parts: int
    values_per_warp: int  # of a part; 256 are 16 bytes a thread of BF16
    registers: int | None = None  # of a thread, at most
    warps_per_sm: int = 0  # of programs in the backward pass, where each has a partial sum of the weights' gradients
    stages: int = 1  # rows on their way to a program, itself at work on one of them

    def tiles(self, width: int) -> dict[str, Any]:
        part = max(triton.next_power_of_2(width) // self.parts, 1)
        warps = min(max(part // self.values_per_warp, 1), 32)
        parts = {"WIDTH": width, "PART": part, "PARTS": triton.cdiv(width, part)}
        return parts | {"num_warps": warps, "maxnreg": self.registers}


# Without and with a second norm. Backward the fastest of some forty on an H200 at a width of 5120 that suit both kernels
# without one (benchmarks/boundary_h200.json); forward the fewest instructions a value.
FORWARD = {False: Launch(8, 256), True: Launch(8, 256)}
BACKWARD = {False: Launch(8, 256, 168, 12), True: Launch(8, 256, None, 8, stages=2)}


@triton.jit
def _row():
    """A row's parts, before there are any."""
    return ()


@triton.jit
def _load(row, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """The row's parts, each (PART,) FP32."""
    parts = _row()
    for i in tl.static_range(PARTS):
        column = i * PART + tl.arange(0, PART)
        at, whole = row + column, (i + 1) * PART <= WIDTH
        part = tl.load(at) if whole else tl.load(at, mask=column < WIDTH, other=0.0)
        parts += (part.to(tl.float32),)
    return parts


@triton.jit
def _store(row, parts, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    for i in tl.static_range(PARTS):
        column = i * PART + tl.arange(0, PART)
        store_rounded(row + column, parts[i], None if (i + 1) * PART <= WIDTH else column < WIDTH)


@triton.jit
def _product(a, b, PARTS: tl.constexpr):
    """The inner product of two rows."""
    total = a[0] * b[0]
    for i in tl.static_range(1, PARTS):
        total += a[i] * b[i]
    return tl.sum(total, 0)


@triton.jit
def _norm(x, weight, eps, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """weight · x over its root mean square, and what x was multiplied by."""
    factor = tl.rsqrt(tl.div_rn(_product(x, x, PARTS), WIDTH * 1.0) + eps)
    y = _row()
    for i in tl.static_range(PARTS):
        y += (weight[i] * (x[i] * factor),)
    return y, factor


@triton.jit
def _norm_backward(grad, scale, x, weight, factor, total, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """The gradient of x from grad · scale, that of weight · x · factor; and total with the weight's added to it."""
    inner, added = _row(), _row()
    for i in tl.static_range(PARTS):
        part = grad[i] * (scale * factor)
        added += (total[i] + part * x[i],)
        inner += (part * weight[i],)
    along = _product(inner, x, PARTS) * (factor * factor / WIDTH)
    dx = _row()
    for i in tl.static_range(PARTS):
        dx += (inner[i] - x[i] * along,)
    return dx, added


@triton.jit
def _forward_kernel(
    x, weight, residual, next_weight, out, normed, factors, eps, next_eps, x_scale, residual_scale,
    ADD: tl.constexpr, NEXT: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A row a program. out: h, or y without ADD; normed: n, with NEXT; factors: (1 or 2, rows) FP32."""
    at = tl.program_id(0).to(tl.int64) * WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    value = _load(x + at, WIDTH, PART, PARTS)
    if ADD:
        other = _load(residual + at, WIDTH, PART, PARTS)
    y, factor = _norm(value, _load(weight, WIDTH, PART, PARTS), eps, WIDTH, PARTS)
    tl.store(factors + tl.program_id(0), factor)
    if ADD:
        h = _row()
        for i in tl.static_range(PARTS):
            scaled = rounded(rounded(y[i], dtype) * x_scale, dtype)
            h += (rounded(scaled + rounded(other[i] * residual_scale, dtype), dtype),)
        y = h
    _store(out + at, y, WIDTH, PART, PARTS)
    if NEXT:
        n, factor = _norm(y, _load(next_weight, WIDTH, PART, PARTS), next_eps, WIDTH, PARTS)
        tl.store(factors + tl.num_programs(0) + tl.program_id(0), factor)
        _store(normed + at, n, WIDTH, PART, PARTS)


@triton.jit
def _backward_kernel(
    x, weight, h, next_weight, factors, d_out, d_normed, dx, d_residual, partial, rows, x_scale, residual_scale,
    ADD: tl.constexpr, NEXT: tl.constexpr, WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so many-th row a program. partial: (1 or 2, programs, width) FP32 sums of the weights', with WEIGHTS."""
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    total, next_total = _row(), _row()
    for _ in tl.static_range(PARTS):
        total += (tl.zeros((PART,), tl.float32),)
        next_total += (tl.zeros((PART,), tl.float32),)
    for row in tl.range(first, rows, programs, num_stages=STAGES):
        at = row * WIDTH
        grad = _load(d_out + at, WIDTH, PART, PARTS)
        value = _load(x + at, WIDTH, PART, PARTS)
        factor = tl.load(factors + row)
        if NEXT:
            of_normed, before = _load(d_normed + at, WIDTH, PART, PARTS), _load(h + at, WIDTH, PART, PARTS)
            next_factor = tl.load(factors + rows + row)
            next_w = _load(next_weight, WIDTH, PART, PARTS)  # for each row anew: registers are scarcer than loads
            of_h, next_total = _norm_backward(of_normed, 1.0, before, next_w, next_factor, next_total, WIDTH, PARTS)
            both = _row()
            for i in tl.static_range(PARTS):
                both += (grad[i] + of_h[i],)
            grad = both
        w = _load(weight, WIDTH, PART, PARTS)
        if ADD:
            of_residual = _row()
            for i in tl.static_range(PARTS):
                of_residual += (grad[i] * residual_scale,)
            _store(d_residual + at, of_residual, WIDTH, PART, PARTS)
        of_x, total = _norm_backward(grad, x_scale, value, w, factor, total, WIDTH, PARTS)
        _store(dx + at, of_x, WIDTH, PART, PARTS)
    if WEIGHTS:
        _store(partial + first * WIDTH, total, WIDTH, PART, PARTS)
        if NEXT:
            _store(partial + (programs + first) * WIDTH, next_total, WIDTH, PART, PARTS)


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
        ctx.kinds = {"ADD": residual is not None, "NEXT": normed is not None}
        ctx.save_for_backward(x, weight, next_weight, out if normed is not None else None, factors)
        if residual is not None:
            residual = residual.contiguous()
        if x.numel():
            _forward_kernel[(x.numel() // width,)](
                x, weight, residual, next_weight, out, normed, factors, eps, next_eps, *ctx.scales, **ctx.kinds,
                **FORWARD[ctx.kinds["NEXT"]].tiles(width), enable_fp_fusion=False,
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
        launch, read = BACKWARD[ctx.kinds["NEXT"]], width * x.element_size() * (4 if ctx.kinds["NEXT"] else 2)
        tiles = launch.tiles(width)
        programs = min(rows, at_one_time(x, tiles["num_warps"], launch.warps_per_sm))
        partial = None
        if needs_weight or needs_next:
            partial = x.new_empty(2 if ctx.kinds["NEXT"] else 1, programs, width, dtype=torch.float32)
        if x.numel():
            _backward_kernel[(programs,)](
                x, weight, h, next_weight, factors, d_out, d_normed, dx, d_residual, partial, rows, *ctx.scales,
                **ctx.kinds, WEIGHTS=partial is not None, **tiles,
                STAGES=stages(x, read, launch.stages),
            )  # fmt: skip
        sums = None if partial is None else summed(partial, weight.dtype)
        d_weight = sums[0] if sums is not None and needs_weight else None
        d_next_weight = sums[1] if sums is not None and needs_next else None
        return (dx, d_weight, None, d_residual, None, None, d_next_weight, None)[: len(ctx.needs_input_grad)]


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
