"""Saves and restores a training state: weights, FP32 main parameters, Adam's moments and step, random states.

Each tensor is written once, by the rank that holds its main replica, in torch's distributed-checkpoint format; Megatron
says which part of which global tensor a rank holds, so another parallel layout can read it back. No file holds pickled
code: tensors are read with `weights_only`, the index by an unpickler that knows the index's own classes only.
Knows nothing about HF checkpoints or about where a run keeps its folders.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from beam_rl.errors import InputError
from beam_rl.megatron.model import BeamModel
from beam_rl.megatron.optimizer import get_step, parameter_state, set_step

_STEP = "optimizer.step"


def save(folder: Path, model: BeamModel, optimizer: MegatronOptimizer) -> None:
    """Writes the state of all ranks into `folder`; every rank calls it. Complete when it returns."""
    tensors = {key: shard for key, shard in _shards(model, optimizer).items() if _is_main_replica(shard)}
    state: dict[str, Any] = {key: CheckpointableShardedTensor.from_sh_ten(shard) for key, shard in tensors.items()}
    state |= _random_states()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        state[_STEP] = torch.tensor(get_step(optimizer))
    dist.barrier()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=1))


def load(folder: Path, model: BeamModel, optimizer: MegatronOptimizer) -> None:
    """Reads back what `save` wrote, in place; every rank calls it.

    Raises:
        InputError: the folder holds no complete checkpoint, or one of another model.
    """
    if not (folder / ".metadata").is_file():
        raise InputError(f"{folder} holds no complete trainer checkpoint")
    reader = _Reader(folder)
    stored = reader.read_metadata().state_dict_metadata
    shards = _shards(model, optimizer)
    _check_shapes(folder, shards, stored)
    step = torch.tensor(0)
    # Of another number of ranks, some have no random state here: theirs stays as the seed made it.
    random = {key: value for key, value in _random_states().items() if key in stored}
    state: dict[str, Any] = {key: CheckpointableShardedTensor.from_sh_ten(shard) for key, shard in shards.items()}
    dcp.load(state | random | {_STEP: step}, storage_reader=reader)
    set_step(optimizer, int(step))
    _restore_random_states(random)


def _shards(model: BeamModel, optimizer: MegatronOptimizer) -> dict[str, ShardedTensor]:
    """This rank's part of each global tensor, by the global tensor's name; the data are the live tensors."""
    layout = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": True,
    }
    weights = model.sharded_state_dict(metadata=layout)
    state: dict[str, Any] = {f"model.{name}": value for name, value in weights.items()}
    for kind, name, tensor in parameter_state(model, optimizer):
        state[f"{kind}.{name}"] = make_sharded_optimizer_tensor(weights[name], tensor, prefix=f"optimizer.{kind}")
    apply_factories(state)  # gate and up, one tensor in the model, are sharded apart
    tensors, _ = extract_sharded_tensors(state)
    shards = list(_leaves(tensors))
    named = {shard.key: shard for shard in shards}
    if len(named) != len(shards):
        raise RuntimeError("two tensors of the model have one name in the checkpoint")
    return named


def _leaves(state: Any) -> Any:
    if isinstance(state, ShardedTensor):
        yield state
    else:
        for value in state.values() if isinstance(state, dict) else state:
            yield from _leaves(value)


def _is_main_replica(shard: ShardedTensor) -> bool:
    replica = shard.replica_id
    return replica == 0 if isinstance(replica, int) else all(r == 0 for r in replica)


def _check_shapes(folder: Path, shards: dict[str, ShardedTensor], stored: dict[str, Any]) -> None:
    for key, shard in shards.items():
        if key not in stored or tuple(stored[key].size) != tuple(shard.global_shape):
            found, due = tuple(stored[key].size) if key in stored else "nothing", tuple(shard.global_shape)
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


class _IndexUnpickler(pickle.Unpickler):
    """torch keeps a distributed checkpoint's index as a pickle; this makes none but the index's own objects."""

    _allowed = ("torch.distributed.checkpoint.", "torch.serialization")

    def find_class(self, module: str, name: str) -> Any:
        plain = {("torch", "Size"), ("torch", "device"), ("pathlib", "PosixPath"), ("collections", "OrderedDict")}
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module.startswith(self._allowed) or (module, name) in plain or dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's index names {module}.{name}, which does not belong there")


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = _IndexUnpickler(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
        metadata.storage_meta = dcp.metadata.StorageMeta(load_id=self.load_id)
        return metadata
