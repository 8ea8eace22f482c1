"""Folders that are complete or absent, folders for one owner, what is on the disk for certain, and what it refused."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

DISK_FULL = "the disk is full"
REFUSED = (errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which is given `target`'s name at the end, or removed if there is an error."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.iterdir():
            file.chmod(0o666 & ~_umask())  # safetensors lets only the owner read
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def folder_for(owner: Path, parent: Path) -> Path:
    """A folder in `parent` that is this owner's and, most likely, no other's: of its path."""
    return parent / f"{owner.parent.name}-{hashlib.sha256(str(owner).encode()).hexdigest()[:8]}"


def sync_path(path: Path) -> None:
    """Returns when a file's bytes, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def full(error: BaseException) -> bool:
    """Whether the system has refused a write for want of room."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_error(error: BaseException | None) -> str | None:
    """What the disk refused, also where a library has wrapped the system's error; None for any other failure."""
    while error is not None:
        text = str(error)
        number = error.errno if isinstance(error, OSError) else None
        if full(error) or "No space left on device" in text:
            return DISK_FULL
        if number in REFUSED:
            return os.strerror(number).lower()
        if "inline_container.cc" in text or "PytorchStreamWriter failed" in text:
            return "PyTorch couldn't write a file, as on a full disk"  # torch.save drops the system's error number
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask
