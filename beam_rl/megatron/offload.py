"""Takes what a trainer rank holds on the GPU to page-locked host memory and back, bit for bit.

Works on storages, so every view of them (parameters in Megatron's buffers, the optimizer's shards) stays what it is;
Megatron's own way (0.19) allocates anew each time and tears an FP32 weight from the optimizer that updates it.
Host memory is taken once. Gradient buffers are only given back: an update begins by clearing them.
"""

import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, UntypedStorage

OnGpu = Literal["all", "weights", "nothing"]
ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Held:
    """A trainer's tensors by what becomes of them. Tensors may share storages; the first list that has one decides."""

    frozen: Sequence[Tensor]  # weights that never change: copied to the host once
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    rest: Sequence[Tensor]  # the optimizer's


@dataclass
class _Piece:
    """A storage, and its place in host memory."""

    storage: UntypedStorage
    nbytes: int
    start: int  # in the host's memory; −1: its contents are not kept
    copied: bool = False  # the host has its contents, and they do not change
    frozen: bool = False


class Offload:
    """What is on the GPU: everything, the weights (for a sync), or nothing. Starts with everything."""

    def __init__(self, held: Held) -> None:
        """Takes page-locked host memory for all that is kept."""
        seen: set[int] = set()
        end = 0
        self.parts: dict[str, list[_Piece]] = {}
        for name in ("frozen", "weights", "gradients", "rest"):
            pieces = []
            for storage in _storages(getattr(held, name), seen):
                kept = name != "gradients"
                pieces.append(_Piece(storage, storage.nbytes(), end if kept else -1, frozen=name == "frozen"))
                end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT if kept else 0
            self.parts[name] = pieces
        self.host = page_locked(end)
        self.on_gpu: OnGpu = "all"

    def put(self, on_gpu: OnGpu) -> int:
        """Makes that, and nothing else of the trainer's, be on the GPU. Returns the bytes copied."""
        has, wants = (_parts(what) for what in (self.on_gpu, on_gpu))
        moved = self._leave([piece for name in has - wants for piece in self.parts[name]])
        moved += self._return([piece for name in wants - has for piece in self.parts[name]])
        self.on_gpu = on_gpu
        return moved

    def _leave(self, pieces: list[_Piece]) -> int:
        moved = 0
        for piece in pieces:
            if piece.start >= 0 and not piece.copied:
                self._in_host(piece).copy_(_bytes(piece.storage), non_blocking=True)
                moved += piece.nbytes
                piece.copied = piece.frozen
        _finish()
        for piece in pieces:
            piece.storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return moved

    def _return(self, pieces: list[_Piece]) -> int:
        moved = 0
        for piece in pieces:
            piece.storage.resize_(piece.nbytes)
            if piece.start >= 0:
                _bytes(piece.storage).copy_(self._in_host(piece), non_blocking=True)
                moved += piece.nbytes
        _finish()
        return moved

    def _in_host(self, piece: _Piece) -> Tensor:
        return self.host[piece.start : piece.start + piece.nbytes]


def _parts(on_gpu: OnGpu) -> set[str]:
    return {"all": {"frozen", "weights", "gradients", "rest"}, "weights": {"frozen", "weights"}, "nothing": set()}[
        on_gpu
    ]


def _storages(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[UntypedStorage]:
    """The storages that are not in `seen` yet, each once."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _bytes(storage: UntypedStorage) -> Tensor:
    """(bytes,) uint8 over the storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def page_locked(nbytes: int) -> Tensor:
    """(nbytes,) uint8 that a GPU copies from and to at full speed; torch's own would be rounded up to a power of two.

    Whole pages of its own, and unlocked before they are given back: CUDA refuses to lock a page twice.
    """
    if not torch.cuda.is_available() or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes)
    host = torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` as long as somebody has a view of it
    cuda = torch.cuda.cudart()
    status = cuda.cudaHostRegister(host.data_ptr(), nbytes, 0)
    if int(status) != 0:
        raise RuntimeError(
            f"{nbytes / 2**30:.1f} GiB of host memory could not be page-locked (CUDA error {int(status)})"
        )
    weakref.finalize(pages, cuda.cudaHostUnregister, host.data_ptr())
    return host


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
