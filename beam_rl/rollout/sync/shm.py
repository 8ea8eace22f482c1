"""Buckets in shared memory: the engines' workers map the sender's two buffers. One machine, no copy through a socket.

With GPUs the memory is pinned at both ends, so that they copy to and from it at the bus's speed.

The segments have no name: a worker opens them through /proc while the sender lives, and the last of the processes that
end takes them with it, whichever way. Knows nothing about Ray or vLLM.
"""

import mmap
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from beam_rl.rollout.sync.transport import SyncError

READ_WRITE, READ_ONLY = 0, 8  # CUDA's flags of cudaHostRegister


class ShmSender:
    """`buffers` are shared with every worker that has joined."""

    shared_fate = False
    begins_early = False

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self.segments = [_create(bucket_bytes) for _ in range(2)]
        self.buffers = [torch.frombuffer(mmap.mmap(fd, bucket_bytes), dtype=torch.uint8) for fd in self.segments]
        self.pinned = [b for b in self.buffers if device.type == "cuda" and _pin(b, READ_WRITE)]

    def join_info(self) -> dict[str, Any]:
        described = [[fd, os.fstat(fd).st_ino, os.fstat(fd).st_size] for fd in self.segments]
        return {"transport": "shm", "pid": os.getpid(), "segments": described}

    def has_arrived(self, rank: int, timeout_s: float) -> bool:
        return True  # who joins needs nothing from this side

    def connect(self) -> None: ...
    def start(self, slot: int, nbytes: int) -> None: ...
    def finish(self, slot: int) -> None: ...
    def abandon(self) -> None: ...

    def close(self) -> None:
        _unpin(self.pinned)
        self.buffers = []
        while self.segments:
            os.close(self.segments.pop())


class ShmReceiver:
    """A worker's view of the sender's buffers; it can't write to them."""

    own_buffers = False

    def __init__(self, join: dict[str, Any], device: torch.device) -> None:
        self.buffers = [_map(join["pid"], *segment) for segment in join["segments"]]
        self.pinned = [b for b in self.buffers if device.type == "cuda" and _pin(b, READ_ONLY)]

    def start(self, slot: int, nbytes: int) -> None:
        self.nbytes = nbytes

    def wait(self, slot: int, deadline_s: float) -> Tensor:
        return self.buffers[slot][: self.nbytes]

    def close(self) -> None:
        _unpin(self.pinned)
        self.buffers = []


def _create(size: int) -> int:
    """A file descriptor of `size` bytes of memory, all of them set aside, or OSError."""
    fd = os.memfd_create("beam-rl-sync", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _map(pid: int, fd: int, inode: int, size: int) -> Tensor:
    """Another process's segment as (size,) uint8, read-only. SyncError if it isn't there: another machine, or gone."""
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SyncError(f"cannot map the trainer's shared memory: process {pid}: {error.strerror}") from None
    try:
        if (os.fstat(own).st_ino, os.fstat(own).st_size) != (inode, size):
            raise SyncError(f"cannot map the trainer's shared memory: process {pid} here is another one")
        mapped = mmap.mmap(own, size, prot=mmap.PROT_READ)
    finally:
        os.close(own)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _pin(buffer: Tensor, flags: int) -> bool:
    """Registers memory with CUDA. False where CUDA refuses: then copies are slower, and as right."""
    return int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, flags)) == 0


def _unpin(buffers: list[Tensor]) -> None:
    while buffers:
        torch.cuda.cudart().cudaHostUnregister(buffers.pop().data_ptr())
