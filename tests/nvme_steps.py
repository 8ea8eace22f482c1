"""A small optimizer state in files, its updates, and a process that is killed at one of its writes. Plain torch."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which an optimizer's first step imports: once here, for all processes that are forked
from torch import Tensor

from beam_rl.megatron.nvme import disk
from beam_rl.megatron.nvme.adam import BlockAdam, Target
from beam_rl.megatron.nvme.layout import Layout, Shard, plan
from beam_rl.megatron.nvme.pipeline import Pipeline
from beam_rl.megatron.nvme.store import FileStore, HostStore, Sections, Store

SIZES = [5000, 17, 40_000, 4096, 9001, 1]
GROUPS: list[dict[str, Any]] = [
    {"betas": (0.9, 0.95), "weight_decay": 0.1},
    {"betas": (0.9, 0.95), "weight_decay": 0.0},
]


def layout(moments: torch.dtype = torch.float32, block_bytes: int = 65536) -> Layout:
    shards = [Shard(f"w{i}", (n,), 0, n, i % 2, has_main=True) for i, n in enumerate(SIZES)]
    return plan(shards, block_bytes, moments)


def weights(of: Layout) -> list[Tensor]:
    """BF16, in the layout's order."""
    return [random(int(shard.name[1:]), shard.numel).bfloat16() for shard in of.shards]


def random(seed: int, n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def fill(of: Layout) -> Callable[[int, Sections], None]:
    mains = [weight.float() for weight in weights(of)]

    def write(index: int, sections: Sections) -> None:
        for piece in of.blocks[index].pieces:
            sections["main"][piece.at : piece.at + piece.numel] = mains[piece.shard][piece.begin :][: piece.numel]

    return write


class Training:
    """Updates with gradients that the number of the update gives."""

    def __init__(self, store: Store, slots: int = 5) -> None:
        self.store, of = store, store.layout
        self.weights = weights(of)
        self.keys = [torch.empty(shard.numel) for shard in of.shards]
        adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        self.groups = [adam.defaults | group for group in GROUPS]
        self.adam = BlockAdam(adam, [Target(w, key) for w, key in zip(self.weights, self.keys, strict=True)])
        self.pipeline = Pipeline(store, torch.device("cpu"), slots)

    @torch.no_grad()
    def update(self) -> None:
        number, blocks = self.store.updates, self.store.layout.blocks
        for i, key in enumerate(self.keys):
            key.grad = random(1000 * (number + 1) + i, len(key))

        def one(index: int, sections: Sections) -> None:
            self.adam.update(blocks[index], sections, self.groups[blocks[index].group], number)

        self.pipeline.run(one)
        self.store.commit(number + 1)

    def state(self) -> list[Tensor]:
        of = self.store.layout
        return [self.store.view(kind, i).clone() for i in range(len(of.shards)) for kind in of.kinds(True)]


def expected(updates: int) -> list[Tensor]:
    training = Training(HostStore(layout(), fill(layout())))
    for _ in range(updates):
        training.update()
    return training.state()


def killed_at(folder: Path, call: int) -> None:
    """Goes on with the state in `folder` until the process has made so many calls that write; dies in the middle of it."""
    torch.set_num_threads(1)
    left = call

    def dying(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def act(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if name == "pwritev":  # the first half of what it was given
                    half = len(args[1][0]) // 2 // disk.ALIGNMENT * disk.ALIGNMENT
                    real(args[0], [args[1][0][:half]], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return act

    for name in ("pwritev", "fdatasync", "fsync", "rename"):
        setattr(os, name, dying(name))
    training = Training(FileStore.open(folder, layout()))
    for _ in range(1000):
        training.update()


def killed_while_saving(folder: Path, checkpoints: Path, name: str, turn: int) -> None:
    """Goes on with the state in `folder`, and puts a snapshot into a folder of `checkpoints` after every second update,
    which gets the update's number for a name when it is whole. Dies in the call `turn` of the system call `name`."""
    torch.set_num_threads(1)
    left, real = turn, getattr(os, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    checkpoints.mkdir()
    training = Training(FileStore.open(folder, layout()))
    setattr(os, name, dying)
    for number in range(1000):
        if number % 2 == 0:
            snapshot = training.store.snapshot("rank_0")
            updates = training.store.updates
            training.update()
            (partial := checkpoints / "partial").mkdir()
            snapshot.put(partial)
            partial.replace(checkpoints / str(updates))
        training.update()
