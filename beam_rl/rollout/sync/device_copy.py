"""Copies within a GPU's memory without torch's views: for a bucket's dozen tensors they would outweigh the copies."""

import ctypes
from functools import cache

import torch
from torch import Tensor

WITHIN_DEVICE = 3  # cudaMemcpyDeviceToDevice


class DeviceCopies:
    """Into one buffer on a GPU, in the stream that is current when this is made."""

    def __init__(self, buffer: Tensor) -> None:
        self._copy, self._stream = _memcpy(), torch.cuda.current_stream(buffer.device).cuda_stream
        self._start, self._device = buffer.data_ptr(), buffer.device

    def takes(self, tensor: Tensor) -> bool:
        return tensor.device == self._device and tensor.is_contiguous()

    def copy(self, tensor: Tensor, start: int, at: int, nbytes: int) -> None:
        """Begins to copy a tensor's bytes from `start` on to the buffer's from `at` on; RuntimeError if CUDA refuses."""
        status = self._copy(self._start + at, tensor.data_ptr() + start, nbytes, WITHIN_DEVICE, self._stream)
        if status:
            raise RuntimeError(f"a copy of {nbytes} bytes within {self._device} failed: CUDA error {status}")


@cache
def _memcpy() -> "ctypes._NamedFuncPointer":
    """`cudaMemcpyAsync` of the CUDA runtime that torch has loaded; cuda-bindings takes three times as long for a call."""
    major = (torch.version.cuda or "").partition(".")[0]
    memcpy = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyAsync
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    memcpy.restype = ctypes.c_int
    return memcpy
