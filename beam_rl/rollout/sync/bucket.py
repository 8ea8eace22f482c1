"""Named tensors packed into flat byte buffers of fixed size, and taken out again; each tensor keeps its own dtype.

A tensor that fits into a bucket travels whole, a larger one in pieces over several buckets. Plain torch. Knows nothing
about transports, processes or models.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; torch can view bytes as any dtype from there, and a bucket's end is a whole number of words


@dataclass(frozen=True)
class Entry:
    """Where a tensor, or a piece of it, lies in a bucket. All of `offset`, `start` and `nbytes` are bytes."""

    name: str
    dtype: str  # torch's name, such as "bfloat16"
    shape: list[int]
    offset: int  # in the bucket
    start: int  # of the piece in the tensor
    nbytes: int  # of the piece

    @property
    def whole_bytes(self) -> int:
        """Of the whole tensor."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Bucket:
    """`number` counts the buckets of an update; the first `nbytes` of the buffer are the entries and the gaps between."""

    number: int
    entries: tuple[Entry, ...]
    nbytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors, without the gaps of alignment."""
        return sum(entry.nbytes for entry in self.entries)


def pack(tensors: Iterable[tuple[str, Tensor]], buffers: Iterator[Tensor]) -> Iterator[Bucket]:
    """Fills one buffer after the other with tensors, in order; a buffer is asked for when something is to go into it.

    Takes one tensor at a time from the iterable and drops it before the next, so that a producer can gather each on
    demand. A bucket is yielded as soon as it is known to be full, before its successor is begun.

    Args:
        buffers: (bytes,) uint8 each, all of the same size, a whole number of `ALIGNMENT`, on any device.
    """
    number = end = 0
    entries: list[Entry] = []
    buffer: Tensor | None = None
    for name, tensor in tensors:
        dtype, shape, start = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), 0
        while start < tensor.nbytes or not start:
            rest = tensor.nbytes - start
            if buffer is not None and rest > len(buffer) - end:
                yield Bucket(number, tuple(entries), end)
                number, end, entries, buffer = number + 1, 0, [], None
            if buffer is None:
                buffer = next(buffers)
            size = min(rest, len(buffer) - end)
            if size < tensor.nbytes:
                tensor = tensor.contiguous()
            _copy(tensor.detach(), start, buffer[end : end + size])
            entries.append(Entry(name, dtype, shape, end, start, size))
            start, end = start + size, aligned(end + size)
            if not size:
                break
        del tensor
    if entries:
        yield Bucket(number, tuple(entries), end)


def _copy(tensor: Tensor, start: int, into: Tensor) -> None:
    """Copies the tensor's bytes from `start` on, as many as `into` holds; of a contiguous tensor if not all."""
    if len(into) == tensor.nbytes:
        into.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    else:
        into.copy_(tensor.view(-1).view(torch.uint8)[start : start + len(into)])


def aligned(end: int) -> int:
    """The next place where a tensor may begin."""
    return -(-end // ALIGNMENT) * ALIGNMENT


class Assembler:
    """The receiving end of `pack`: tensors that own their memory on `device`, made from buckets in their order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.partial: Tensor | None = None  # bytes of the tensor whose pieces are coming

    def tensors(self, entries: Iterable[Entry], data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Copies out what a bucket's bytes `data` complete, one tensor at a time."""
        for e in entries:
            raw, whole = data[e.offset : e.offset + e.nbytes], e.whole_bytes
            if e.nbytes == whole:
                yield e.name, raw.view(getattr(torch, e.dtype)).view(e.shape).to(self.device, copy=True)
                continue
            if e.start == 0:
                self.partial = torch.empty(whole, dtype=torch.uint8, device=self.device)
            assert self.partial is not None, f"{e.name}: its first piece is missing"
            self.partial[e.start : e.start + e.nbytes].copy_(raw)
            if e.start + e.nbytes == whole:
                tensor, self.partial = self.partial.view(getattr(torch, e.dtype)).view(e.shape), None
                yield e.name, tensor
                del tensor


def to_metadata(bucket: Bucket) -> dict[str, Any]:
    """What a receiver needs to know of a bucket, in plain values."""
    return {"number": bucket.number, "nbytes": bucket.nbytes, "entries": [asdict(entry) for entry in bucket.entries]}


def from_metadata(metadata: Mapping[str, Any]) -> Bucket:
    """The bucket that `to_metadata` described."""
    entries = tuple(Entry(**entry) for entry in metadata["entries"])
    return Bucket(metadata["number"], entries, metadata["nbytes"])
