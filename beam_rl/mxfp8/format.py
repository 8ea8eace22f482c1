"""The MXFP8 format: E4M3 elements in blocks of 32 that share one power of two, stored as an E8M0 byte.

The block's scale is 2^ceil(log2(amax / 448)), 448 being E4M3's largest value: no element exceeds it, so nothing
saturates. Transformer Engine on Blackwell, FlashInfer and vLLM's quantizer all have this rule; the OCP specification's own
example, 2^(floor(log2 amax) − 8), clips up to an eighth of a block's largest element. Elements round to nearest even.

The rule is evaluated on amax's bits, so every device gives the same bytes. vLLM evaluates it with a rounded log2: the two
agree on every BF16 input, and on FP32 unless amax is less than 1e-5 (relative) above 448 · 2^k, where ours is the exact
one, Transformer Engine's. Edges are as in vLLM: a block of zeros or of FP32 subnormals has byte 0 (2^-127); a block with
an infinity has byte 254 and 448 in its place, which is infinite again; a block with a NaN is all NaN under byte 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from beam_rl.mxfp8 import BLOCK

LARGEST = 448.0  # of E4M3: 1.75 · 2^8
INFINITE = 254  # byte of a block with an infinity; 255 would be E8M0's NaN
INFINITY_BITS = 0x7F800000  # of FP32; a NaN's are above


@dataclass(frozen=True)
class Quantized:
    """`payload`: float8_e4m3fn. `scales`: uint8, of the payload's shape but for `dim`, 32 times smaller."""

    payload: Tensor
    scales: Tensor
    dim: int = -1


def quantize(x: Tensor, dim: int = -1) -> Quantized:
    """x in blocks of 32 along `dim`. Raises ValueError if 32 does not divide that dimension."""
    dim = _divided(x, dim)
    if x.is_cuda:
        from beam_rl.mxfp8 import kernel  # a torch for CPUs comes without Triton

        return Quantized(*kernel.quantize(x, dim), dim)
    payload, byte = _quantize_blocks(x, dim)
    return Quantized(payload.flatten(dim, dim + 1), byte.squeeze(dim + 1).to(torch.uint8), dim)


def dequantize(q: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values that the payload and its scales stand for."""
    dim = q.dim % q.payload.ndim
    payload = q.payload.unflatten(dim, (q.scales.shape[dim], BLOCK))
    return _dequantize_blocks(payload, q.scales.int().unsqueeze(dim + 1), dim, dtype)


def rounded(x: Tensor, dim: int = -1) -> Tensor:
    """x as MXFP8 has it, in x's dtype: what is quantized along `dim` stands for."""
    dim = _divided(x, dim)
    if x.is_cuda:
        from beam_rl.mxfp8 import kernel

        return kernel.rounded(x, dim)
    return _dequantize_blocks(*_quantize_blocks(x, dim), dim, x.dtype)


def _divided(x: Tensor, dim: int) -> int:
    """The dimension, counted from 0. Raises ValueError if 32 does not divide it."""
    dim %= x.ndim
    if x.shape[dim] % BLOCK:
        raise ValueError(f"MXFP8 has blocks of {BLOCK}, which do not divide dimension {dim} of {tuple(x.shape)}")
    return dim


def _quantize_blocks(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """E4M3 values with the blocks in a dimension after `dim`, and each block's byte (int32)."""
    blocks = x.float().unflatten(dim, (x.shape[dim] // BLOCK, BLOCK))
    amax = blocks.abs().amax(dim + 1, keepdim=True)
    byte = scale_byte(amax)
    scaled = blocks / scale_value(byte).masked_fill(amax.isnan(), torch.nan)
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), byte


def _dequantize_blocks(payload: Tensor, byte: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return (payload.float() * scale_value(byte)).flatten(dim, dim + 1).to(dtype)


def scale_byte(amax: Tensor) -> Tensor:
    """E8M0 byte (int32) of blocks with these largest magnitudes (FP32).

    With amax = f · 2^e and 448 = 1.75 · 2^8 the smallest scale that is enough is 2^(e − 8), or the next if f > 1.75: if so,
    adding a quarter less one unit to the 23 bits of f carries into those of e.
    """
    bits = amax.view(torch.int32)
    byte = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=0)
    return byte.masked_fill(bits == INFINITY_BITS, INFINITE).masked_fill(bits > INFINITY_BITS, 0)


def scale_value(byte: Tensor) -> Tensor:
    """2^(byte − 127) in FP32, exactly, for int32 bytes to 254. 2^-127 is subnormal, with bits of its own."""
    return (byte << 23).clamp(min=0x400000).view(torch.float32)
