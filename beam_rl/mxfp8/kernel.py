"""MXFP8 on a GPU in one Triton kernel, along any dimension; the same bits as `format` in plain torch.

E4M3 is rounded in FP32's bits: Triton's own conversion wants compute capability 8.9, and this one is the same in Triton's
interpreter.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from beam_rl.mxfp8 import BLOCK

BLOCKS_PER_PROGRAM = 64


@triton.jit
def _scale_value(byte):
    """2^(byte − 127)."""
    return tl.maximum(byte << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(magnitude):
    """The E4M3 value next to an FP32 number from 0 to 448, the even one of two, in FP32."""
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20 << 20).to(tl.float32, bitcast=True)
    # Below 2^-6 E4M3 has steps of 2^-9, as FP32 has at 2^14: an addition there rounds.
    return tl.where(magnitude < 0.015625, (magnitude + 16384.0) - 16384.0, normal)


@triton.jit
def _code(value):
    """The bits of an E4M3 value that is not negative."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value < 0.015625, (value * 512.0).to(tl.int32), (bits >> 20) - 960)  # 960: both exponents' biases


@triton.jit
def _kernel(x, payload, scales, blocks, inner, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, ROUND: tl.constexpr):
    """BLOCKS blocks of WIDTH elements, which are `inner` elements apart. ROUND: writes what they stand for, no scales."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    valid = (block < blocks)[:, None]
    first = block // inner * inner * WIDTH + block % inner
    places = first[:, None] + tl.arange(0, WIDTH)[None, :] * inner
    values = tl.load(x + places, mask=valid, other=0.0).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True)
    # On bits: magnitudes are ordered as their bits are, NaNs above infinity.
    amax = tl.max(bits & 0x7FFFFFFF, 1)
    byte = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
    byte = tl.where(amax == 0x7F800000, 254, tl.where(amax > 0x7F800000, 0, byte))
    is_nan = (amax > 0x7F800000)[:, None]
    scaled = tl.abs(values) * _scale_value(254 - byte)[:, None]  # divided by the scale
    value = _nearest(tl.minimum(tl.where(is_nan, 0.0, scaled), 448.0))
    if ROUND:
        value *= _scale_value(byte)[:, None]
        value = (value.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
        tl.store(payload + places, tl.where(is_nan, float("nan"), value).to(payload.dtype.element_ty), mask=valid)
    else:
        code = tl.where(is_nan, 0x7F, _code(value) | ((bits >> 24) & 0x80))
        tl.store(payload + places, code.to(tl.uint8), mask=valid)
        tl.store(scales + block, byte.to(tl.uint8), mask=block < blocks)


def quantize(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Payload (float8_e4m3fn, of x's shape) and scales (uint8) of x along `dim` (from 0), a multiple of 32."""
    payload = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    shape = list(x.shape)
    shape[dim] //= BLOCK
    scales = torch.empty(shape, dtype=torch.uint8, device=x.device)
    _launch(x, payload, scales, dim)
    return payload.view(torch.float8_e4m3fn), scales


def rounded(x: Tensor, dim: int) -> Tensor:
    """x as MXFP8 has it along `dim` (from 0), in x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, out, None, dim)
    return out


def _launch(x: Tensor, out: Tensor, scales: Tensor | None, dim: int) -> None:
    blocks = x.numel() // BLOCK
    if blocks:
        _kernel[(triton.cdiv(blocks, BLOCKS_PER_PROGRAM),)](
            x.contiguous(), out, out if scales is None else scales, blocks, math.prod(x.shape[dim + 1 :]),
            WIDTH=BLOCK, BLOCKS=BLOCKS_PER_PROGRAM, ROUND=scales is None,
        )  # fmt: skip
