"""Named tensors packed into flat byte buffers of fixed size, and taken out again; each tensor keeps its own dtype.

A tensor that fits into a bucket travels whole, a larger one in pieces over several buckets. Plain torch. Knows nothing
about transports, processes or models.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from beam_rl.rollout.sync.checksum import checksum, copy_with_checksum
from beam_rl.rollout.sync.device_copy import DeviceCopies

ALIGNMENT = 16  # bytes; torch can view bytes as any dtype from there, and a bucket's end is a whole number of words


class Entry(NamedTuple):
    """Where a tensor, or a piece of it, lies in a bucket. All of `offset`, `start` and `nbytes` are bytes."""

    name: str
    dtype: str  # torch's name, such as "bfloat16"
    shape: list[int]
    offset: int  # in the bucket
    start: int  # of the piece in the tensor
    nbytes: int  # of the piece
    checksum: int | None = None  # of the piece

    @property
    def whole_bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Bucket:
    """`number` counts the buckets of an update; the first `nbytes` of the buffer are the entries and the gaps between."""

    number: int
    entries: tuple[Entry, ...]
    nbytes: int
    last: bool  # of its update

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors, without the gaps of alignment."""
        return sum(entry.nbytes for entry in self.entries)


def pack(tensors: Iterable[tuple[str, Tensor]], buffers: Iterator[Tensor], checksums: bool = False) -> Iterator[Bucket]:
    """Fills one buffer after the other with tensors, in order; a buffer is asked for when something is to go into it.

    Takes one tensor at a time from the iterable and drops it before the next (within a GPU before the next but one), so that
    a producer can gather each on demand. A bucket is yielded as soon as it is known to be full, before its successor is
    begun.

    Args:
        buffers: (bytes,) uint8 each, all of the same size, a whole number of `ALIGNMENT`, on any device.
        checksums: whether entries have one.
    """
    with contextlib.ExitStack() as unfinished:
        yield from _pack(tensors, buffers, checksums, unfinished)


def _pack(
    tensors: Iterable[tuple[str, Tensor]], buffers: Iterator[Tensor], checksums: bool, unfinished: contextlib.ExitStack
) -> Iterator[Bucket]:
    """`unfinished` gets what ends a bucket's copies, however the packing ends."""
    number = end = 0
    entries: list[Entry] = []
    buffer: Tensor | None = None
    fast: DeviceCopies | None = None
    for name, tensor in tensors:
        dtype, shape, whole, start = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes, 0
        while start < whole or not start:
            rest = whole - start
            if buffer is not None and rest > len(buffer) - end:
                unfinished.close()
                yield Bucket(number, tuple(entries), end, last=False)
                number, end, entries, buffer = number + 1, 0, [], None
            if buffer is None:
                buffer = next(buffers)
                fast = DeviceCopies(buffer) if buffer.is_cuda and not checksums else None
                if fast:
                    unfinished.callback(fast.finish)
            size = min(rest, len(buffer) - end)
            if size < whole:
                tensor = tensor.contiguous()
            sum_ = None
            if fast and fast.takes(tensor):
                fast.copy(tensor, start, end, size)
            else:
                sum_ = _copy(tensor.detach(), start, buffer.narrow(0, end, size), checksums)
            entries.append(Entry(name, dtype, shape, end, start, size, sum_))
            start, end = start + size, aligned(end + size)
            if not size:
                break
        del tensor
    unfinished.close()
    if entries:
        yield Bucket(number, tuple(entries), end, last=True)


def _copy(tensor: Tensor, start: int, into: Tensor, with_checksum: bool) -> int | None:
    """Copies the tensor's bytes from `start` on, as many as `into` holds; of a contiguous tensor if not all."""
    if not tensor.is_contiguous():
        into.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return checksum(into) if with_checksum else None
    source = tensor.view(-1).view(torch.uint8)
    if into.numel() < source.numel():
        source = source.narrow(0, start, into.numel())
    if with_checksum:
        return copy_with_checksum(source, into)
    into.copy_(source)
    return None


def aligned(end: int) -> int:
    """The next place where a tensor may begin."""
    return -(-end // ALIGNMENT) * ALIGNMENT


class Assembler:
    """The receiving end of `pack`: tensors that own their memory on `device`, made from buckets in their order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.own: Tensor | None = None  # bytes of the tensor whose pieces are coming

    def tensors(self, bucket: Bucket, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Copies out what a bucket's bytes `data` complete, one tensor at a time; ValueError where a checksum is wrong."""
        for e in bucket.entries:
            whole = e.whole_bytes
            if e.start == 0:
                self.own = torch.empty(whole, dtype=torch.uint8, device=self.device)
            assert self.own is not None, f"{e.name}: its first piece is missing"
            piece, into = data.narrow(0, e.offset, e.nbytes), self.own.narrow(0, e.start, e.nbytes)
            if e.checksum is None:
                into.copy_(piece)
            elif copy_with_checksum(piece, into) != e.checksum:
                raise ValueError(
                    f"weight bucket {bucket.number} arrived damaged: {e.name} has not the sender's checksum"
                )
            if e.start + e.nbytes == whole:
                tensor, self.own = _as_described(self.own, e), None
                yield e.name, tensor
                del tensor

    def tensors_at_once(self, bucket: Bucket, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The same with a single copy of the bucket, which its whole tensors share; checksums are not looked at.

        On a GPU the copies themselves are shorter than it takes to start one for each tensor.
        """
        own = data.to(self.device, copy=True)
        views: dict[torch.dtype, Tensor] = {}  # the bucket as one vector of each dtype: a view a tensor, not three
        for e in bucket.entries:
            dtype = getattr(torch, e.dtype)
            if e.nbytes != math.prod(e.shape) * dtype.itemsize:
                yield from self.tensors(replace(bucket, entries=(e,)), own)
                continue
            if dtype not in views:
                views[dtype] = own[: len(own) // dtype.itemsize * dtype.itemsize].view(dtype)
            strides = [math.prod(e.shape[i + 1 :]) for i in range(len(e.shape))]
            yield e.name, views[dtype].as_strided(e.shape, strides, e.offset // dtype.itemsize)


def _as_described(raw: Tensor, entry: Entry) -> Tensor:
    """The tensor whose bytes these are."""
    return raw.view(getattr(torch, entry.dtype)).view(entry.shape)


def to_metadata(bucket: Bucket) -> dict[str, Any]:
    """What a receiver needs to know of a bucket, in plain values."""
    return {
        "number": bucket.number,
        "nbytes": bucket.nbytes,
        "last": bucket.last,
        "entries": [list(entry) for entry in bucket.entries],
    }


def from_metadata(metadata: Mapping[str, Any]) -> Bucket:
    """The bucket that `to_metadata` described."""
    entries = tuple(Entry(*entry) for entry in metadata["entries"])
    return Bucket(metadata["number"], entries, metadata["nbytes"], metadata["last"])
