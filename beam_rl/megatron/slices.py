"""Which parts of which checkpoint tensors a rank's parameters are made of.

The bridge says the names; how a tensor is cut over ranks follows from the kind of its mapping. Pure of files: a rank
without memory for its parameters (on the meta device) can be asked as well.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.bridge.models.conversion.param_mapping import (
    ColumnParallelMapping,
    GatedMLPMapping,
    ReplicatedMapping,
    RowParallelMapping,
)
from megatron.core import parallel_state
from torch import Tensor

from beam_rl.megatron.bridge import QKVGateMapping, beam_mappings
from beam_rl.megatron.model import BeamModel

LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"(?<=local_experts\.)(\d+)|(?<=\.weight)(\d+)$")


@dataclass(frozen=True)
class Slice:
    """Rows and columns of a checkpoint tensor, and the first row of the parameter that they go to."""

    name: str
    rows: range
    columns: range | None  # None: all; always of a vector
    into: int
    whole: tuple[int, ...]  # the shape that the checkpoint tensor has to have


@dataclass(frozen=True)
class Target:
    """A parameter, or a buffer that the checkpoint has too, and all that it is made of."""

    name: str  # Megatron's, with global numbers of layers and experts
    tensor: Tensor
    slices: tuple[Slice, ...]


def targets_of(chunks: Sequence[BeamModel], hf: object) -> Iterator[Target]:
    """What this rank has to read, parameter by parameter. KeyError for one that the bridge does not know.

    Args:
        chunks: without an adapter. hf: transformers' BeamConfig.
    """
    registry = beam_mappings(hf)
    for chunk in chunks:
        numbers = {i: layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
        for local, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            name = _global_name(local, numbers, chunk.config.num_moe_experts)
            mapping = registry.megatron_to_hf_lookup(name)
            if mapping is None:
                raise KeyError(f"the bridge has no name for {name}")
            yield Target(name, tensor, tuple(_cut(mapping, tensor, *_share(name))))


def _global_name(name: str, layers: dict[int, int], experts: int) -> str:
    """Layers and experts are numbered from 0 on every rank."""
    name = LAYER.sub(lambda m: f"decoder.layers.{layers[int(m[1])]}.", name)
    if ".experts." not in name:
        return name
    each = experts // parallel_state.get_expert_model_parallel_world_size()
    first = each * parallel_state.get_expert_model_parallel_rank()
    return EXPERT.sub(lambda m: str(int(m[0]) + first), name)


def _share(name: str) -> tuple[int, int]:
    """(index, number) of the rank among those that a parameter is cut over."""
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return group.rank(), group.size()


def _cut(mapping: object, tensor: Tensor, index: int, ranks: int) -> Iterator[Slice]:
    """The slices of one parameter; `tensor` is the rank's part of it."""
    rows, rest = len(tensor), tuple(tensor.shape[1:])
    mine = range(index * rows, (index + 1) * rows)
    match mapping:
        case QKVGateMapping():
            yield from _qkvg(mapping, index, ranks, rest)
        case GatedMLPMapping():
            half = rows // 2
            for i, part in enumerate(("gate", "up")):
                here, whole = range(index * half, (index + 1) * half), (half * ranks, *rest)
                yield Slice(mapping.hf_param[part], here, None, i * half, whole)
        case ColumnParallelMapping():
            yield Slice(str(mapping.hf_param), mine, None, 0, (rows * ranks, *rest))
        case RowParallelMapping():
            width = tensor.shape[1]
            columns = None if ranks == 1 else range(index * width, (index + 1) * width)
            yield Slice(str(mapping.hf_param), range(rows), columns, 0, (rows, width * ranks))
        case ReplicatedMapping():
            yield Slice(str(mapping.hf_param), range(rows), None, 0, (rows, *rest))
        case _:
            raise KeyError(f"no rule for how a {type(mapping).__name__} is cut")


def _qkvg(mapping: QKVGateMapping, index: int, ranks: int, rest: tuple[int, ...]) -> Iterator[Slice]:
    """For each KV group of the rank its q heads, gate heads, k head and v head: `bridge.merge_qkvg`'s order."""
    wide, narrow = mapping.heads // mapping.groups * mapping.head_dim, mapping.head_dim
    each, into = mapping.groups // ranks, 0
    for group in range(index * each, (index + 1) * each):
        for part, size in (("q", wide), ("gate", wide), ("k", narrow), ("v", narrow)):
            here, whole = range(group * size, (group + 1) * size), (mapping.groups * size, *rest)
            yield Slice(mapping.hf_param[part], here, None, into, whole)
            into += size
