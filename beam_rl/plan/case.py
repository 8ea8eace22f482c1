"""What a plan is about: the recipe, its model's shape on every rank and worker, and who sits on which machine."""

import os
import platform
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from beam_rl.errors import InputError
from beam_rl.inputs import check_config_for
from beam_rl.layout import stage_layers
from beam_rl.lora import Adapter
from beam_rl.mxfp8.scheme import Scheme
from beam_rl.placement import Placement, Shelf, for_pace, place
from beam_rl.plan.description import Description, describe
from beam_rl.plan.engine_memory import EngineShape, engine_shape, in_another_form
from beam_rl.plan.hardware import Hardware, find, read_table
from beam_rl.plan.memory import SIZE, OptimizerKind, Replicas
from beam_rl.plan.model_shapes import Counted, RankShape, rank_shapes
from beam_rl.plan.tensors import NotCounted
from beam_rl.plan.work import Work, work_of
from beam_rl.recipe.tree import Recipe

ATTENTION = ("full_attention", "sliding_attention")  # whose KV cache can be counted


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    model: Description
    adapter: Adapter | None
    scheme: Scheme | None  # of the engines' weights
    machine: Hardware
    on_gpus: bool
    nodes: int
    shelves: list[Shelf]
    shapes: list[RankShape]  # of each rank
    engine: EngineShape  # of a worker

    @property
    def config(self) -> dict[str, Any]:
        return self.model.config

    @property
    def counted(self) -> Counted:
        return Counted(self.config, self.recipe.trainer.dtype, self.adapter, self.model.folder)

    @property
    def placement(self) -> Placement:
        return self.recipe.cluster.placement or for_pace(self.recipe.rollout.pace)

    @property
    def shares_gpus(self) -> bool:
        return self.on_gpus and any(shelf.ranks and shelf.engine is not None for shelf in self.shelves)

    @property
    def value_bytes(self) -> int:
        return SIZE[self.recipe.trainer.dtype]

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.recipe.data.max_prompt_tokens + self.recipe.rollout.max_response_tokens

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.recipe.rollout.prompts_per_step * self.recipe.rollout.samples_per_prompt

    @property
    def native_engine(self) -> bool:
        """Whether the GPU multiplies MXFP8 itself, which is what its entry has an FP8 rate for."""
        return self.on_gpus and self.machine.fp8_flops > 1.5 * self.machine.bf16_flops

    @property
    def native_mxfp8(self) -> bool:
        """Whether the trainer's products are the GPU's own, so that Transformer Engine keeps quantized weights."""
        trainer = self.recipe.trainer
        return trainer.precision == "mxfp8" and trainer.mxfp8.activations and self.native_engine

    @cached_property
    def work(self) -> Work:
        return work_of(self.config, self.model.tensors)

    @cached_property
    def replicas(self) -> Replicas:
        p = self.recipe.trainer.parallel
        return Replicas(p.dp * p.cp, p.dp * p.cp * p.tp // (p.ep * p.etp))

    @cached_property
    def optimizer(self) -> OptimizerKind:
        optimizer = self.recipe.trainer.optimizer
        moments = SIZE[optimizer.nvme.moments]
        return OptimizerKind(optimizer.distributed, optimizer.offload, moments, optimizer.nvme.block_bytes)

    @cached_property
    def node_of_rank(self) -> dict[int, int]:
        return {rank: shelf.node for shelf in self.shelves for rank in shelf.ranks}

    @cached_property
    def engines_on(self) -> dict[int, int]:
        """Node → engines there."""
        found: dict[int, int] = defaultdict(int)
        for shelf in self.shelves:
            found[shelf.node] += shelf.engine is not None
        return found

    @cached_property
    def ranks_on(self) -> dict[int, list[int]]:
        """Node → trainer ranks there."""
        found: dict[int, list[int]] = defaultdict(list)
        for rank, node in self.node_of_rank.items():
            found[node].append(rank)
        return found

    def stage_kinds(self, pp: int) -> list[str]:
        """ "dense" or "sparse" for every layer that a pipeline rank holds."""
        parallel, kinds = self.recipe.trainer.parallel, self.config["mlp_layer_types"]
        stages = stage_layers(len(kinds), parallel)
        return [kinds[layer] for stage in stages[pp :: parallel.pp] for layer in stage]


def case_of(recipe: Recipe) -> Case:
    """Looks up the machine, counts the model, seats ranks and engines. InputError for what can't be at all."""
    model = describe(recipe)
    if others := sorted({*model.config["layer_types"]} - {*ATTENTION}):
        raise NotCounted(
            f"model.path = {recipe.model.path}: has {others[0]} layers, and plans know {', '.join(ATTENTION)}"
        )
    adapter, scheme = check_config_for(recipe, model.config)
    machine, on_gpus = machine_of(recipe)
    r = recipe.rollout
    kv_in_fp8 = str(r.engine_args.get("kv_cache_dtype", "auto")).startswith("fp8")
    engine = engine_shape(
        model.config,
        model.tensors,
        r.parallel,
        SIZE[recipe.trainer.dtype],
        scheme,
        adapter,
        r.max_num_seqs,
        r.max_batched_tokens,
        kv_value_bytes=1 if kv_in_fp8 else None,
    )
    if r.checkpoint and Path(r.checkpoint).is_dir():  # one that is still on the hub counts as if it were BF16
        engine = in_another_form(engine, model.tensors, SIZE[recipe.trainer.dtype], Path(r.checkpoint))
    shelves, nodes = seat(recipe, machine, on_gpus)
    shapes = rank_shapes(Counted(model.config, recipe.trainer.dtype, adapter, model.folder), recipe.trainer.parallel)
    return Case(recipe, model, adapter, scheme, machine, on_gpus, nodes, shelves, shapes, engine)


def seat(recipe: Recipe, machine: Hardware, on_gpus: bool) -> tuple[list[Shelf], int]:
    """Who sits where on the fewest nodes that `cluster.nodes` allows, or that are needed if these are more.

    Raises:
        InputError: an engine does not fit a node.
    """
    parallel, r, cluster = recipe.trainer.parallel, recipe.rollout, recipe.cluster
    crew = (cluster.placement or for_pace(r.pace), parallel.ranks, r.engines, r.parallel.workers)
    if not on_gpus:
        return place(*crew, [parallel.ranks + r.engines * r.parallel.workers], "CPU slot"), 1
    each = cluster.gpus_per_node or machine.gpus_per_node
    if r.parallel.workers > each:
        raise InputError(
            f"rollout.parallel: tp · pp · dp = {r.parallel.workers} workers of an engine have to be on one node, which has "
            f"{each} GPUs"
        )
    nodes = cluster.nodes or 1
    while True:
        try:
            return place(*crew, [each] * nodes, "GPU"), nodes
        except InputError:
            nodes += 1


def machine_of(recipe: Recipe) -> tuple[Hardware, bool]:
    """The machine of `cluster.gpu`, or this one; and whether ranks and engines are on GPUs of it."""
    from beam_rl.doctor import find_gpus

    cluster = recipe.cluster
    if cluster.gpu is not None:
        return find(cluster.gpu, cluster.hardware), True
    gpus = find_gpus()
    if not gpus:
        return this_cpu(), False
    table = read_table(cluster.hardware)
    known = next((h for name, h in table.items() if name.lower() in gpus[0].name.lower()), None)
    if known is None:
        raise InputError(
            f"cluster.gpu is missing: the plan does not know this machine's {gpus[0].name}; name one of {', '.join(table)}, "
            "or describe it in a YAML file that cluster.hardware names"
        )
    memory = gpus[0].total_mib * 2**20
    return replace(known, hbm_bytes=memory, gpus_per_node=len(gpus), host_bytes=host_memory()), True


def this_cpu() -> Hardware:
    """A machine without a GPU. Its rates are orders of magnitude, of a few server cores."""
    memory = host_memory()
    name = f"{platform.machine()}, {os.cpu_count()} cores"
    return Hardware(name, memory, 1e10, 5e10, 5e10, 3e9, 1e9, 3e9, 1, memory, 10**12, 1e9)


def host_memory() -> int:
    """Of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
