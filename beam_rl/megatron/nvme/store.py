"""One rank's optimizer state, block by block, in files or in host memory.

Files: two generations of every block, and a manifest that says which one counts, of which update, with a checksum of
each block. An update reads one generation and writes the other; when all of it is on the disk the manifest is replaced.
So after a kill at any byte the folder holds the state before the update or the one after it. A generation that has been
given to a checkpoint is never written to: a new file takes its place. What is missing, torn, of another model or not what
was written is refused in one line. Knows nothing about Adam or Megatron.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.files import sync_path
from beam_rl.megatron.nvme.disk import KEY, DiskError, File, Threads, Transfer, aligned, as_bytes
from beam_rl.megatron.nvme.layout import FORMAT, Kind, Layout
from beam_rl.megatron.nvme.snapshot import Snapshot
from beam_rl.megatron.offload import page_locked

MANIFEST, LOCK = "manifest.json", ".lock"
SAVING = "saving"  # the second name of a generation on its way to a checkpoint
NEW, NEW_MANIFEST = ".new", f".{MANIFEST}.new"  # before they take the places of others
Sections = dict[Kind, Tensor]  # a block's values by their kind, flat
Fill = Callable[[int, Sections], None]  # gives a block its first values; it comes zeroed


class Reading(Protocol):
    def wait(self) -> Sections: ...


class Writing(Protocol):
    def wait(self) -> None: ...


class Store(Protocol):
    """What the pipeline and the optimizer use of both."""

    layout: Layout
    updates: int  # that the state has seen
    read_bytes: int  # since the start
    write_bytes: int

    def staging(self, slots: int) -> list[Tensor]:
        """Host memory for so many blocks to be read into; none where blocks are in host memory already."""

    def read(self, index: int, slot: Tensor | None) -> Reading: ...

    def begin(self) -> None:
        """Before the first `write` since the last commit; nothing has changed if this raises."""

    def write(self, index: int, sections: Sections) -> Writing: ...

    def commit(self, updates: int) -> None:
        """Every block has been written since the last commit: from now on that is the state, after `updates`."""

    def view(self, kind: Kind, shard: int) -> Tensor:
        """(numel,) of a shard, live: for a checkpoint to read from. Taken after `rewrite`, it may be written to until
        `rewritten`."""

    def rewrite(self) -> None: ...

    def rewritten(self, updates: int) -> None: ...

    def close(self, discard: bool = False) -> None: ...


# --- host memory ------------------------------------------------------------------------------------------


class _Done:
    def __init__(self, sections: Sections) -> None:
        self.sections = sections

    def wait(self) -> Any:
        return self.sections


class HostStore:
    """In host memory, page-locked where there is a GPU; gone with the process."""

    def __init__(self, layout: Layout, fill: Fill) -> None:
        self.layout, self.updates, self.read_bytes, self.write_bytes = layout, 0, 0, 0
        memory = page_locked(layout.nbytes).zero_()
        ends = {"main": 4 * layout.mains, "exp_avg": layout.offset("exp_avg_sq"), "exp_avg_sq": layout.nbytes}
        self._whole: Sections = {
            kind: memory[layout.offset(kind) : ends[kind]].view(layout.dtype(kind)) for kind in layout.kinds(True)
        }
        for index in range(len(layout.blocks)):
            fill(index, self._block(index))

    def staging(self, slots: int) -> list[Tensor]:
        return []

    def read(self, index: int, slot: Tensor | None) -> _Done:
        return _Done(self._block(index))

    def begin(self) -> None:
        pass

    def write(self, index: int, sections: Sections) -> _Done:
        return _Done(sections)

    def commit(self, updates: int) -> None:
        self.updates = updates

    def view(self, kind: Kind, shard: int) -> Tensor:
        start = self.layout.positions[shard]
        return self._whole[kind][start : start + self.layout.shards[shard].numel]

    def rewrite(self) -> None:
        pass

    def rewritten(self, updates: int) -> None:
        self.updates = updates

    def close(self, discard: bool = False) -> None:
        pass

    def _block(self, index: int) -> Sections:
        block = self.layout.blocks[index]
        ends = slice(block.start, block.start + block.numel)
        return {kind: self._whole[kind][ends] for kind in self.layout.kinds(block.has_main)}


# --- files ------------------------------------------------------------------------------------------------


class _FileReading:
    def __init__(self, transfer: Transfer, sections: Sections, check: Callable[[str], None]) -> None:
        self._transfer, self._sections, self._check = transfer, sections, check

    def wait(self) -> Sections:
        self._check(self._transfer.wait())
        return self._sections


class _FileWriting:
    def __init__(self, transfer: Transfer, done: Callable[[str], None]) -> None:
        self._transfer, self._done = transfer, done

    def wait(self) -> None:
        self._done(self._transfer.wait())


class FileStore:
    """In a folder that one process holds at a time. Make it with `create` or `open`."""

    def __init__(self, folder: Path, layout: Layout, lock: int, files: Sequence[File]) -> None:
        self.folder, self.layout, self._lock, self._files = folder, layout, lock, list(files)
        self.threads = Threads()
        self.updates, self.read_bytes, self.write_bytes = 0, 0, 0
        self.generation = 0  # of the state
        self.direct = all(file.direct for file in files)
        self._sums: list[str] = [""] * len(layout.blocks)
        self._next = list(self._sums)

    @classmethod
    def create(cls, folder: Path, layout: Layout, fill: Fill) -> "FileStore":
        """A new state, after 0 updates, in the place of what the folder held.

        Raises:
            InputError: another process works in the folder, or it can't be made. DiskError: no room for it.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = _lock(folder)
        except OSError as error:
            raise InputError(f"{KEY}: can't use {folder}: {(error.strerror or str(error)).lower()}") from error
        files: list[File] = []
        try:
            _check_links(folder)
            (folder / MANIFEST).unlink(missing_ok=True)
            for generation in (0, 1):  # both old ones go before the first new one takes their room
                _path(folder, generation).unlink(missing_ok=True)
            _clean(folder)
            for generation in (0, 1):
                files.append(File(_path(folder, generation), layout.nbytes, create=True))
            sync_path(folder)
        except BaseException:
            for file in files:
                file.path.unlink()
                file.close()
            os.close(lock)
            raise
        store = cls(folder, layout, lock, files)
        store.generation = 1
        (slot,) = store.staging(1)
        for index in range(len(layout.blocks)):
            slot.zero_()
            sections = store._sections(index, slot)
            fill(index, sections)
            store.write(index, sections).wait()
        store.commit(0)
        return store

    @classmethod
    def open(cls, folder: Path, layout: Layout) -> "FileStore":
        """The state that the folder holds, which must be of this layout. Blocks are checked when they are read.

        Raises:
            InputError: there is none, it is torn or of another model or layout, or another process works with it.
        """
        if not folder.is_dir():
            raise InputError(f"{KEY}: {folder} holds no optimizer state")
        manifest = read_manifest(folder)
        _check_manifest(folder, manifest, layout)
        lock = _lock(folder)
        try:
            _clean(folder)
            files = [File(_path(folder, g), layout.nbytes) for g in (0, 1)]
        except BaseException:
            os.close(lock)
            raise
        store = cls(folder, layout, lock, files)
        store.updates, store.generation = manifest["updates"], manifest["generation"]
        store._sums = manifest["blocks"]
        return store

    def staging(self, slots: int) -> list[Tensor]:
        return [aligned(self.layout.largest_block_bytes) for _ in range(slots)]

    def read(self, index: int, slot: Tensor | None) -> _FileReading:
        assert slot is not None
        sections = self._sections(index, slot)
        due = self._sums[index]
        return _FileReading(
            self._transfer(index, sections, self.generation, "read"), sections, self._checker(index, due)
        )

    def begin(self) -> None:
        self._make_own(1 - self.generation)

    def write(self, index: int, sections: Sections) -> _FileWriting:
        """sections: those that `read` gave, or ones in aligned memory."""

        def done(found: str) -> None:
            self._next[index] = found

        return _FileWriting(self._transfer(index, sections, 1 - self.generation, "write"), done)

    def commit(self, updates: int) -> None:
        missing = self._next.count("")
        assert not missing, f"{missing} blocks were not written"
        self._files[1 - self.generation].sync()
        self._publish(1 - self.generation, updates, self._next)
        self._next = [""] * len(self.layout.blocks)

    def view(self, kind: Kind, shard: int) -> Tensor:
        """Over the page cache, so that no memory is taken: what is read or written here goes past direct I/O."""
        layout, n = self.layout, self.layout.shards[shard].numel
        dtype = layout.dtype(kind)
        raw = np.memmap(self.path(self.generation), np.uint8, "r+", layout.place(kind, shard), (n * dtype.itemsize,))
        return torch.from_numpy(raw).view(dtype)

    def snapshot(self, owner: str) -> Snapshot:
        """The state as it is now, to be put into a checkpoint while updates go on; in the place of a snapshot before it
        that was put nowhere. At once: it is a second name of the file.

        owner: "rank_N".
        """
        link = self.folder / SAVING
        try:
            link.unlink(missing_ok=True)
            link.hardlink_to(self.path(self.generation))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise DiskError(f"{KEY}: can't give {self.path(self.generation)} a second name: {reason}") from error
        return Snapshot(link, owner, self.layout, self.updates, self._sums)

    def rewrite(self) -> None:
        """From now on the state is being written to through views that are taken after this; a process that ends here
        leaves none."""
        (self.folder / MANIFEST).unlink(missing_ok=True)
        sync_path(self.folder)
        self._make_own(self.generation)

    def rewritten(self, updates: int) -> None:
        self._files[self.generation].sync()
        (slot,) = self.staging(1)
        sums = []
        for index in range(len(self.layout.blocks)):
            sections = self._sections(index, slot)
            sums.append(self._transfer(index, sections, self.generation, "read").wait())
        self._publish(self.generation, updates, sums)

    def close(self, discard: bool = False) -> None:
        """Lets go of the folder; the state stays there, or goes with its folder. A second call does nothing."""
        self.threads.close()
        if discard and self._lock >= 0:
            for name in (MANIFEST, self.path(0).name, self.path(1).name, LOCK):
                (self.folder / name).unlink(missing_ok=True)
            _clean(self.folder)
            with contextlib.suppress(OSError):  # somebody has put other files there
                self.folder.rmdir()
        for file in self._files:
            file.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def path(self, generation: int) -> Path:
        return _path(self.folder, generation)

    def _make_own(self, generation: int) -> None:
        """If a checkpoint has this generation's file too, a new one takes its place, whose space is reserved."""
        old, path = self._files[generation], self.path(generation)
        if not old.shared:
            return
        try:
            new = File(path.with_suffix(NEW), self.layout.nbytes, create=True)
        except DiskError as error:
            raise DiskError(f"{error}; a checkpoint holds {path}, so that a new file is needed") from error
        new.rename(path)
        self._files[generation] = new
        old.close()

    def _sections(self, index: int, slot: Tensor) -> Sections:
        sections, at = {}, 0
        for kind, _, nbytes in self.layout.extents(self.layout.blocks[index]):
            sections[kind] = slot[at : at + nbytes].view(self.layout.dtype(kind))
            at += nbytes
        return sections

    def _transfer(self, index: int, sections: Sections, generation: int, verb: str) -> Transfer:
        file, requests = self._files[generation], []
        for kind, offset, nbytes in self.layout.extents(self.layout.blocks[index]):
            requests += getattr(file, verb)(self.threads, offset, as_bytes(sections[kind]))
            if verb == "read":
                self.read_bytes += nbytes
            else:
                self.write_bytes += nbytes
        return Transfer(requests)

    def _checker(self, index: int, due: str) -> Callable[[str], None]:
        def check(found: str) -> None:
            if found != due:
                raise DiskError(
                    f"{KEY}: block {index} of {self.path(self.generation)} is not what was written there (checksum "
                    f"{found}, due {due}): the disk has lost it; start from the last checkpoint"
                )

        return check

    def _publish(self, generation: int, updates: int, sums: list[str]) -> None:
        manifest = {
            "format": FORMAT,
            "updates": updates,
            "generation": generation,
            "moments": str(self.layout.moments).removeprefix("torch."),
            "elements": sum(shard.numel for shard in self.layout.shards),
            "block_bytes": self.layout.block_bytes,
            "layout": self.layout.fingerprint(),
            "blocks": sums,
        }
        _write_manifest(self.folder, manifest)
        self.updates, self.generation, self._sums = updates, generation, list(sums)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder says about the state in it. InputError if there is none or it is torn."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        due = manifest.pop("checksum")
    except FileNotFoundError:
        raise InputError(f"{KEY}: {folder} holds no optimizer state") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is torn or no manifest of an optimizer state") from None
    if due != _checksum(manifest):
        raise InputError(f"{path} is torn: its checksum is wrong")
    return manifest


