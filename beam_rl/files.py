"""Folders that are complete or absent, folders for one owner, and what is on the disk for certain."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


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


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask
