"""A rank's optimizer state as a file of a checkpoint: given away without being copied, and checked when it is read.

A snapshot is a second name of the generation that counts; a store writes no file in place that has a second name. In a
checkpoint it is `rank_N.<checksum>.state`; a `.json` beside it says where its blocks lie and which checksums they
have, and is what the checksum in the name is of. So whoever names the file vouches for every byte of it. Knows nothing about
what the bytes mean.
"""

import bisect
import errno
import fcntl
import json
import os
import re
import shutil
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.files import sync_path
from beam_rl.megatron.nvme.disk import DEPTH, REQUEST_BYTES, checksum
from beam_rl.megatron.nvme.layout import FORMAT, Layout

SavedBy = Literal["hard link", "reflink", "copy"]
SUFFIX = ".state"
_NAME = re.compile(r"rank_\d+\.([0-9a-f]{16})\.state")
_FICLONE = 0x40049409  # linux/fs.h: the target shares the source's blocks until one of the two is written to


class Snapshot:
    """A generation on its way into a checkpoint. `link` is its second name, which `put` takes away."""

    def __init__(self, link: Path, owner: str, layout: Layout, updates: int, sums: Sequence[str]) -> None:
        blocks = [
            [found, [[offset, nbytes] for _, offset, nbytes in layout.extents(block)]]
            for found, block in zip(sums, layout.blocks, strict=True)
        ]
        about = {"format": FORMAT, "request_bytes": REQUEST_BYTES, "bytes": layout.nbytes, "updates": updates}
        self.link, self._text = link, json.dumps(about | {"blocks": blocks})
        self.name = f"{owner}.{_checksum(self._text)}{SUFFIX}"  # owner: "rank_N"

    def put(self, folder: Path) -> SavedBy:
        """Into a checkpoint's folder; on its disk when this returns. Only another file system takes a copy.

        Raises OSError: there is no room, or the disk failed.
        """
        target = folder / self.name
        about = target.with_suffix(".json")
        about.write_text(self._text, encoding="utf-8")
        sync_path(about)
        how = _move(self.link, target)
        sync_path(folder)
        return how

    def drop(self) -> None:
        """Lets go of what was not put anywhere."""
        self.link.unlink(missing_ok=True)


def _move(source: Path, target: Path) -> SavedBy:
    """A name first: the store then takes a new file, with room reserved, where it would have to find room for each block
    of a reflinked one. A reflink reaches further: into another subvolume, quota project or mount of the file system."""
    try:
        source.rename(target)
        return "hard link"
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    how: SavedBy = "reflink"
    if not _reflink(source, target):
        how = "copy"
        with source.open("rb") as whole, target.open("wb") as copy:
            shutil.copyfileobj(whole, copy, REQUEST_BYTES)
    sync_path(target)
    source.unlink()
    return how


def _reflink(source: Path, target: Path) -> bool:
    """Whether the file systems can: then it is done. The target is there in any case."""
    with source.open("rb") as whole, target.open("wb") as clone:
        try:
            fcntl.ioctl(clone.fileno(), _FICLONE, whole.fileno())
        except OSError:
            return False
    return True


class SavedState:
    """A snapshot in a checkpoint, open for reading. A block is read whole and checked before any of it is given out."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises InputError: the file or its description is missing, torn, or not what the name says."""
        named = _NAME.fullmatch(name)
        if not named:
            raise InputError(f"{folder} is not one of our checkpoints: its index names the file {name!r}")
        self.path = folder / name
        about = _described(self.path.with_suffix(".json"), named[1])
        self.nbytes: int = about["bytes"]
        self._blocks: list[tuple[str, list[list[int]]]] = about["blocks"]
        self._extents = sorted((offset, i) for i, (_, extents) in enumerate(self._blocks) for offset, _ in extents)
        self._checked: set[int] = set()
        try:
            self._file = self.path.open("rb")
        except OSError as error:
            raise InputError(f"can't read {self.path}: {(error.strerror or str(error)).lower()}") from None
        size = os.fstat(self._file.fileno()).st_size
        if size != self.nbytes:
            self._file.close()
            raise InputError(f"{self.path} has {size} bytes, should have {self.nbytes}: the checkpoint is torn")
        with (
            warnings.catch_warnings()
        ):  # read-only: a private copy that could be written to may not be larger than memory
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            self._whole = torch.from_numpy(np.memmap(self._file, np.uint8, "r"))
        self._pool = ThreadPoolExecutor(DEPTH, "state")

    def block_at(self, offset: int) -> int:
        """Blocks in their own order: what belongs to the same elements lies in the same one."""
        return self._extents[bisect.bisect(self._extents, (offset, len(self._blocks))) - 1][1]

    def read(self, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """(nbytes / size of dtype,) over the page cache: only what is used is in memory.

        Raises InputError: there is no such part, or one of its blocks is not what was saved.
        """
        if not 0 <= offset < offset + nbytes <= self.nbytes or offset % dtype.itemsize or nbytes % dtype.itemsize:
            raise InputError(
                f"{self.path} has no {nbytes} bytes of {dtype} at {offset}: the checkpoint's index is wrong"
            )
        first = bisect.bisect(self._extents, (offset, len(self._blocks))) - 1
        last = bisect.bisect_left(self._extents, (offset + nbytes, 0))
        for _, block in self._extents[first:last]:
            if block not in self._checked:
                self._check(block)
        return self._whole[offset : offset + nbytes].view(dtype)

    def close(self) -> None:
        self._pool.shutdown()
        self._file.close()

    def __enter__(self) -> "SavedState":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self, block: int) -> None:
        due, extents = self._blocks[block]
        requests = [
            (start, min(REQUEST_BYTES, offset + nbytes - start))
            for offset, nbytes in extents
            for start in range(offset, offset + nbytes, REQUEST_BYTES)
        ]
        try:
            found = checksum(list(self._pool.map(self._sum, requests)))
        except OSError as error:
            raise InputError(f"can't read {self.path}: {(error.strerror or str(error)).lower()}") from None
        if found != due:
            raise InputError(
                f"{self.path} is damaged: block {block} is not what was saved there (checksum {found}, due {due})"
            )
        self._checked.add(block)

    def _sum(self, request: tuple[int, int]) -> int:
        (at, left), found = request, xxhash.xxh3_64()
        while left and (data := os.pread(self._file.fileno(), left, at)):
            found.update(data)
            at, left = at + len(data), left - len(data)
        return found.intdigest()


def _described(path: Path, due: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"can't read {path}: {str(getattr(error, 'strerror', '') or error).lower()}") from None
    if _checksum(text) != due:
        raise InputError(f"{path} is torn or of another checkpoint: its checksum is not the one in its name")
    about: dict[str, Any] = json.loads(text)
    if (about["format"], about["request_bytes"]) != (FORMAT, REQUEST_BYTES):
        raise InputError(f"{path} describes a state in format {about['format']}; this is for {FORMAT}")
    return about


def _checksum(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
