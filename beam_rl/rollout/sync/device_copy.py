"""Copies within a GPU's memory, two at a time and without torch's views: those would outweigh a bucket's dozen copies."""

import ctypes
from functools import cache

import torch
from torch import Tensor

WITHIN_DEVICE = 3  # cudaMemcpyDeviceToDevice


class DeviceCopies:
    """Into one buffer on a GPU, over two streams in turn: in one, the end of a copy and the next one's beginning leave the
    memory idle.

    Each copy waits for what the current stream has been given so far. A tensor is held until the next one's copy has begun,
    and what the current stream is given then comes after its own: so its memory can be used again. `finish` comes last.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._copy, self._start, self._device = _memcpy(), buffer.data_ptr(), buffer.device
        self._current, self._streams = torch.cuda.current_stream(buffer.device), _streams(buffer.device)
        self._ready, self._done = torch.cuda.Event(), (torch.cuda.Event(), torch.cuda.Event())
        self._turn, self._held = 0, buffer

    def takes(self, tensor: Tensor) -> bool:
        return tensor.device == self._device and tensor.is_contiguous()

    def copy(self, tensor: Tensor, start: int, at: int, nbytes: int) -> None:
        """Begins to copy a tensor's bytes from `start` on to the buffer's from `at` on; RuntimeError if CUDA refuses."""
        stream, done = self._streams[self._turn], self._done[self._turn]
        self._turn = 1 - self._turn
        self._ready.record(self._current)
        stream.wait_event(self._ready)
        status = self._copy(self._start + at, tensor.data_ptr() + start, nbytes, WITHIN_DEVICE, stream.cuda_stream)
        if status:
            raise RuntimeError(f"a copy of {nbytes} bytes within {self._device} failed: CUDA error {status}")
        done.record(stream)
        self._current.wait_event(self._done[self._turn])  # the copy before; of none nothing is awaited
        self._held = tensor

    def finish(self) -> None:
        """What the current stream is given from now on comes after the copies."""
        for stream in self._streams:
            self._current.wait_stream(stream)
        del self._held


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


@cache
def _memcpy() -> "ctypes._NamedFuncPointer":
    """`cudaMemcpyAsync` of the CUDA runtime that torch has loaded; cuda-bindings takes three times as long for a call."""
    major = (torch.version.cuda or "").partition(".")[0]
    memcpy = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyAsync
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    memcpy.restype = ctypes.c_int
    return memcpy
