"""Where a rank's optimizer state lies: a row of elements, the parameters' parts one after the other, cut into blocks.

An element has a first and a second moment, and an FP32 main copy where the weight is not FP32 itself; those that have
one come first. The three kinds are kept apart, so a parameter's moments lie together however it is cut. Pure.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Kind = Literal["main", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = get_args(Kind)
UNIT = 2048  # elements; every block begins and ends at a multiple: 4096 bytes or more of each kind, as direct I/O wants
ALIGNED = 16  # elements; every parameter's part begins at a multiple
FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """This rank's part of one parameter: `numel` values from `start` on of the flat parameter."""

    name: str
    shape: tuple[int, ...]  # of the parameter on this tensor-parallel rank
    start: int
    numel: int
    group: int  # parameters of one group have the same learning rate and weight decay
    has_main: bool


@dataclass(frozen=True)
class Piece:
    """What a block holds of a shard."""

    shard: int
    begin: int  # in the shard
    at: int  # in the block
    numel: int


@dataclass(frozen=True)
class Block:
    group: int
    has_main: bool
    start: int  # in the row
    numel: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    shards: tuple[Shard, ...]
    positions: tuple[int, ...]  # of each shard in the row
    blocks: tuple[Block, ...]
    mains: int  # elements that have a main copy
    elements: int
    moments: torch.dtype
    block_bytes: int

    def dtype(self, kind: Kind) -> torch.dtype:
        return torch.float32 if kind == "main" else self.moments

    def kinds(self, has_main: bool) -> tuple[Kind, ...]:
        return KINDS if has_main else KINDS[1:]

    def extents(self, block: Block) -> list[tuple[Kind, int, int]]:
        """(kind, first byte, bytes) of the block in a generation's file."""
        sizes = {kind: self.dtype(kind).itemsize for kind in KINDS}
        return [
            (kind, self.offset(kind) + block.start * sizes[kind], block.numel * sizes[kind])
            for kind in self.kinds(block.has_main)
        ]

    def offset(self, kind: Kind) -> int:
        """The first byte of a kind in a generation's file."""
        moments = self.elements * self.moments.itemsize
        return {"main": 0, "exp_avg": 4 * self.mains, "exp_avg_sq": 4 * self.mains + moments}[kind]

    def place(self, kind: Kind, shard: int) -> int:
        """The first byte of a kind of a shard, which lies there in one piece however the row is cut into blocks."""
        return self.offset(kind) + self.positions[shard] * self.dtype(kind).itemsize

    @property
    def nbytes(self) -> int:
        """Of one generation."""
        return 4 * self.mains + 2 * self.elements * self.moments.itemsize

    @property
    def largest_block_bytes(self) -> int:
        return max((sum(nbytes for _, _, nbytes in self.extents(block)) for block in self.blocks), default=0)

    def fingerprint(self) -> str:
        """The same for the same parts of the same parameters at the same places."""
        told = [FORMAT, str(self.moments), [vars(shard) for shard in self.shards], self.positions]
        ends = [(block.start, block.numel) for block in self.blocks]
        return hashlib.sha256(json.dumps([told, ends]).encode()).hexdigest()


def plan(shards: Sequence[Shard], block_bytes: int, moments: torch.dtype) -> Layout:
    """Puts the shards into a row and cuts it. A block holds shards of one group, all with a main copy or all without.

    block_bytes: of a block's kinds together, at most (a block is never less than `UNIT` elements).
    """
    ordered = sorted(shards, key=lambda shard: (not shard.has_main, shard.group))  # stable
    positions: list[int] = []
    blocks: list[Block] = []
    end = mains = 0
    for has_main in (True, False):
        room = block_bytes // (4 * has_main + 2 * moments.itemsize) // UNIT * UNIT
        for group in sorted({shard.group for shard in ordered if shard.has_main == has_main}):
            first, members = end, []
            for index, shard in enumerate(ordered):
                if (shard.has_main, shard.group) == (has_main, group):
                    end = _up(end, ALIGNED)
                    positions.append(end)
                    members.append(index)
                    end += shard.numel
            end = _up(end, UNIT)
            blocks += _cut(first, end, max(room, UNIT), has_main, group, [(i, positions[i]) for i in members], ordered)
        if has_main:
            mains = end
    return Layout(tuple(ordered), tuple(positions), tuple(blocks), mains, end, moments, block_bytes)


def _cut(
    first: int,
    end: int,
    room: int,
    has_main: bool,
    group: int,
    members: list[tuple[int, int]],
    shards: Sequence[Shard],
) -> list[Block]:
    """The blocks of one group's stretch of the row; `members`: (shard, position), in order."""
    blocks, next_member = [], 0
    for start in range(first, end, room):
        stop, pieces = min(start + room, end), []
        for member in range(next_member, len(members)):
            index, position = members[member]
            begin, last = max(position, start), min(position + shards[index].numel, stop)
            if begin < last:
                pieces.append(Piece(index, begin - position, begin - start, last - begin))
            if position + shards[index].numel > stop:
                break
            next_member = member + 1
        blocks.append(Block(group, has_main, start, stop - start, tuple(pieces)))
    return blocks


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
