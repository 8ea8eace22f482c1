"""Who computes what when a model is spread over ranks, and what of a micro-batch each rank is given.

Plain numpy, for the driver that ships micro-batches as well as for the ranks that get them. A rank gets the (small)
token arrays whole, and of the routes only the rows and columns it replays. Knows nothing about torch or Megatron.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_rl.lora import ATTENTION_INPUTS, ATTENTION_OUTPUT, DENSE_INPUTS, DENSE_OUTPUT, EXPERTS, Adapter
from beam_rl.model_config import named_as_beams
from beam_rl.mxfp8 import BLOCK
from beam_rl.recipe.tree import Parallel
from beam_rl.samples import MicroBatch

PADDING = -1  # in `MicroBatch.sample`: the token belongs to no sample


# --- the layout -------------------------------------------------------------------------------------------


def check_layout(hf: Mapping[str, Any], parallel: Parallel, adapter: Adapter | None = None) -> list[str]:
    """What keeps a model from being laid out like this: a sentence each, naming the recipe's key; empty if nothing.

    Args:
        hf: the model's `config.json`.
    """
    hf = named_as_beams(hf)
    of_adapter = _adapter(hf, parallel, adapter) if adapter else []
    return [*_sizes(hf, parallel), *_combinations(hf, parallel), *_stages(hf, parallel), *of_adapter]


def _sizes(hf: Mapping[str, Any], p: Parallel) -> list[str]:
    """What is cut in equal parts must be divisible."""
    cuts = [
        ("tp", p.tp, "num_attention_heads", "attention heads"),
        ("tp", p.tp, "num_key_value_heads", "KV heads"),
        ("tp", p.tp, "vocab_size", "tokens of the vocabulary"),
        ("tp", p.tp, "intermediate_size", "columns of a dense MLP"),
        ("ep", p.ep, "num_experts", "experts"),
        ("etp", p.etp, "moe_intermediate_size", "columns of an expert"),
    ]
    problems = [
        f"trainer.parallel.{key} = {size}: must divide the model's {hf[field]} {what}"
        for key, size, field, what in cuts
        if hf[field] % size
    ]
    if not hf["num_experts"]:
        sizes = (("ep", p.ep), ("etp", p.etp))
        problems += [f"trainer.parallel.{key} = {n}: the model has no experts; use 1" for key, n in sizes if n > 1]
    return problems


def _adapter(hf: Mapping[str, Any], p: Parallel, adapter: Adapter) -> list[str]:
    """A is cut along its rank where the matrix is cut along its outputs; B of the others along the hidden size."""
    cuts = (
        ((*ATTENTION_INPUTS, *DENSE_INPUTS), "tp", p.tp, adapter.rank, f"model.lora.rank = {adapter.rank}"),
        (EXPERTS, "etp", p.etp, adapter.expert_rank, f"the experts' rank {adapter.expert_rank}, of model.lora.rank"),
        ((*ATTENTION_OUTPUT, *DENSE_OUTPUT), "tp", p.tp, hf["hidden_size"], f"the hidden size {hf['hidden_size']}"),
        (EXPERTS, "etp", p.etp, hf["hidden_size"], f"the hidden size {hf['hidden_size']}"),
    )
    return [
        f"trainer.parallel.{key} = {size}: must divide {what}, to cut the adapter"
        for targets, key, size, number, what in cuts
        if number % size and set(targets) & set(adapter.targets)
    ]


def _combinations(hf: Mapping[str, Any], p: Parallel) -> list[str]:
    problems = []
    if p.sp and p.tp == 1:
        problems.append("trainer.parallel.sp = true: splits tokens over the tp ranks, and trainer.parallel.tp = 1")
    if p.tp > 1 and not p.sp and "sparse" in hf["mlp_layer_types"]:
        problems.append(
            f"trainer.parallel.sp = false: with trainer.parallel.tp = {p.tp} every rank would send the same tokens to "
            "the experts, which Megatron refuses in training; use sp: true"
        )
    stage = p.dp * p.tp * p.cp
    if stage % (p.ep * p.etp):
        problems.append(
            f"trainer.parallel.ep = {p.ep}: ep · etp = {p.ep * p.etp} must divide dp · tp · cp = {stage}, the ranks of "
            "a pipeline stage, over which its experts are spread"
        )
    return problems


def _stages(hf: Mapping[str, Any], p: Parallel) -> list[str]:
    problems, layers, stages = [], hf["num_hidden_layers"], p.pp * p.vpp
    if p.vpp > 1 and p.pp == 1:
        problems.append(f"trainer.parallel.vpp = {p.vpp}: virtual stages are for a pipeline: trainer.parallel.pp = 1")
    if stages > layers:
        problems.append(f"trainer.parallel.pp = {p.pp}: pp · vpp = {stages} stages, but the model has {layers} layers")
    if p.pp_layers is not None and len(p.pp_layers) != stages:
        problems.append(
            f"trainer.parallel.pp_layers = {p.pp_layers}: names {len(p.pp_layers)} stages, but there are "
            f"pp · vpp = {stages}"
        )
    if p.pp_layers is not None and sum(p.pp_layers) != layers:
        problems.append(
            f"trainer.parallel.pp_layers = {p.pp_layers}: {sum(p.pp_layers)} layers, but the model has {layers}"
        )
    return problems


def stage_layers(num_layers: int, parallel: Parallel) -> list[range]:
    """The layers, by global number from 0, of each of the pp · vpp pipeline stages in the model's order.

    Where they don't divide, the first stages get one more: the last one has the head to compute.
    """
    stages = parallel.pp * parallel.vpp
    sizes = parallel.pp_layers or [num_layers // stages + (i < num_layers % stages) for i in range(stages)]
    ends = list(accumulate(sizes))
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


# --- one rank's place -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its index in each dimension, counted from 0, and the MoE layers that it holds."""

    parallel: Parallel
    dp: int
    tp: int
    cp: int
    pp: int
    moe_columns: tuple[int, ...]  # of the model's MoE layers, counted alone, those here; ascending

    def named(self) -> str:
        """ "dp 1, tp 0": the index in each dimension that has more than one rank."""
        sizes = ((name, getattr(self.parallel, name)) for name in ("dp", "pp", "cp", "tp"))
        return ", ".join(f"{name} {getattr(self, name)}" for name, size in sizes if size > 1)

    @property
    def last_stage(self) -> bool:
        """Has the head: knows log-probabilities."""
        return self.pp == self.parallel.pp - 1

    @property
    def reports(self) -> bool:
        """One rank of each data-parallel replica: what it knows about its samples is all there is to know."""
        return self.last_stage and self.tp == 0 and self.cp == 0


