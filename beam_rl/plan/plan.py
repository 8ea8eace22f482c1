"""The plan of a recipe: what each GPU, host and NVMe will hold, what does not fit, and which key to turn.

Puts the formulas together; `Plan.record()` is the JSON object of `beam-rl plan`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_rl.plan import gpu, host, memory, times
from beam_rl.plan.case import Case, case_of
from beam_rl.plan.gpu import Place
from beam_rl.plan.hardware import GIB
from beam_rl.plan.simulate import draw_lengths
from beam_rl.recipe.tree import Recipe

HIGHEST_UTILIZATION = 0.95  # of a GPU by vLLM, that anybody would ask for


@dataclass(frozen=True)
class Problem:
    key: str  # of the recipe, to turn
    message: str


@dataclass(frozen=True)
class Plan:
    case: Case
    ranks: list[Place]
    engines: list[Place]  # workers on GPUs of their own
    node: host.Node  # the fullest
    nvme_bytes: int  # of the fullest node
    problems: list[Problem]
    notes: list[str]
    seconds: times.Seconds

    @property
    def fits(self) -> bool:
        return not self.problems

    def record(self) -> dict[str, Any]:
        machine = self.case.machine
        return {
            "fits": self.fits,
            "ranks": [{"rank": i} | place.record() for i, place in enumerate(self.ranks)],
            "host_bytes": self.node.host,
            "nvme_bytes": self.nvme_bytes,
            "sync_seconds": self.seconds.sync,
            "problems": [asdict(problem) for problem in self.problems],
            "engines": [{"name": place.name} | place.record() for place in self.engines],
            "host": asdict(self.node),
            "host_limit": machine.host_bytes,
            "nvme_limit": machine.nvme_bytes,
            "nodes": self.case.nodes,
            "machine": machine.name,
            "model": self.case.model.source,
            "seconds": self.seconds.record(),
            "notes": self.notes,
        }


def make_plan(
    recipe: Recipe,
    shares: times.Shares | None = None,
    lengths: NDArray[np.float64] | None = None,
    case: Case | None = None,
) -> Plan:
    """The plan of a recipe.

    Args:
        shares: what programs reach of the machine; default: the built-in ones. lengths: of responses, in tokens.
        case: of this recipe, where it is known already.
    Raises:
        InputError: the recipe can't be laid out at all: sizes that do not divide, too few GPUs.
    """
    case, shares = case or case_of(recipe), shares or times.Shares()
    if lengths is None:
        lengths = draw_lengths(case.samples, recipe.rollout.max_response_tokens, recipe.seed)
    ranks, engines = gpu.rank_places(case), gpu.engine_places(case)
    node, nvme = host.fullest_node(case), host.fullest_nvme(case)
    problems = [
        *_missing_nodes(case),
        *_gpu_problems(case, ranks, engines),
        *_engine_problems(case),
        *_node_problems(case, node, nvme, ranks),
    ]
    return Plan(case, ranks, engines, node, nvme, problems, _notes(case), seconds_of(case, shares, lengths))


def seconds_of(case: Case, shares: times.Shares, lengths: NDArray[np.float64]) -> times.Seconds:
    """Of a step with such responses."""
    mean = float(lengths.mean()) + case.recipe.data.max_prompt_tokens / 2
    score, update, optimizer = times.train_seconds(case, case.samples * mean, mean, shares)
    share = np.resize(lengths, case.samples)[:: case.recipe.rollout.engines].tolist()
    return times.Seconds(
        generate=times.generate_seconds(case, share, shares),
        score=score,
        update=update + optimizer,
        optimizer=optimizer,
        sync=times.sync_seconds(case, shares),
        turns=times.turn_seconds(case),
    )


# --- what does not fit ------------------------------------------------------------------------------------


def _missing_nodes(case: Case) -> Iterator[Problem]:
    cluster, r = case.recipe.cluster, case.recipe.rollout
    if cluster.nodes and case.nodes > cluster.nodes:
        yield Problem(
            "cluster.nodes",
            f"{case.nodes} are needed, and there are {cluster.nodes}: {case.recipe.trainer.parallel.ranks} ranks and "
            f"{r.engines} engines of {r.parallel.workers}, {case.placement}; use more, or lower trainer.parallel.dp or "
            "rollout.engines",
        )


def _gpu_problems(case: Case, ranks: Sequence[Place], engines: Sequence[Place]) -> Iterator[Problem]:
    """The fullest GPU at each moment, and for each key the worst; a KV cache that vLLM would refuse is another matter."""
    if not case.on_gpus:
        return  # all share one host, which has a problem of its own
    worst: dict[str, tuple[int, str]] = {}
    for moment, when in MOMENTS.items():
        places = [place for place in [*ranks, *engines] if moment in place.moments]
        place = max(places, key=lambda p: p.moments[moment].total, default=None)
        if place is None or (over := place.moments[moment].total - place.limit) <= 0:
            continue
        key, advice = _key_for(case, moment, place)
        needs = f"{place.name} needs {gib(place.moments[moment].total)} of {gib(place.limit)} {when}"
        worst[key] = max(worst.get(key, (0, "")), (over, f"{needs}, {gib(over)} too much: {advice}"))
    yield from (Problem(key, message) for key, (_, message) in worst.items())


MOMENTS = {
    "start": "while it starts",
    "update": "in an update",
    "sync": "in a weight sync",
    "rollout": "while engines sample",
}


def _key_for(case: Case, moment: str, place: Place) -> tuple[str, str]:
    """What to turn: what most of the memory is for."""
    trainer, held = case.recipe.trainer, place.moments[moment]
    if moment == "rollout":
        return "rollout.gpu_memory_utilization", "lower it, to leave room for the trainer's process"
    if place.name.startswith("engine"):
        return "rollout.gpu_memory_utilization", "lower it: vLLM's loader needs room for a layer beside the KV cache"
    if moment == "sync" and case.shares_gpus:
        return _spread(case, "trainer and engine hold their weights at once")
    sizes = {"activations": held.activations, "optimizer": held.optimizer, "gradients": held.gradients}
    sizes["weights"] = held.weights
    largest = max(sizes, key=lambda name: sizes[name])
    if largest == "activations" and trainer.recompute != "full":
        return "trainer.recompute", "full would keep each layer's input alone"
    if largest == "activations":
        return (
            "trainer.token_budget",
            f"lower it (a sample has up to {case.longest}), or raise trainer.parallel.tp or cp",
        )
    if largest == "optimizer" and trainer.optimizer.offload == "none":
        return "trainer.optimizer.offload", "cpu or nvme would take Adam's state off the GPU"
    return _spread(case, "its part of the model is too large")


def _spread(case: Case, why: str) -> tuple[str, str]:
    """What makes the weights on a GPU fewer."""
    p, e = case.recipe.trainer.parallel, case.recipe.rollout.parallel
    if p.ep < case.config["num_experts"] and p.ep * p.etp < p.dp * p.tp * p.cp:
        return "trainer.parallel.ep", f"raise it ({why}): ranks of a stage have the same experts"
    if case.shares_gpus and e.workers < (case.recipe.cluster.gpus_per_node or case.machine.gpus_per_node):
        return "rollout.parallel.tp", f"raise it ({why})"
    return "trainer.parallel.pp", f"raise it, with more ranks ({why})"


def _engine_problems(case: Case) -> Iterator[Problem]:
    room = gpu.engine_sampling(case).kv_cache
    needed = case.engine.kv_of(case.longest)
    if room >= needed:  # or vLLM would refuse to start
        return
    if not case.on_gpus:
        yield Problem(
            "rollout.kv_cache_gib", f"the longest request needs {gib(needed)} of KV cache, and there are {gib(room)}"
        )
        return
    short = f"{gib(-room)} too little for the weights" if room < 0 else f"{gib(room)} for a KV cache"
    r, hbm = case.recipe.rollout, case.machine.hbm_bytes
    if room + (HIGHEST_UTILIZATION - r.gpu_memory_utilization) * hbm > needed:
        key, advice = "rollout.gpu_memory_utilization", "raise it"
    elif r.parallel.workers < (case.recipe.cluster.gpus_per_node or case.machine.gpus_per_node):
        key, advice = "rollout.parallel.tp", "raise it: each worker then holds less of the model"
    else:
        key, advice = "rollout.precision", "mxfp8 would halve the weights"
    yield Problem(
        key,
        f"an engine's worker has {short} in {r.gpu_memory_utilization:.0%} of {gib(hbm)}, and the longest request needs "
        f"{gib(needed)}: {advice}",
    )


HOST_KEYS = {
    "processes": ("rollout.engines", "fewer processes hold less"),
    "waiting": ("trainer.wait_in", "nvme would take the waiting trainer's state off the host"),
    "engine_base": ("cluster.placement", "disaggregated engines keep their base on their own GPUs"),
    "adapters": ("model.lora.rank", "a lower one makes a smaller adapter"),
    "optimizer": ("trainer.optimizer.offload", "nvme would take Adam's state off the host"),
    "checkpoint": ("checkpoint.asynchronous", "false would make no copies"),
    "samples": ("rollout.max_response_tokens", "shorter responses, or fewer a step, take less"),
}


def _node_problems(case: Case, node: host.Node, nvme: int, ranks: Sequence[Place]) -> Iterator[Problem]:
    machine, moments = case.machine, case.recipe.trainer.optimizer.nvme.moments
    if (over := node.host - machine.host_bytes) > 0:
        sizes = {name: getattr(node, name) for name in HOST_KEYS}
        largest = max(sizes, key=lambda name: sizes[name])
        key, advice = HOST_KEYS[largest]
        if largest == "processes" and not case.on_gpus:
            fullest = max(ranks, key=lambda rank: rank.peak.total)
            key, advice = _key_for(case, fullest.fullest, fullest)
        yield Problem(
            key,
            f"a node's host memory would hold {gib(node.host)} of {gib(machine.host_bytes)}, {gib(over)} too much, most "
            f"of it for {largest.replace('_', ' ')}: {advice}",
        )
    if (over := nvme - machine.nvme_bytes) > 0:
        key = "trainer.optimizer.nvme.moments" if moments == "fp32" else "cluster.nodes"
        yield Problem(
            key,
            f"a node's NVMe would hold {gib(nvme)} of {gib(machine.nvme_bytes)}, {gib(over)} too much: bf16 "
            "moments, or more nodes, take less on each",
        )


def _notes(case: Case) -> list[str]:
    room = gpu.engine_sampling(case).kv_cache
    each = case.engine.kv_of(case.longest)
    nbytes, tensors = times.sync_size(case)
    owned = sum(memory.state_bytes(s, case.replicas, case.optimizer) for s in case.shapes)
    notes = [
        f"an engine's KV cache holds {max(0, room) // max(1, each)} requests of the longest length ({case.longest} tokens)",
        f"a sync sends {gib(nbytes)} in {tensors:,} tensors",
        f"Adam's state is {gib(owned)} over all ranks",
    ]
    idle = case.nodes - len({shelf.node for shelf in case.shelves})
    if idle:
        notes.append(f"cluster.nodes = {case.nodes}: {idle} of them have nothing to do")
    return notes


def gib(nbytes: float) -> str:
    """For people."""
    size = abs(nbytes) / GIB
    return (
        f"{nbytes / GIB:,.0f} GiB"
        if size >= 100
        else f"{nbytes / GIB:.1f} GiB"
        if size >= 1
        else f"{nbytes / 2**20:.0f} MiB"
    )
