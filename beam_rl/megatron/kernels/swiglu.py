"""SwiGLU: SiLU of the gate times up, all in FP32 and rounded once.

Bytes a token of `inner` values of b bytes: 3·inner·b forward, 5·inner·b backward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beam_rl.megatron.kernels import covers, store_rounded, tl, triton

BLOCK, WARPS = 1024, 4


@triton.jit
def _load(gate_up, inner, BLOCK: tl.constexpr):
    """(gate, up, where gate is, which of the values there are) of a row's block, a block a program."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at = tl.program_id(0).to(tl.int64) * 2 * inner + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + inner, mask=inside, other=0.0).to(tl.float32)
    return gate, up, at, inside


@triton.jit
def _forward_kernel(gate_up, out, inner, BLOCK: tl.constexpr):
    gate, up, at, inside = _load(gate_up, inner, BLOCK)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate))
    store_rounded(out + at - tl.program_id(0).to(tl.int64) * inner, silu * up, inside)


@triton.jit
def _backward_kernel(gate_up, d_out, d_gate_up, inner, BLOCK: tl.constexpr):
    gate, up, at, inside = _load(gate_up, inner, BLOCK)
    from_out = d_out + at - tl.program_id(0).to(tl.int64) * inner
    grad = tl.load(from_out, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    store_rounded(d_gate_up + at, grad * up * (sigmoid + silu * (1.0 - sigmoid)), inside)
    store_rounded(d_gate_up + at + inner, grad * silu, inside)


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.size(-1) // 2)
        _launch(_forward_kernel, gate_up, out)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        d_gate_up = torch.empty_like(gate_up)
        _launch(_backward_kernel, gate_up, d_out.contiguous(), d_gate_up)
        return d_gate_up


def _launch(kernel: Any, gate_up: Tensor, *others: Tensor) -> None:
    inner = gate_up.size(-1) // 2
    if gate_up.numel():  # an expert may have no tokens
        grid = (gate_up.numel() // (2 * inner), triton.cdiv(inner, BLOCK))
        kernel[grid](gate_up, *others, inner, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False)


def swiglu(gate_up: Tensor) -> Tensor:
    """(…, 2 · inner), the gate first → (…, inner), in gate_up's dtype."""
    return Fused.apply(gate_up) if covers(gate_up) else reference(gate_up)


def reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
