"""Moves bytes between files and aligned host memory: direct I/O where the file system takes it, many requests at once.

A request reads or writes up to 4 MiB on a thread (the system call and the checksum let go of Python's lock) and comes
back with the checksum of its bytes, taken while they are in the cache. Knows nothing about what the bytes mean.
"""

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from beam_rl.files import sync_path
from beam_rl.megatron.offload import page_locked

ALIGNMENT = 4096  # of addresses, offsets and sizes, in bytes
REQUEST_BYTES = 4 * 2**20  # a block's checksum is made of its requests': another size is another format of the state
DEPTH = 4  # requests under way in each direction
KEY = "trainer.optimizer.nvme.path"


class DiskError(RuntimeError):
    """The disk did not take or give what it should: one line with the file and the reason."""


class Threads:
    """What requests run on: some read and some write, so that neither stand in line behind the other."""

    def __init__(self) -> None:
        self.read, self.write = (ThreadPoolExecutor(DEPTH, f"nvme-{verb}") for verb in ("read", "write"))

    def close(self) -> None:
        for pool in (self.read, self.write):
            pool.shutdown(wait=True, cancel_futures=True)


class Transfer:
    """The requests of one block. `wait` returns its checksum when all are done, or raises the first error."""

    def __init__(self, requests: "list[Future[int]]") -> None:
        self.requests = requests

    def wait(self) -> str:
        try:
            sums = [request.result() for request in self.requests]
        except BaseException:
            for request in self.requests:  # nobody may write into the memory after this
                if not request.cancel():
                    request.exception()
            raise
        return checksum(sums)


class File:
    """One file of fixed size. `direct`: it bypasses the page cache."""

    def __init__(self, path: Path, nbytes: int, create: bool = False, named: bool = True) -> None:
        """create: makes it anew, in place of another, and reserves its space, so that it can't run out later.
        named: else it has no name from the start on, and is gone when it is closed.
        """
        self.path, self.nbytes, self._fd = path, nbytes, -1
        try:
            if create:
                path.unlink(missing_ok=True)  # not truncated: a checkpoint may hold the old one by another name
            self._fd, self.direct = _open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0))
            if not named:
                path.unlink()
            if create and nbytes:
                _reserve(self._fd, nbytes)
        except OSError as error:
            if create and self._fd >= 0:
                path.unlink(missing_ok=True)
            self.close()
            raise DiskError(self._told("make" if create else "open", error)) from error

    def read(self, threads: Threads, offset: int, into: Tensor) -> "list[Future[int]]":
        """into: (bytes,) uint8, aligned as the offset is."""
        return self._requests(threads.read, self._read, offset, into)

    def write(self, threads: Threads, offset: int, data: Tensor) -> "list[Future[int]]":
        return self._requests(threads.write, self._write, offset, data)

    def sync(self) -> None:
        """Returns when all that was written is on the disk."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise DiskError(self._told("sync", error)) from error

    @property
    def shared(self) -> bool:
        """Whether it has another name, as in a checkpoint: then nothing may be written to it."""
        return os.fstat(self._fd).st_nlink > 1

    def rename(self, path: Path) -> None:
        """Takes the place of the file at `path`, if there is one; its name is on the disk when this returns."""
        try:
            self.path.rename(path)
            self.path = path
            sync_path(path.parent)
        except OSError as error:
            raise DiskError(self._told("rename", error)) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _requests(
        self, pool: ThreadPoolExecutor, work: Callable[[memoryview, int], int], offset: int, data: Tensor
    ) -> "list[Future[int]]":
        view = memoryview(data.numpy())
        starts = range(0, len(view), REQUEST_BYTES)
        return [pool.submit(work, view[start : start + REQUEST_BYTES], offset + start) for start in starts]

    def _read(self, into: memoryview, offset: int) -> int:
        self._whole(os.preadv, "read", into, offset)
        return xxhash.xxh3_64_intdigest(into)

    def _write(self, data: memoryview, offset: int) -> int:
        found = xxhash.xxh3_64_intdigest(data)
        self._whole(os.pwritev, "write", data, offset)
        return found

    def _whole(self, call: Callable[..., int], verb: str, data: memoryview, offset: int) -> None:
        """The system may move less than it was asked to."""
        while len(data):
            try:
                moved = call(self._fd, [data], offset)
            except OSError as error:
                raise DiskError(self._told(verb, error)) from error
            if moved == 0 or (moved < len(data) and self.direct and moved % ALIGNMENT):
                raise DiskError(
                    f"{KEY}: can't {verb} {self.path}: it ends at byte {offset + moved} of {self.nbytes}; the file was cut"
                )
            data, offset = data[moved:], offset + moved

    def _told(self, verb: str, error: OSError) -> str:
        reason = {
            errno.ENOSPC: f"the disk is full ({self.nbytes / 1e9:.3g} GB are needed for this file)",
            errno.EDQUOT: "the quota is used up",
            errno.EFBIG: f"files of {self.nbytes / 1e9:.3g} GB are not allowed here",
        }.get(error.errno or 0, os.strerror(error.errno or 0))
        return f"{KEY}: can't {verb} {self.path}: {reason}"


def _reserve(fd: int, nbytes: int) -> None:
    """Takes a file's space. Asks first: a try that fails fills the disk until then, and whoever writes meanwhile fails."""
    disk = os.fstatvfs(fd)
    if nbytes > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(fd, 0, nbytes)


def checksum(sums: list[int]) -> str:
    """Of a block, from those of its requests in order."""
    return xxhash.xxh3_64_hexdigest(b"".join(found.to_bytes(8, "little") for found in sums))


def aligned(nbytes: int) -> Tensor:
    """(nbytes,) uint8 for direct I/O; page-locked where there is a GPU."""
    memory = page_locked(nbytes + ALIGNMENT)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]


def _open(path: Path, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags & ~os.O_EXCL, 0o644), False  # the refused call may have made it


def as_bytes(tensor: Tensor) -> Tensor:
    """(bytes,) uint8 of a flat tensor's own memory."""
    return tensor.view(torch.uint8)
