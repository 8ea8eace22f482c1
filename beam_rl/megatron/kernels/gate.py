"""The attention's output gate: out · sigmoid(gate + bias), where bias, sigmoid and product each round.

Bytes a token of `heads · dim` values of b bytes: 3·heads·dim·b forward, 5·heads·dim·b backward.
"""

from typing import Any

import torch
from torch import Tensor

from beam_rl.megatron.kernels import covers, rounded, store_rounded, tl, triton

MAX_DIM = 256
VALUES, WARPS = 2048, 4  # of a program: some tokens of one head


@triton.jit
def _load(
    x,
    gate,
    bias,
    tokens,
    heads,
    token_stride,
    head_stride,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(x, gate with its bias, where they are in tensors without gaps, which values there are)."""
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens) & (column < DIM)
    at = (token * heads + head) * DIM + column
    out = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + token * token_stride + head * head_stride + column, mask=inside, other=0.0).to(tl.float32)
    return out, rounded(g + tl.load(bias + head).to(tl.float32), x.dtype.element_ty), at, inside


@triton.jit
def _forward_kernel(
    x, gate, bias, out, tokens, heads, token_stride, head_stride,
    TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    value, g, at, inside = _load(x, gate, bias, tokens, heads, token_stride, head_stride, TOKENS, DIM, BLOCK)
    sigmoid = rounded(tl.div_rn(1.0, 1.0 + tl.exp(-g)), x.dtype.element_ty)
    store_rounded(out + at, value * sigmoid, inside)


@triton.jit
def _backward_kernel(
    x, gate, bias, d_out, dx, d_gate, d_bias, tokens, heads, token_stride, head_stride,
    TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d_bias: (programs of a head, heads) FP32 partial sums."""
    value, g, at, inside = _load(x, gate, bias, tokens, heads, token_stride, head_stride, TOKENS, DIM, BLOCK)
    grad = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    store_rounded(dx + at, grad * rounded(sigmoid, x.dtype.element_ty), inside)
    of_gate = grad * value * sigmoid * (1.0 - sigmoid)
    store_rounded(d_gate + at, of_gate, inside)
    tl.store(d_bias + tl.program_id(1) * heads + tl.program_id(0), tl.sum(tl.sum(of_gate, 1), 0))


class Fused(torch.autograd.Function):
    """As `reference`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        x, gate = x.contiguous(), gate if gate.stride(-1) == 1 else gate.contiguous()
        tokens, heads, dim = gate.shape
        block = triton.next_power_of_2(dim)
        ctx.tiles = {"TOKENS": max(VALUES // block, 1), "DIM": dim, "BLOCK": block}
        ctx.grid = (heads, triton.cdiv(tokens, ctx.tiles["TOKENS"]))
        ctx.save_for_backward(x, gate, bias)
        out = torch.empty_like(x)
        if x.numel():
            _forward_kernel[ctx.grid](
                x, gate, bias, out, tokens, heads, *gate.stride()[:2],
                **ctx.tiles, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gate, bias = ctx.saved_tensors
        dx, d_gate = torch.empty_like(x), torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        partial = x.new_empty(ctx.grid[1], ctx.grid[0], dtype=torch.float32)
        if x.numel():
            _backward_kernel[ctx.grid](
                x, gate, bias, d_out.contiguous(), dx, d_gate, partial, *gate.shape[:2], *gate.stride()[:2],
                **ctx.tiles, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        return dx, d_gate, partial.sum(0).to(bias.dtype)


def output_gate(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """x: (tokens, heads · dim); gate: (tokens, heads, dim), of any strides; bias: (heads,). Returns x's shape."""
    fused = covers(x, gate, bias) and gate.size(-1) <= MAX_DIM
    return (Fused.apply if fused else reference)(x, gate, bias)


def reference(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return x * torch.sigmoid(gate + bias[:, None]).reshape(x.shape)
