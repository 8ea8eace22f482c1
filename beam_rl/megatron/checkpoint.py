"""Saves and restores a training state: weights, FP32 main parameters, Adam's moments and step, random states.

Frozen weights are left out: they come from the checkpoint that training started from, and a file says which that is.
Every value is written once, as a part of a global tensor, in torch's distributed-checkpoint format: Megatron says which
part of which weight a rank holds, and the distributed optimizer which part of that. So another parallel layout can read
it back. An optimizer's state in files is not written at all: the checkpoint gets a second name of the file. No file
holds pickled code: tensors are read with `weights_only`, the index by an unpickler that knows the
index's own classes only, and none of them for objects other than tensors, which torch would unpickle.
Knows nothing about HF checkpoints or about where a run keeps its folders.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from beam_rl.errors import InputError
from beam_rl.megatron import ranks
from beam_rl.megatron.checkpoint_files import Reader, Writer
from beam_rl.megatron.model import BeamModel
from beam_rl.megatron.nvme.snapshot import SavedBy, Snapshot
from beam_rl.megatron.optimizer import (
    get_step,
    is_distributed,
    owned,
    parameter_state,
    rewriting,
    set_step,
    streamed_state,
)

_STEP = "optimizer.step"
_ADAPTER = "adapter.json"
About = dict[str, Any]  # an adapter's base model and shape, as JSON


@dataclass(frozen=True)
class State:
    """What one rank has to write: its boxes of the global tensors by their names, and whole tensors of its own."""

    pieces: "dict[str, list[Piece]]"
    own: dict[str, Tensor]
    snapshot: Snapshot | None = None  # which has the bytes of the pieces that have none here


class HostCopy:
    """Host memory that holds one state while it is written and training goes on; the next state takes the same memory."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    @torch.no_grad()
    def of(self, state: State) -> State:
        """The state as it is now; what the copies before this one held is overwritten."""
        pieces = {
            key: [p if p.data.is_meta else replace(p, data=self._copy((key, i), p.data)) for i, p in enumerate(found)]
            for key, found in state.pieces.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return replace(state, pieces=pieces)

    def _copy(self, name: tuple[str, int], data: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != data.shape:
            buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(data, non_blocking=True)


def live_state(models: Sequence[BeamModel], optimizer: MegatronOptimizer) -> State:
    """What this rank has to write of the training state, in its own memory; every rank calls it.

    Of an optimizer's state in files it is a snapshot, which is as it is now whatever updates follow; `write` takes it away.
    """
    streamed, step = streamed_state(optimizer), _common_step(models[0].config.device, optimizer)
    held = _pieces(models, optimizer)
    pieces = {key: [p.without_bytes() for p in found if p.written_here] for key, found in held.items()}
    referred = any(piece.at is not None for found in pieces.values() for piece in found)
    snapshot = streamed.snapshot(f"rank_{dist.get_rank()}") if streamed and referred else None
    own = _random_states()
    if dist.get_rank() == 0:
        own[_STEP] = torch.tensor(step)
    return State({key: found for key, found in pieces.items() if found}, own, snapshot)


def _common_step(device: torch.device, optimizer: MegatronOptimizer) -> int:
    """Updates made. RuntimeError on every rank where one's state can't be saved, or is of another update."""
    streamed, step = streamed_state(optimizer), get_step(optimizer)
    whole = ranks.all_of(streamed is None or streamed.whole, device)
    latest = ranks.largest(step, device)
    if streamed:
        streamed.require_whole()
    if not whole or not ranks.all_of(step in (0, latest), device):  # a rank may train nothing
        raise RuntimeError("the ranks' optimizer states are not of one update; start from the last checkpoint")
    return latest


@torch.no_grad()
def write(folder: Path, state: State, adapter: About | None) -> SavedBy | None:
    """Writes the state of all ranks into `folder`; every rank calls it, from any thread. Complete when it returns.

    adapter: of a model with an adapter, its "base" and its "shape": what the state means nothing without.
    Returns how this rank's optimizer state has come there, if it was in files.
    """
    group = ranks.write_group()
    places = {(key, p.offset): p.at for key, found in state.pieces.items() for p in found if p.at is not None}
    writer = Writer(folder, state.snapshot, places)
    try:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            if adapter:
                (folder / _ADAPTER).write_text(json.dumps(adapter, indent=1) + "\n")
        dist.barrier(group)
        tensors = {key: _for_torch(found) for key, found in state.pieces.items()}
        dcp.save(tensors | state.own, storage_writer=writer, process_group=group)
    finally:
        if state.snapshot:
            state.snapshot.drop()
    return writer.saved_by


@torch.no_grad()
def load(folder: Path, models: Sequence[BeamModel], optimizer: MegatronOptimizer, adapter: About | None) -> None:
    """Reads back what `write` wrote, in place; every rank calls it.

    Raises:
        InputError: the folder holds no complete checkpoint, or one of another model, base or adapter; or, told on every
            rank, a file of an optimizer's state is missing, torn, damaged or of another checkpoint.
    """
    if not (folder / ".metadata").is_file():
        raise InputError(f"{folder} holds no complete trainer checkpoint")
    _check_adapter(folder, adapter)
    reader = Reader(folder)
    stored = reader.read_metadata().state_dict_metadata
    _check_shapes(folder, _pieces(models, optimizer), stored)
    step = torch.tensor(0)
    # Of another number of ranks, some have no random state here: theirs stays as the seed made it.
    random = {key: value for key, value in _random_states().items() if key in stored}
    with rewriting(optimizer):
        # Taken anew: a state whose files a checkpoint holds too has got a new one.
        state: dict[str, Any] = {key: _for_torch(found) for key, found in _pieces(models, optimizer).items()}
        try:
            dcp.load(state | random | {_STEP: step}, storage_reader=reader)
        except CheckpointException as error:
            raise next((e for e, _ in error.failures.values() if isinstance(e, InputError)), error) from None
        set_step(optimizer, int(step))
    _restore_random_states(random)


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor that this rank holds; `data` is live, or on the meta device if a snapshot has it."""

    data: Tensor
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    written_here: bool  # other ranks that hold it don't write it
    at: int | None = None  # the byte of a snapshot at which it begins, if it is one's

    def without_bytes(self) -> "Piece":
        """As a snapshot would have it: not even a mapping of the file is kept."""
        return self if self.at is None else replace(self, data=torch.empty_like(self.data, device="meta"))


def _pieces(models: Sequence[BeamModel], optimizer: MegatronOptimizer) -> dict[str, list[Piece]]:
    """What this rank holds, by the global tensor's name: weights whole or in Megatron's shards, and the optimizer's
    part of each shard. Of a model with frozen weights only the others."""
    layout = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": True,
    }
    pieces: dict[str, list[Piece]] = defaultdict(list)
    streamed = streamed_state(optimizer)
    for model in models:
        mine = owned(model, optimizer)
        parameters = dict(model.named_parameters())
        shards = _shards(model, layout)
        if not all(parameter.requires_grad for parameter in parameters.values()):
            shards = {name: found for name, found in shards.items() if _trained(parameters.get(name))}
        for shard in (shard for found in shards.values() for shard in found):
            whole = Piece(shard.data.detach(), tuple(shard.global_offset), tuple(shard.global_shape), _is_main(shard))
            pieces[f"model.{shard.key}"].append(whole)
        for kind, name, flat, start in parameter_state(model, optimizer):
            first = streamed.place(kind, mine[parameters[name]].key) if streamed else None
            for shard in shards[name]:
                # Gate and up are one parameter in the model and two tensors here: views of it, one after the other.
                begin = shard.data.storage_offset() - parameters[name].storage_offset()
                for box, offset in _boxes(flat, start - begin, tuple(shard.data.shape)):
                    at = tuple(a + b for a, b in zip(shard.global_offset, offset, strict=True))
                    written_here = _is_main(shard, any_replica=is_distributed(optimizer))
                    byte = None if first is None else first + (box.data_ptr() - flat.data_ptr())
                    piece = Piece(box, at, tuple(shard.global_shape), written_here, byte)
                    pieces[f"optimizer.{kind}.{shard.key}"].append(piece)
    return dict(pieces)


def _trained(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


def _shards(model: BeamModel, layout: dict[str, Any]) -> dict[str, list[ShardedTensor]]:
    """Megatron's view of each weight of this rank, by the weight's name in this model."""
    state = model.sharded_state_dict(metadata=layout)
    apply_factories(state)
    tensors, _ = extract_sharded_tensors(state)
    return {name: list(_leaves(found)) for name, found in tensors.items()}


def _boxes(flat: Tensor, start: int, shape: tuple[int, ...]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Cuts `flat`, the values of a tensor of `shape` from `start` on, into boxes of it: (values, offset).

    `start` may be negative and `flat` may reach beyond the end: what is outside is left out. A range of a matrix is the
    end of a row, whole rows and the beginning of a row, or less.
    """
    size = math.prod(shape)
    first, last = max(start, 0), min(start + flat.numel(), size)
    if first >= last:
        return
    row = size // shape[0]
    if first % row == 0 and (last % row == 0):
        values = flat[first - start : last - start]
        yield values.view(-1, *shape[1:]), (first // row, *[0] * (len(shape) - 1))
    elif first // row == (last - 1) // row:  # inside one row
        begin = first // row * row
        for values, offset in _boxes(flat[first - start : last - start], first - begin, shape[1:]):
            yield values[None], (first // row, *offset)
    else:
        inner = sorted({first, -(-first // row) * row, last // row * row, last})
        for a, b in pairwise(inner):
            yield from _boxes(flat[a - start : b - start], a, shape)


def _leaves(state: Any) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        yield state
    else:
        for value in state.values() if isinstance(state, dict) else state:
            yield from _leaves(value)


def _is_main(shard: ShardedTensor, any_replica: bool = False) -> bool:
    """Whether this rank writes what several hold. any_replica: data-parallel ranks hold different parts, not copies."""
    replica = shard.replica_id if isinstance(shard.replica_id, tuple) else (shard.replica_id,)
    return not any(replica[:-1] if any_replica else replica)


def _for_torch(pieces: list[Piece]) -> LocalShardsContainer:
    """One object for torch's distributed checkpoint, which reads from and writes to the pieces' own memory."""
    shards = [
        ShardedTensor(
            key="",
            data=piece.data,
            dtype=piece.data.dtype,
            local_shape=tuple(piece.data.shape),
            global_shape=piece.global_shape,
            global_offset=piece.offset,
            axis_fragmentations=None,
        )
        for piece in pieces
    ]
    return LocalShardsContainer([CheckpointableShardedTensor.from_sh_ten(shard) for shard in shards])


def _check_adapter(folder: Path, adapter: About | None) -> None:
    stored = json.loads((folder / _ADAPTER).read_text()) if (folder / _ADAPTER).is_file() else None
    if stored is None or adapter is None:
        if stored is not adapter:
            kinds = ("all weights", "an adapter") if stored is None else ("an adapter", "all weights")
            raise InputError(f"{folder} holds {kinds[0]}, but with this recipe's model.lora the trainer has {kinds[1]}")
    elif stored["base"] != adapter["base"]:
        raise InputError(f"{folder} holds an adapter of another base model: model.path has changed since")
    elif stored["shape"] != json.loads(json.dumps(adapter["shape"])):
        raise InputError(f"{folder} holds another adapter ({stored['shape']}): model.lora has changed since")


def _check_shapes(folder: Path, pieces: dict[str, list[Piece]], stored: dict[str, Any]) -> None:
    for key, (piece, *_) in pieces.items():
        if key not in stored or tuple(stored[key].size) != piece.global_shape:
            found, due = tuple(stored[key].size) if key in stored else "nothing", piece.global_shape
            raise InputError(f"{folder} is not a checkpoint of this model: {key} should be {due}, found {found}")


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"random.{dist.get_rank()}.{name}": state.clone() for name, state in states.items()}


def _restore_random_states(states: dict[str, Tensor]) -> None:
    named = {key.split(".", 2)[2]: state for key, state in states.items()}
    if not named:
        return
    torch.set_rng_state(named.pop("cpu"))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(named.pop("cuda"))
    get_cuda_rng_tracker().set_states(named)
