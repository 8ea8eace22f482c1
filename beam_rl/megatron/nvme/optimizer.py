"""Takes the place of the Adam inside Megatron's optimizers: its state is streamed past the device in every update.

Megatron sums and clips gradients and gathers weights as ever; between the two, `step` brings each block, updates it and
the weights that belong to it, and takes it back. FP32 main parameters keep their shapes in Megatron's lists, without
memory; an FP32 weight is its own main parameter and stays where it is.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beam_rl.megatron.nvme.adam import BlockAdam, Target
from beam_rl.megatron.nvme.layout import Kind, Shard, plan
from beam_rl.megatron.nvme.pipeline import Pipeline
from beam_rl.megatron.nvme.snapshot import Snapshot
from beam_rl.megatron.nvme.store import FileStore, HostStore, Sections, Store


@dataclass(frozen=True)
class Part:
    """What a rank updates of one parameter."""

    name: str
    parameter: Tensor
    main: Tensor  # flat FP32: Megatron's copy, or a view of the weight
    start: int  # in the flat parameter
    group: int  # of all the rank's parameter groups


@dataclass(frozen=True)
class Moved:
    """In the updates since the last time that somebody asked."""

    read_bytes: int
    write_bytes: int
    seconds: float


class StreamedState:
    """A rank's optimizer state, of all its parameter groups together."""

    def __init__(
        self,
        parts: Sequence[Part],
        groups: Sequence[tuple[torch.optim.Optimizer, dict[str, Any]]],
        folder: Path | None,
        block_bytes: int,
        moments: torch.dtype,
    ) -> None:
        """Writes the first state: the main parameters as they are, moments of zero.

        Args:
            groups: each with the optimizer whose arithmetic it takes.
            folder: where to keep it; None: in host memory.
        Raises:
            InputError, DiskError: the folder can't be used, or has no room.
        """
        shards = [
            Shard(
                part.name,
                tuple(part.parameter.shape),
                part.start,
                part.main.numel(),
                part.group,
                has_main=part.parameter.dtype != torch.float32,
            )
            for part in parts
        ]
        layout = plan(shards, block_bytes, moments)
        by_name = {(part.name, part.start): part for part in parts}
        ordered = [by_name[shard.name, shard.start] for shard in layout.shards]
        mains = [part.main.detach().view(-1) for part in ordered]

        def fill(index: int, sections: Sections) -> None:
            block = layout.blocks[index]
            for piece in block.pieces if block.has_main else ():
                values = mains[piece.shard][piece.begin : piece.begin + piece.numel]
                sections["main"][piece.at : piece.at + piece.numel].copy_(values)

        self.store: Store = HostStore(layout, fill) if folder is None else FileStore.create(folder, layout, fill)
        self._index = {id(part.main): i for i, part in enumerate(ordered)}
        self._groups = [group for _, group in groups]
        targets = [
            Target(part.parameter.detach().view(-1)[part.start : part.start + part.main.numel()], part.main)
            for part in ordered
        ]
        adams = {id(adam): BlockAdam(adam, targets) for adam, _ in groups}
        self._adams = [adams[id(adam)] for adam, _ in groups]
        self.pipeline = Pipeline(self.store, parts[0].parameter.device)
        self._torn: str | None = None  # why state and weights may not belong together
        self._seconds, self._told = 0.0, (0, 0)
        self.take_moved()

    @property
    def updates(self) -> int:
        return self.store.updates

    def prefetch(self) -> None:
        """Begins to read what `step` needs first."""
        self.require_whole()
        self.pipeline.prefetch()

    @torch.no_grad()
    def step(self) -> None:
        """One update of every block and weight.

        Raises:
            DiskError: the state is as before, but once a block was updated, so were weights: only `rewriting` can follow.
        """
        self.require_whole()
        start, updates, blocks = time.perf_counter(), self.updates, self.store.layout.blocks

        def update(index: int, sections: Sections) -> None:
            self._torn = "an update failed half-way"
            group = blocks[index].group
            self._adams[group].update(blocks[index], sections, self._groups[group], updates)

        self.pipeline.run(update)
        self.store.commit(updates + 1)
        self._torn = None
        self._seconds += time.perf_counter() - start

    def view(self, kind: Kind, main: Tensor) -> Tensor:
        """(numel,) of the part whose main parameter that is to Megatron, live."""
        return self.store.view(kind, self._index[id(main)])

    def snapshot(self, owner: str) -> Snapshot:
        """Of a state in files, as `FileStore.snapshot`."""
        assert isinstance(self.store, FileStore)
        return self.store.snapshot(owner)

    def place(self, kind: Kind, main: Tensor) -> int | None:
        """The byte in a snapshot at which what `view` gives begins; None of a state in host memory, which has none."""
        return self.store.layout.place(kind, self._index[id(main)]) if isinstance(self.store, FileStore) else None

    @property
    def whole(self) -> bool:
        """Whether weights and state belong together."""
        return self._torn is None

    def require_whole(self) -> None:
        """Raises RuntimeError where weights and state may not belong together."""
        if self._torn:
            raise RuntimeError(f"the optimizer's state can't be used: {self._torn}; start from the last checkpoint")

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Inside, what `view` gives may be written to, and `set_updates` called."""
        self.pipeline.forget()
        self._torn = "loading a checkpoint failed half-way"
        self.store.rewrite()
        self._loaded_updates = self.updates
        yield
        self.store.rewritten(self._loaded_updates)
        self._torn = None
        self.take_moved()  # what loading has read belongs to no update

    def set_updates(self, updates: int) -> None:
        self._loaded_updates = updates

    def take_moved(self) -> Moved:
        now = (self.store.read_bytes, self.store.write_bytes)
        moved = Moved(now[0] - self._told[0], now[1] - self._told[1], self._seconds)
        self._told, self._seconds = now, 0.0
        return moved

    def close(self, discard: bool = False) -> None:
        """Lets go of the files. discard: and removes them."""
        self.pipeline.forget()
        self.store.close(discard)


class StreamedAdam:
    """In the place of one of Megatron's inner optimizers. The rank's first one moves the state of all of them: when it
    is called, Megatron has clipped everybody's gradients, and it gathers nobody's weights before its own are there."""

    def __init__(self, adam: torch.optim.Optimizer, state: StreamedState, first: bool) -> None:
        self.param_groups: list[dict[str, Any]] = adam.param_groups
        self.state: dict[Tensor, Any] = {}  # Megatron looks for it; what is there is in the store
        self.streamed, self._first = state, first

    def step(self) -> None:
        if self._first:
            self.streamed.step()
