"""Blocks on their way past the device: read the next ones, update this one and write the last one, all at once.

The memory is a few blocks, taken once. Knows nothing about what an update does.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from beam_rl.megatron.nvme.store import Reading, Sections, Store, Writing

HOST_SLOTS = 5  # two being read, one on the device, two being written
DEVICE_SLOTS = 3  # one arriving, one being updated, one leaving
Update = Callable[[int, Sections], None]  # in place, on the current stream


class Pipeline:
    def __init__(self, store: Store, device: torch.device, slots: int = HOST_SLOTS) -> None:
        """slots: blocks of a file store that are in host memory at one time; 1 reads, updates and writes in turn."""
        self.store, self.device, self.blocks = store, device, len(store.layout.blocks)
        self._slots = store.staging(min(slots, self.blocks))
        self._ahead = len(self._slots) or slots  # blocks that may be under way
        self._reading: dict[int, Reading] = {}
        self._gpu = _Gpu(store, device) if device.type == "cuda" else None

    @property
    def staging_bytes(self) -> int:
        """Of host memory."""
        return sum(slot.nbytes for slot in self._slots)

    def prefetch(self) -> None:
        """Begins to read the first blocks, if that has not begun."""
        for index in range(min(self._ahead, self.blocks)):
            if index not in self._reading:
                self._begin(index)

    def forget(self) -> None:
        """What was read ahead is no longer the state, or not needed any more."""
        self._settle(list(self._reading.values()))

    def run(self, update: Update) -> None:
        """Every block once. The caller commits.

        Raises:
            DiskError: a block could not be read or written; the store's state is what it was.
        """
        self.store.begin()
        self.prefetch()
        writing: dict[int, Writing] = {}
        leaving: dict[int, Any] = {}
        lag = 1 if self._gpu and self._ahead > 1 else 0  # a block leaves the GPU while the next is updated
        try:
            for index in range(self.blocks + lag):
                if index < self.blocks:
                    sections = self._reading.pop(index).wait()
                    leaving[index] = self._updated(index, sections, update)
                if index >= lag:
                    done = leaving.pop(index - lag)()
                    writing[index - lag] = self.store.write(index - lag, done)
                self._free(index - lag, writing)
            for write in writing.values():
                write.wait()
        except BaseException:
            self._settle([*self._reading.values(), *writing.values()])
            raise

    def _free(self, written: int, writing: dict[int, Writing]) -> None:
        """Waits for the block before the last one to be written, and reads another into its place."""
        before = written - (1 if self._ahead > 2 else 0)
        if before in writing:
            writing.pop(before).wait()
            if before + self._ahead < self.blocks:
                self._begin(before + self._ahead)

    def _begin(self, index: int) -> None:
        slot = self._slots[index % len(self._slots)] if self._slots else None
        self._reading[index] = self.store.read(index, slot)

    def _updated(self, index: int, sections: Sections, update: Update) -> Callable[[], Sections]:
        """Updates the block; what it returns waits until the host has the result."""
        if self._gpu:
            return self._gpu.update(index, sections, update)
        update(index, sections)
        return lambda: sections

    def _settle(self, under_way: list[Any]) -> None:
        """Waits until no thread works with a slot any more; what came of it does not matter."""
        self._reading.clear()
        for transfer in under_way:
            with contextlib.suppress(Exception):
                transfer.wait()


class _Gpu:
    """A few blocks of GPU memory, and streams that copy while the GPU computes."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self._slots = [
            torch.empty(store.layout.largest_block_bytes, dtype=torch.uint8, device=device) for _ in range(DEVICE_SLOTS)
        ]
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free = [torch.cuda.Event() for _ in self._slots]

    def update(self, index: int, host: Sections, update: Update) -> Callable[[], Sections]:
        slot, free, compute = (
            self._slots[index % DEVICE_SLOTS],
            self._free[index % DEVICE_SLOTS],
            torch.cuda.current_stream(),
        )
        here = _cut(slot, host)
        self._up.wait_event(free)
        with torch.cuda.stream(self._up):
            for kind, tensor in here.items():
                tensor.copy_(host[kind], non_blocking=True)
        compute.wait_stream(self._up)
        update(index, here)
        self._down.wait_stream(compute)
        with torch.cuda.stream(self._down):
            for kind, tensor in here.items():
                host[kind].copy_(tensor, non_blocking=True)
            free.record(self._down)
        gone = torch.cuda.Event()
        gone.record(self._down)

        def wait() -> Sections:
            gone.synchronize()
            return host

        return wait


def _cut(slot: Tensor, like: Sections) -> Sections:
    sections, at = {}, 0
    for kind, tensor in like.items():
        sections[kind] = slot[at : at + tensor.nbytes].view(tensor.dtype)
        at += tensor.nbytes
    return sections
