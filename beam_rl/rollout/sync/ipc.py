"""Buckets on one GPU that trainer and engines share: the workers map the sender's two buffers through CUDA IPC.

A bucket is announced as soon as its copies are under way: an event that both processes know has a worker's GPU wait for
them. What travels beside is plain values: handles of buffers and events, no pickled functions. Knows nothing about Ray or
vLLM.
"""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

OFFSET, DEVICE, GRAD = 3, 6, 10  # places in what `reduce_tensor` says of a tensor on a GPU


class IpcSender:
    """`buffers` are on `device`. torch counts who maps a buffer, so each worker gets handles of its own."""

    shared_fate = False
    begins_early = False

    def __init__(self, bucket_bytes: int, workers: int, device: torch.device) -> None:
        self.buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.handles = [[_export(buffer) for buffer in self.buffers] for _ in range(workers)]
        self.filled = [torch.cuda.Event(interprocess=True) for _ in range(2)]
        self.device = device

    def join_info(self) -> dict[str, Any]:
        events = [event.ipc_handle() for event in self.filled]
        return {"transport": "ipc", "handles": self.handles, "filled": events}

    def has_arrived(self, rank: int, timeout_s: float) -> bool:
        return True  # who joins needs nothing from this side

    def connect(self) -> None: ...

    def start(self, slot: int, nbytes: int) -> None:
        self.filled[slot].record(torch.cuda.current_stream(self.device))

    def finish(self, slot: int) -> None: ...
    def abandon(self) -> None: ...

    def close(self) -> None:
        self.buffers, self.handles = [], []
        torch.cuda.ipc_collect()


class IpcReceiver:
    """A worker's view of the sender's buffers."""

    own_buffers = False

    def __init__(self, join: dict[str, Any], worker: int, device: torch.device) -> None:
        self.buffers = [_map(handle, join["bucket_bytes"], device) for handle in join["handles"][worker]]
        self.filled = [torch.cuda.Event.from_ipc_handle(device, handle) for handle in join["filled"]]
        self.device = device

    def start(self, slot: int, nbytes: int) -> None:
        self.nbytes = nbytes

    def wait(self, slot: int, deadline_s: float) -> Tensor:
        torch.cuda.current_stream(self.device).wait_event(self.filled[slot])
        return self.buffers[slot][: self.nbytes]

    def close(self) -> None:
        self.buffers = []


def _export(buffer: Tensor) -> list[Any]:
    """Numbers and bytes that another process maps the buffer by."""
    _, about = reduce_tensor(buffer)
    return [about[OFFSET], *about[DEVICE + 1 : GRAD], *about[GRAD + 1 :]]


def _map(handle: list[Any], nbytes: int, device: torch.device) -> Tensor:
    """(nbytes,) uint8 in another process's memory on the same GPU, whose index here is `device`'s."""
    offset, memory, size, memory_offset, *events = handle
    shape = (Tensor, torch.Size([nbytes]), (1,), offset, torch.storage.TypedStorage, torch.uint8)
    return rebuild_cuda_tensor(*shape, device.index or 0, memory, size, memory_offset, False, *events)
