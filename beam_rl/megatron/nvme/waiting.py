"""A file for a trainer's state to wait in while engines have its GPU: a `megatron.offload.Place`.

Each part is a run of blocks in the file. On the way out a block is copied to host memory while those before it are being
written; on the way back those after it are being read while a block is copied to the GPU. Host memory is a few blocks,
taken once. The file has no name: its space goes back with the process, however that ends, and no other can open it.
"""

import bisect
import contextlib
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.megatron.nvme.disk import ALIGNMENT, KEY, DiskError, File, Threads, Transfer, aligned
from beam_rl.megatron.offload import Piece, as_bytes, finish

SLOTS = 3  # blocks in host memory: two on the way to or from the disk, one to or from the GPU


class FilePlace:
    def __init__(self, sizes: Mapping[str, int], folder: Path, block_bytes: int) -> None:
        """Reserves the space.

        Args:
            sizes: bytes of each part. block_bytes: a multiple of 4096.
        Raises:
            InputError: the folder can't be used. DiskError: no room in it.
        """
        self.folder, end = folder, 0
        self._starts: dict[str, int] = {}  # in the file
        for part, nbytes in sizes.items():
            self._starts[part] = end
            end += _whole(nbytes)
        self.write_bytes, self.read_bytes = 0, 0  # since the start
        self._sizes, self._block_bytes = dict(sizes), min(block_bytes, max(ALIGNMENT, *map(_whole, sizes.values())))
        self._sums: dict[str, list[str]] = {}  # of each block
        self._file, self._threads = _nameless(folder, end), Threads()
        self._closing = weakref.finalize(self, _close, self._threads, self._file)
        self._slots = [aligned(self._block_bytes) for _ in range(SLOTS)]

    @property
    def host_bytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)

    def take(self, part: str, pieces: Sequence[Piece]) -> None:
        """As `Place`. After a DiskError the place does not have the part any more."""
        self._sums.pop(part, None)
        sums: list[str] = []
        writing: dict[int, Transfer] = {}
        with _settled(writing):
            for index, (start, nbytes) in enumerate(self._blocks(part)):
                if index >= SLOTS:
                    sums.append(writing.pop(index - SLOTS).wait())
                slot = self._slots[index % SLOTS][:nbytes]
                for inside, outside in _cut(pieces, start, slot):
                    inside.copy_(outside, non_blocking=True)
                finish()
                offset = self._starts[part] + start
                writing[index] = Transfer(self._file.write(self._threads, offset, slot))
                self.write_bytes += nbytes
            sums += [writing.pop(index).wait() for index in sorted(writing)]
        if not self._file.direct:  # else an error could show when the storages have been freed
            self._file.sync()
        self._sums[part] = sums

    def give(self, part: str, pieces: Sequence[Piece]) -> None:
        """As `Place`. DiskError if it can't be read, or is not what was written."""
        blocks = list(self._blocks(part))
        reading: dict[int, Transfer] = {}

        def read(index: int) -> None:
            start, nbytes = blocks[index]
            slot = self._slots[index % SLOTS][:nbytes]
            reading[index] = Transfer(self._file.read(self._threads, self._starts[part] + start, slot))
            self.read_bytes += nbytes

        with _settled(reading):
            for index in range(min(SLOTS, len(blocks))):
                read(index)
            for index, (start, nbytes) in enumerate(blocks):
                self._check(part, index, reading.pop(index).wait())
                for inside, outside in _cut(pieces, start, self._slots[index % SLOTS][:nbytes]):
                    outside.copy_(inside, non_blocking=True)
                finish()
                if index + SLOTS < len(blocks):
                    read(index + SLOTS)

    def close(self) -> None:
        """Gives the space back. A second call does nothing."""
        self._closing()

    def _blocks(self, part: str) -> Iterator[tuple[int, int]]:
        """(first byte in the part, bytes) of each, whole pages."""
        end = _whole(self._sizes[part])
        for start in range(0, end, self._block_bytes):
            yield start, min(self._block_bytes, end - start)

    def _check(self, part: str, index: int, found: str) -> None:
        due = self._sums[part][index]
        if found != due:
            raise DiskError(
                f"{KEY}: block {index} of the trainer's {part} in {self.folder} is not what was written there (checksum "
                f"{found}, due {due}): the disk has lost it; start from the last checkpoint"
            )


def _cut(pieces: Sequence[Piece], start: int, slot: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(in the slot, in the storage) of each piece that has bytes in the block that begins at `start`."""
    first = bisect.bisect_right(pieces, start, key=lambda piece: piece.start) - 1
    for piece in pieces[max(first, 0) :]:
        if piece.start >= start + slot.nbytes:
            break
        begin, end = max(piece.start, start), min(piece.start + piece.nbytes, start + slot.nbytes)
        if begin < end:
            yield slot[begin - start : end - start], as_bytes(piece.storage)[begin - piece.start : end - piece.start]


@contextlib.contextmanager
def _settled(under_way: Mapping[int, Transfer]) -> Iterator[None]:
    """After an error inside, no thread works with a slot any more."""
    try:
        yield
    except BaseException:
        for transfer in under_way.values():
            with contextlib.suppress(Exception):
                transfer.wait()
        raise


def _whole(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _nameless(folder: Path, nbytes: int) -> File:
    """A new file of that size on the folder's disk: it is there as long as it is open."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{KEY}: can't use {folder}: {(error.strerror or str(error)).lower()}") from error
    return File(folder / f"waiting_{uuid.uuid4().hex}", nbytes, create=True, named=False)


def _close(threads: Threads, file: File) -> None:
    threads.close()
    file.close()