def _check_manifest(folder: Path, manifest: dict[str, Any], layout: Layout) -> None:
    if manifest["format"] != FORMAT:
        raise InputError(f"{folder} holds an optimizer state in format {manifest['format']}; this is for {FORMAT}")
    for key, here in (
        ("moments", str(layout.moments).removeprefix("torch.")),
        ("elements", sum(shard.numel for shard in layout.shards)),
        ("block_bytes", layout.block_bytes),
        ("layout", layout.fingerprint()),
    ):
        if manifest[key] != here:
            raise InputError(
                f"{folder} holds the optimizer state of another model or layout ({key} {manifest[key]} there, {here} here)"
            )
    for generation in (0, 1):
        path = _path(folder, generation)
        size = path.stat().st_size if path.exists() else None
        if size != layout.nbytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise InputError(f"{path} {found}, should have {layout.nbytes}: the optimizer state there is torn")


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Beside the old one, on the disk, and then in its place."""
    new = folder / NEW_MANIFEST
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(json.dumps(manifest | {"checksum": _checksum(manifest)}, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(folder / MANIFEST)
        sync_path(folder)
    except OSError as error:
        raise DiskError(f"{KEY}: can't write {folder / MANIFEST}: {(error.strerror or str(error)).lower()}") from error


def _checksum(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def _path(folder: Path, generation: int) -> Path:
    return folder / f"generation_{generation}"


def _clean(folder: Path) -> None:
    """Removes what a killed process was about to give away or to take."""
    new = (_path(folder, generation).with_suffix(NEW) for generation in (0, 1))
    for path in (folder / SAVING, folder / NEW_MANIFEST, *new):
        path.unlink(missing_ok=True)


def _check_links(folder: Path) -> None:
    """InputError where a file can't have a second name, by which checkpoints take the state."""
    (folder / SAVING).unlink(missing_ok=True)
    try:
        (folder / SAVING).hardlink_to(folder / LOCK)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"{KEY}: {folder}: its file system has no hard links ({reason}); name a local disk") from error
    (folder / SAVING).unlink()


def _lock(folder: Path) -> int:
    """An open file that holds the folder's lock until the process ends."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise InputError(f"{KEY}: another process keeps its optimizer state in {folder}: give another folder") from None
    return handle
