"""A worker's part of a weight sync, whatever the transport: receives buckets in their order and checks them.

What it hands out owns its memory: when a bucket has been read, its buffer may change. Where the transport brings buckets
into buffers of this side's own, one is awaited and unpacked while the next is on its way already, so that the way between
is never idle. Knows nothing about Ray or vLLM.
"""

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from beam_rl.rollout.sync.bucket import Assembler, Bucket, from_metadata
from beam_rl.rollout.sync.transport import SyncError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT_BYTES, LARGEST_KEPT = 2**30, 32 * 2**20  # the latter is glibc's own limit


class ReceiverEnd(Protocol):
    own_buffers: bool  # a bucket's bytes stay valid until the next but one is started; else until it is acknowledged

    def start(self, slot: int, nbytes: int) -> None:
        """Begins to take a bucket, while one before it may still be on its way; does not wait for it."""

    def wait(self, slot: int, deadline_s: float) -> Tensor:
        """(nbytes,) uint8 of the bucket that was started there. SyncError if it doesn't come."""

    def close(self) -> None:
        """Gives back what this end holds."""


class BucketReceiver:
    """`begin` comes before each update."""

    def __init__(self, end: ReceiverEnd) -> None:
        self.end = end
        keep_freed_memory()

    def begin(self, device: torch.device) -> None:
        """Forgets what is left of an update before. The tensors of this one come out on `device`."""
        self.expected, self.device = 0, device
        self.assembler = Assembler(device)
        self.under_way: tuple[Bucket, int, float] | None = None  # with its slot and deadline; not unpacked yet

    def receive(self, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Tensors that have come whole, at the update's last bucket all that are left.

        Args:
            metadata: what the sender announced.
        """
        bucket = from_metadata(metadata)
        if bucket.number != self.expected:
            raise SyncError(f"weight bucket {bucket.number} came in the place of {self.expected}")
        self.end.start(metadata["slot"], bucket.nbytes)
        yield from self._unpack()
        self.under_way = bucket, metadata["slot"], metadata["deadline_s"]
        if bucket.last or not self.end.own_buffers:
            yield from self._unpack()
        self.expected += 1  # only now: after a bucket that failed no other is taken

    def _unpack(self) -> Iterator[tuple[str, Tensor]]:
        """What the bucket under way completes, once it is here."""
        if self.under_way is None:
            return
        (bucket, slot, deadline_s), self.under_way = self.under_way, None
        data = self.end.wait(slot, deadline_s)
        yield from self._tensors(bucket, data)
        for device in {data.device, self.device}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # the copies out of the buffer

    def _tensors(self, bucket: Bucket, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """One more bucket of memory is there where the end has none of its own."""
        checked = any(entry.checksum is not None for entry in bucket.entries)
        if data.device.type == "cuda" and not self.end.own_buffers and not checked:
            return self.assembler.tensors_at_once(bucket, data)
        return self.assembler.tensors(bucket, data)

    def close(self) -> None:
        self.end.close()


def keep_freed_memory() -> None:
    """Has this process keep freed memory for its next tensors: fresh pages, which the system clears, halve a copy's rate."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
