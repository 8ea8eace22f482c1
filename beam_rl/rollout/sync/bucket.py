"""Named tensors packed into flat byte buffers of bounded size, each tensor in its own dtype.

Plain torch. Knows nothing about transports, processes or models.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; torch can view bytes as any dtype from there


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a bucket: `offset` in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Some tensors end to end. `data` is (bytes,) uint8 on the CPU, valid until the next bucket is asked for."""

    entries: tuple[Entry, ...]
    data: Tensor

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors, without the gaps of alignment."""
        return sum(entry.nbytes for entry in self.entries)


def pack(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Packs tensors in order into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    Takes one tensor at a time from the iterable and drops it before the next, so that a producer can gather each on demand.
    One buffer serves all buckets (it grows only for a larger tensor).
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes = {bucket_bytes}: a bucket holds at least 1 byte")
    buffer = torch.empty(bucket_bytes, dtype=torch.uint8)
    entries: list[Entry] = []
    end = 0
    for name, tensor in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if entries and start + tensor.nbytes > bucket_bytes:
            yield Bucket(tuple(entries), buffer[:end])
            entries, start = [], 0
        if tensor.nbytes > len(buffer):
            buffer = torch.empty(tensor.nbytes, dtype=torch.uint8)
        end = start + tensor.nbytes
        buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), start))
    if entries:
        yield Bucket(tuple(entries), buffer[:end])


def unpack(entries: Iterable[Entry], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The bucket's tensors, as views of `data` (bytes,) uint8."""
    for entry in entries:
        raw = data[entry.offset : entry.offset + entry.nbytes]
        yield entry.name, raw.view(entry.dtype).view(entry.shape)


def to_metadata(bucket: Bucket) -> dict[str, Any]:
    """What a receiver needs beforehand, in plain values."""
    return {
        "names": [e.name for e in bucket.entries],
        "dtypes": [str(e.dtype).removeprefix("torch.") for e in bucket.entries],
        "shapes": [list(e.shape) for e in bucket.entries],
        "offsets": [e.offset for e in bucket.entries],
        "nbytes": len(bucket.data),
    }


def from_metadata(names: list[str], dtypes: list[str], shapes: list[list[int]], offsets: list[int]) -> list[Entry]:
    """The entries that `to_metadata` described."""
    fields = zip(names, dtypes, shapes, offsets, strict=True)
    return [Entry(name, getattr(torch, dtype), tuple(shape), offset) for name, dtype, shape, offset in fields]
