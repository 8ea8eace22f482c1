"""Takes what a trainer rank holds on the GPU to another place and back, bit for bit.

Works on storages, so every view of them (parameters in Megatron's buffers, the optimizer's shards) stays what it is;
Megatron's own way (0.19) allocates anew each time and tears an FP32 weight from the optimizer that updates it.
The place is page-locked host memory, taken once, or a file (`nvme.waiting`). Gradient buffers are only given back: an
update begins by clearing them.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, UntypedStorage

OnGpu = Literal["all", "weights", "nothing"]
PARTS: dict[OnGpu, tuple[str, ...]] = {
    "all": ("frozen", "weights", "gradients", "rest"),
    "weights": ("frozen", "weights"),
    "nothing": (),
}
ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Held:
    """A trainer's tensors by what becomes of them. Tensors may share storages; the first list that has one decides."""

    frozen: Sequence[Tensor]  # weights that never change: copied once
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    rest: Sequence[Tensor]  # the optimizer's


@dataclass(frozen=True)
class Piece:
    """A storage, and where its contents are in its part's place."""

    storage: UntypedStorage
    nbytes: int
    start: int


class Place(Protocol):
    """Has room for every part, whose name and size it was made with."""

    @property
    def host_bytes(self) -> int:
        """Of host memory that it holds."""

    def take(self, part: str, pieces: Sequence[Piece]) -> None:
        """All of it is in the place when this returns; the storages stay as they are."""

    def give(self, part: str, pieces: Sequence[Piece]) -> None:
        """Fills the storages, which have their sizes, with what `take` took."""


class HostPlace:
    """Page-locked host memory."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._memory = {part: page_locked(nbytes) for part, nbytes in sizes.items()}

    @property
    def host_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def take(self, part: str, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._of(part, piece).copy_(as_bytes(piece.storage), non_blocking=True)
        finish()

    def give(self, part: str, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            as_bytes(piece.storage).copy_(self._of(part, piece), non_blocking=True)
        finish()

    def _of(self, part: str, piece: Piece) -> Tensor:
        return self._memory[part][piece.start : piece.start + piece.nbytes]


class Offload:
    """What is on the GPU: everything, the weights (for a sync, which reads them), or nothing. Starts with everything."""

    def __init__(self, held: Held, make_place: Callable[[Mapping[str, int]], Place] = HostPlace) -> None:
        """Takes room for all that is kept."""
        seen: set[int] = set()
        self._pieces = {part: _pieces(getattr(held, part), seen) for part in PARTS["all"]}
        kept = {part: pieces for part, pieces in self._pieces.items() if part != "gradients"}
        self.place = make_place({part: sum(map(_room, pieces)) for part, pieces in kept.items()})
        self._kept = frozenset(kept)
        self._there: set[str] = set()  # parts that the place has as they are
        self.on_gpu: OnGpu = "all"

    def put(self, on_gpu: OnGpu) -> int:
        """Makes that, and nothing else of the trainer's, be on the GPU. Returns the bytes copied.

        What has not changed since it came is not copied again. After an error nothing is lost: what was on the GPU is
        there as it was, and what was in the place is there.
        """
        has, wants = PARTS[self.on_gpu], PARTS[on_gpu]  # one of them holds the other
        try:
            moved = self._leave([part for part in has if part not in wants])
            moved += self._return([part for part in wants if part not in has])
            self.on_gpu = on_gpu
        finally:
            if self.on_gpu == "all":  # an update may change it
                self._there &= {"frozen"}
        return moved

    def _leave(self, parts: list[str]) -> int:
        moved = 0
        for part in parts:
            if part in self._kept and part not in self._there:
                self.place.take(part, self._pieces[part])
                self._there.add(part)
                moved += self._nbytes(part)
        self._free(parts)
        return moved

    def _return(self, parts: list[str]) -> int:
        moved = 0
        try:
            for part in parts:
                for piece in self._pieces[part]:
                    piece.storage.resize_(piece.nbytes)
                if part in self._kept:
                    self.place.give(part, self._pieces[part])
                    moved += self._nbytes(part)
        except BaseException:
            self._free(parts)
            raise
        return moved

    def _free(self, parts: list[str]) -> None:
        for part in parts:
            for piece in self._pieces[part]:
                piece.storage.resize_(0)
        if parts and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _nbytes(self, part: str) -> int:
        return sum(piece.nbytes for piece in self._pieces[part])


def _pieces(tensors: Iterable[Tensor], seen: set[int]) -> list[Piece]:
    pieces, end = [], 0
    for storage in _storages(tensors, seen):
        pieces.append(Piece(storage, storage.nbytes(), end))
        end += _room(pieces[-1])
    return pieces


def _room(piece: Piece) -> int:
    return -(-piece.nbytes // ALIGNMENT) * ALIGNMENT


def _storages(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[UntypedStorage]:
    """The storages that are not in `seen` yet, each once."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def as_bytes(storage: UntypedStorage) -> Tensor:
    """(bytes,) uint8 over the storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _LockedPages(mmap.mmap):
    """Host memory that a GPU copies from and to at full speed; unlocked before it is given back."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def page_locked(nbytes: int) -> Tensor:
    """(nbytes,) uint8, page-locked where there is a GPU; torch's own would be rounded up to a power of two.

    Whole pages of its own: CUDA refuses to lock a page twice.
    """
    if not torch.cuda.is_available() or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    pages = _LockedPages(-1, nbytes)
    host = torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` as long as somebody has a view of it
    status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), nbytes, 0)
    if int(status) != 0:
        raise RuntimeError(
            f"{nbytes / 2**30:.1f} GiB of host memory could not be page-locked (CUDA error {int(status)})"
        )
    pages.address = host.data_ptr()
    return host


def finish() -> None:
    """Returns when the GPU has done what it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
