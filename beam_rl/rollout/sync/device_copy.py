"""Copies within a GPU's memory without torch's views: for a bucket's dozen tensors they would outweigh the copies."""

import torch
from torch import Tensor


class DeviceCopies:
    """Into one buffer on a GPU, in the stream that is current when this is made."""

    def __init__(self, buffer: Tensor) -> None:
        from cuda.bindings import runtime  # torch for GPUs brings it

        self._copy, self._within, self._done = (
            runtime.cudaMemcpyAsync,
            runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
            runtime.cudaError_t.cudaSuccess,
        )
        self._stream = torch.cuda.current_stream(buffer.device).cuda_stream
        self._start, self._device = buffer.data_ptr(), buffer.device

    def takes(self, tensor: Tensor) -> bool:
        return tensor.device == self._device and tensor.is_contiguous()

    def copy(self, tensor: Tensor, start: int, at: int, nbytes: int) -> None:
        """Begins to copy a tensor's bytes from `start` on to the buffer's from `at` on; RuntimeError if CUDA refuses."""
        (status,) = self._copy(self._start + at, tensor.data_ptr() + start, nbytes, self._within, self._stream)
        if status != self._done:
            raise RuntimeError(f"a copy of {nbytes} bytes within {self._device} failed: {status.name}")