def place_of(rank: int, parallel: Parallel, mlp_layer_types: Sequence[str]) -> Place:
    """The place of a rank: tensor-parallel neighbours have consecutive ranks, then cp, dp and pp.

    Args:
        mlp_layer_types: "dense" or "sparse" for each layer, as in the model's `config.json`.
    """
    rest, tp = divmod(rank, parallel.tp)
    rest, cp = divmod(rest, parallel.cp)
    pp, dp = divmod(rest, parallel.dp)
    stages = stage_layers(len(mlp_layer_types), parallel)
    here = {layer for stage in stages[pp :: parallel.pp] for layer in stage}
    sparse = [i for i, kind in enumerate(mlp_layer_types) if kind == "sparse"]
    columns = tuple(column for column, layer in enumerate(sparse) if layer in here)
    return Place(parallel, dp, tp, cp, pp, columns)


def context_rows(cu_tokens: NDArray[np.int32], cp: int, index: int) -> NDArray[np.int64]:
    """The rows of a pack that context-parallel rank `index` of `cp` holds, in its order.

    Each sample is cut in 2·cp chunks, and rank i has chunks i and 2·cp − 1 − i: causal work is then the same for all.
    This is Transformer Engine's layout for packed samples (`thd`).
    """
    rows = []
    for start, end in zip(cu_tokens[:-1], cu_tokens[1:], strict=True):
        chunks = np.arange(start, end, dtype=np.int64).reshape(2 * cp, -1)
        rows += [chunks[index], chunks[2 * cp - 1 - index]]
    return np.concatenate(rows)


def routed_rows(cu_tokens: NDArray[np.int32], place: Place) -> NDArray[np.int64]:
    """The rows of a pack whose tokens pass through this rank's routers, in its order."""
    p = place.parallel
    rows = np.arange(cu_tokens[-1]) if p.cp == 1 else context_rows(cu_tokens, p.cp, place.cp)
    return np.split(rows, p.tp)[place.tp] if p.sp else rows


# --- micro-batches ----------------------------------------------------------------------------------------


def token_block(precision: str) -> int:
    """A rank's tokens in a micro-batch are a multiple of this: MXFP8 sums over them in blocks."""
    return BLOCK if precision == "mxfp8" else 1


