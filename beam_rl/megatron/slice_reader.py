"""Reads slices of safetensors files straight into parameters: only their bytes, several requests at once, bounded memory.

A file is a header that says where each tensor begins, and the tensors, row by row; so some rows are one piece of the file.
Where a rank has some columns, each row's part is read on its own, unless it is smaller than a page: then whole rows are.
What is read goes through the page cache, so ranks of a node that hold the same read it from the disk once. Knows nothing
about Megatron.
"""

import json
import math
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from beam_rl.errors import InputError

BLOCK_BYTES = 16 * 2**20  # read at one time by a thread
THREADS = 4
PAGE_BYTES = 4096
TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class SliceLike(Protocol):
    """Of a tensor of the checkpoint, and where it goes: `megatron.slices.Slice`."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> range: ...
    @property
    def columns(self) -> range | None: ...
    @property
    def into(self) -> int: ...
    @property
    def whole(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte of its first value in the file

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])


@dataclass(frozen=True)
class _Block:
    """Some rows of a slice: what one thread reads at one time."""

    stored: Stored
    rows: range
    columns: range | None
    target: Tensor


class SafetensorsFolder:
    """The tensors of a folder with one or many safetensors files."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers. InputError for a file that is damaged."""
        self.tensors: dict[str, Stored] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.tensors |= _header(file)

    def read_into(self, wanted: Iterable[tuple[Tensor, Iterable[SliceLike]]]) -> int:
        """Fills parameters with their slices, in the parameter's own type; returns the bytes read.

        Host memory: `THREADS` blocks, each a row at least.
        Raises:
            InputError: a tensor is not there, has another shape, or its file ends too early.
        """
        blocks = [block for target, slices in wanted for part in slices for block in self._blocks(target, part)]
        blocks.sort(key=lambda b: (b.stored.file, b.stored.start, b.rows.start))
        with _Files() as files, ThreadPoolExecutor(THREADS, "read-slices") as pool:
            reader = _Reader(files)
            return sum(pool.map(reader.read, blocks))

    def _blocks(self, target: Tensor, part: SliceLike) -> Iterator[_Block]:
        stored = self.tensors.get(part.name)
        if stored is None:
            raise InputError(f"the checkpoint has no tensor {part.name}")
        if tuple(stored.shape) != part.whole:
            shapes = f"{list(stored.shape)}, and config.json says {list(part.whole)}"
            raise InputError(f"{stored.file}: {part.name} has the shape {shapes}")
        rows = max(1, BLOCK_BYTES // max(1, stored.row_bytes))
        for first in range(part.rows.start, part.rows.stop, rows):
            some = range(first, min(first + rows, part.rows.stop))
            begin = part.into + first - part.rows.start
            yield _Block(stored, some, part.columns, target.data[begin : begin + len(some)])


class _Files:
    """Open files by their paths; closed at the end."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._open.values():
            os.close(number)

    def read(self, file: Path, start: int, into: memoryview) -> None:
        """Fills `into` with the file's bytes from `start` on. InputError if there are too few."""
        with self._lock:
            if file not in self._open:
                self._open[file] = os.open(file, os.O_RDONLY)
                # What lies between two slices is another rank's: nothing is to be read ahead of a request.
                os.posix_fadvise(self._open[file], 0, 0, os.POSIX_FADV_RANDOM)
            number = self._open[file]
        done = 0
        while done < len(into):
            got = os.preadv(number, [into[done:]], start + done)
            if not got:
                raise InputError(f"{file}: ends before byte {start + len(into)}; its download or copy is not complete")
            done += got


class _Reader:
    """What each thread reads with: a buffer of its own, page-locked where there is a GPU."""

    def __init__(self, files: _Files) -> None:
        self._files, self._own = files, threading.local()

    @torch.no_grad()
    def read(self, block: _Block) -> int:
        """Returns the bytes read."""
        stored, columns = block.stored, block.columns
        size = stored.dtype.itemsize
        if columns is None or len(columns) * size < PAGE_BYTES:
            nbytes = len(block.rows) * stored.row_bytes
            buffer = self._buffer(nbytes)
            self._files.read(
                stored.file, stored.start + block.rows.start * stored.row_bytes, memoryview(buffer.numpy())
            )
            rows = buffer.view(stored.dtype).view(len(block.rows), *stored.shape[1:])
            block.target.copy_(rows if columns is None else rows[:, columns.start : columns.stop])
            return nbytes
        part = len(columns) * size
        buffer = self._buffer(len(block.rows) * part)
        view = memoryview(buffer.numpy())
        for i, row in enumerate(block.rows):
            start = stored.start + row * stored.row_bytes + columns.start * size
            self._files.read(stored.file, start, view[i * part : (i + 1) * part])
        block.target.copy_(buffer.view(stored.dtype).view(len(block.rows), len(columns)))
        return len(block.rows) * part

    def _buffer(self, nbytes: int) -> Tensor:
        buffer: Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            size = max(nbytes, BLOCK_BYTES)
            buffer = self._own.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return buffer[:nbytes]


def _header(file: Path) -> dict[str, Stored]:
    """What a safetensors file says of its tensors: 8 bytes of length, then as much JSON, then the data."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size - 8:
                raise ValueError("its header is cut off")
            header: Mapping[str, dict] = json.loads(stream.read(length))
        begin = 8 + length
        return {
            name: Stored(file, TYPES[about["dtype"]], tuple(about["shape"]), begin + about["data_offsets"][0])
            for name, about in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, struct.error, KeyError, TypeError, IndexError) as error:
        raise InputError(f"{file}: no safetensors file that can be read ({error})") from None
