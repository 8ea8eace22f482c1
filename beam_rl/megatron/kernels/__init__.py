"""Fused Triton kernels, with backward, for what lies between the matrix products of a Beam layer.

Each module has its kernels, the function that the model calls, and `reference`, the same in plain torch. Forward they
round where `reference` does; backward they keep FP32 throughout and round each gradient once. Each way reads its
inputs once and writes its outputs once; what is cheap is computed again, and gradients of weights are partial sums of
each program, added in the same order every time: the same input gives the same bits. They know nothing about Megatron.

Forward kernels are launched without `fp_fusion`: a fused multiply-add would leave out a rounding that torch has. The
head's are not: its log-probabilities are torch's to a part in 1e5, not to the bit.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

triton: Any
tl: Any
try:
    triton, tl = import_module("triton"), import_module("triton.language")
except ModuleNotFoundError:  # a torch for CPUs alone comes without it; nothing is launched there
    triton = SimpleNamespace(jit=lambda function: function, knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=0)))
    tl = SimpleNamespace(constexpr=lambda value: value)

SUM_ROWS, SUM_COLUMNS = 128, 16  # that a program adds at a time
OTHER_SHARED_BYTES = 24 * 2**10  # of a program's shared memory, for what is not on its way
DTYPES = (torch.bfloat16, torch.float32)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """FP32 x, rounded to the nearest value that `dtype` (BF16 or FP32) has, the even one of two; still FP32."""
    if INTERPRETED and dtype == tl.bfloat16:  # Triton's interpreter cuts off the bits that a GPU rounds
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def store_rounded(pointer, x, mask):
    tl.store(pointer, rounded(x, pointer.dtype.element_ty).to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(partial, out, programs, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    own = partial + tl.program_id(0) * programs * width + column
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(own + row * width, mask=(row < programs) & (column < width), other=0.0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    store_rounded(out + tl.program_id(0) * width + column, tl.sum(total, 0), column < width)


def summed(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, programs, width) FP32, summed over the programs and rounded to `dtype`: (n, width)."""
    n, programs, width = partial.shape
    out = partial.new_empty(n, width, dtype=dtype)
    _sum_kernel[(n, triton.cdiv(width, SUM_COLUMNS))](partial, out, programs, width, SUM_ROWS, SUM_COLUMNS)
    return out


def covers(*tensors: Tensor) -> bool:
    """Whether the kernels are for these: on a GPU, in one dtype that they know."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(x.is_cuda and x.dtype == dtype for x in tensors)


def stages(x: Tensor, row_bytes: int, wanted: int) -> int:
    """How many rows of so many bytes may be on their way to a program at a time, `wanted` at most: there is room for."""
    if x.device.type != "cuda":
        return wanted  # in Triton's interpreter, which has no such memory
    device = torch.cuda.get_device_properties(x.device)
    room: int = getattr(device, "shared_memory_per_block_optin", device.shared_memory_per_block)
    return max(1, min(wanted, (room - OTHER_SHARED_BYTES) // row_bytes))


def at_one_time(x: Tensor, warps: int, warps_per_sm: int) -> int:
    """How many programs of so many warps the GPU that has x runs at one time."""
    if x.device.type != "cuda":
        return 3  # in Triton's interpreter
    return torch.cuda.get_device_properties(x.device).multi_processor_count * warps_per_sm // warps