def pad(batch: MicroBatch, parallel: Parallel, num_experts: int, block: int = 1) -> MicroBatch:
    """The micro-batch with as much padding as the layout needs to split its tokens evenly, in multiples of `block`.

    Context parallelism lengthens every sample to a multiple of 2·cp; the rest of the padding is a sample of its own.
    Padding has `sample` = PADDING, no response and no weight, repeats the pack's own tokens, and replays distinct
    experts, spread over all of them.
    """
    each = 2 * parallel.cp if parallel.cp > 1 else 1
    lengths = np.diff(batch.cu_tokens).astype(np.int64)
    padded = -(-lengths // each) * each
    rest = -int(padded.sum()) % (math.lcm(each, block * parallel.cp) * (parallel.tp if parallel.sp else 1))
    if rest:
        padded = np.append(padded, rest)
    elif (padded == lengths).all():
        return batch
    cu = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    starts = np.repeat(cu[: len(lengths)] - batch.cu_tokens[:-1], lengths)
    real = np.arange(len(batch.tokens)) + starts  # the new row of each old one
    return _spread(batch, real, cu, num_experts)


def _spread(batch: MicroBatch, real: NDArray[np.int64], cu: NDArray[np.int32], num_experts: int) -> MicroBatch:
    """The micro-batch with its row i at `real[i]`, and padding everywhere else."""
    total = int(cu[-1])
    rest = np.setdiff1d(np.arange(total), real)
    changes: dict[str, Any] = {"cu_tokens": cu}
    for field in fields(batch):
        old = getattr(batch, field.name)
        if field.name == "cu_tokens" or old is None:
            continue
        new = np.zeros((total, *old.shape[1:]), old.dtype)
        new[real] = old
        changes[field.name] = new
    changes["sample"][rest] = PADDING
    changes["tokens"][rest] = np.resize(batch.tokens, len(rest))
    if batch.routes is not None:
        changes["routes"][rest] = _spread_routes(len(rest), batch.routes.shape[1:], num_experts)
    return replace(batch, **changes)


def _spread_routes(rows: int, shape: tuple[int, ...], num_experts: int) -> NDArray[np.int64]:
    """(rows, MoE layers, top-k): distinct experts in each choice, and all experts chosen equally often."""
    layers, top_k = shape
    first = top_k * (np.arange(rows)[:, None] + np.arange(layers)[None])
    return (first[..., None] + np.arange(top_k)) % num_experts


def padding_only(like: MicroBatch, parallel: Parallel, num_experts: int, block: int = 1) -> MicroBatch:
    """A micro-batch of nothing but padding, for a rank that has fewer than the others; `like` is any other one."""
    cut = {f.name: v[:1] for f in fields(like) if f.name != "cu_tokens" and (v := getattr(like, f.name)) is not None}
    one = replace(like, **cut, cu_tokens=np.array([0, 1], np.int32))
    cu = np.array([0, len(pad(one, parallel, num_experts, block).tokens)], np.int32)
    whole = _spread(one, np.array([0]), cu, num_experts)
    empty = {"sample": np.full(cu[1], PADDING, np.int32), "response": np.zeros(cu[1], np.bool_)}
    zero = {name: np.zeros_like(getattr(whole, name)) for name in ("weight", "advantage", "logp_engine")}
    return replace(whole, **empty, **zero)


def even_out(
    replicas: Sequence[Sequence[MicroBatch]], parallel: Parallel, num_experts: int, block: int = 1
) -> list[list[MicroBatch]]:
    """The micro-batches of each data-parallel replica, filled up with `padding_only` so that all have equally many.

    Expert parallelism couples the replicas: each must run as many as the others. An interleaved pipeline runs them in
    groups of pp.
    """
    group = parallel.pp if parallel.vpp > 1 else 1
    count = -(-max(map(len, replicas)) // group) * group
    if not count:
        return [[] for _ in replicas]
    filler = padding_only(next(b for batches in replicas for b in batches), parallel, num_experts, block)
    return [[*batches, *[filler] * (count - len(batches))] for batches in replicas]


def cut_routes(batch: MicroBatch, place: Place) -> MicroBatch:
    """The padded micro-batch as one rank gets it: of its routes only the rows and columns that this rank replays."""
    if batch.routes is None:
        return batch
    rows = routed_rows(batch.cu_tokens, place)
    return replace(batch, routes=batch.routes[rows][:, list(place.moe_columns)])
