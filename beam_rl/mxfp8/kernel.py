"""MXFP8 quantization of a tensor's last dimension in one Triton kernel; the same bits as `format.quantize`.

E4M3 is rounded in integers: Triton's own conversion wants compute capability 8.9, and this one has the same bits in
Triton's interpreter.
"""

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
def _e4m3(v):
    """Bits of v (FP32, no NaN) as E4M3: to nearest even, 448 at most."""
    bits = v.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20  # 120: FP32's bias less E4M3's
    # Below 2^-6 E4M3 has steps of 2^-9, as FP32 has at 2^14: an addition there rounds.
    magnitude = size.to(tl.float32, bitcast=True)
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return sign | code


@triton.jit
def _quantize_kernel(x, payload, scales, blocks, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """Each program has BLOCKS blocks of WIDTH elements, one after the other in memory."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    valid = block < blocks
    places = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(x + places, mask=valid[:, None], other=0.0).to(tl.float32)
    # On bits: magnitudes are ordered as their bits are, NaNs above infinity.
    amax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    byte = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
    byte = tl.where(amax == 0x7F800000, 254, tl.where(amax > 0x7F800000, 0, byte))
    code = _e4m3(values * _scale_value(254 - byte)[:, None])  # divided by the scale
    code = tl.where((amax > 0x7F800000)[:, None], 0x7F, code).to(tl.uint8)
    tl.store(payload + places, code, mask=valid[:, None])
    tl.store(scales + block, byte.to(tl.uint8), mask=valid)


def quantize_last(x: Tensor) -> tuple[Tensor, Tensor]:
    """Payload (float8_e4m3fn, of x's shape) and scales (uint8) of x along its last dimension, a multiple of 32."""
    x = x.contiguous()
    payload = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // BLOCK, dtype=torch.uint8, device=x.device)
    blocks = scales.numel()
    if blocks:
        grid = (triton.cdiv(blocks, BLOCKS_PER_PROGRAM),)
        _quantize_kernel[grid](x, payload, scales, blocks, BLOCKS=BLOCKS_PER_PROGRAM, WIDTH=BLOCK)
    return payload.view(torch.float8_e4m3fn), scales
