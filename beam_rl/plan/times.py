"""Seconds of a step's parts, from a machine's rates and what programs reach of them. Estimates: the paces and layouts of
one model compare; the absolute values are as good as the shares below.

A share comes from this project's own benches (benchmarks/*.json) where it has one; a `bench` result of the machine itself
takes its place. Pure formulas; knows nothing about memory.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from beam_rl.errors import InputError
from beam_rl.lora import adapter_modules, sync_shapes
from beam_rl.plan import memory
from beam_rl.plan.case import Case
from beam_rl.plan.work import forward_flops


@dataclass(frozen=True)
class Shares:
    """What is reached of a machine's rates, and latencies that no rate explains."""

    train_flops: float = 0.30  # of dense FLOP/s in the trainer's forward and backward: assumed, of large MoE runs
    generate_bandwidth: float = 0.60  # of HBM's in a decode step: assumed
    generate_flops: float = 0.40  # when many requests make decoding compute-bound: assumed
    train_link: float = 0.60  # of NVLink's or the network's rate in the exchanges between layers: assumed
    sync_bandwidth: float = 0.66  # of the link's: nccl, benchmarks/sync_h200.json
    gloo_bytes_per_s: float = 3e9  # to one worker: benchmarks/sync_cpu.json
    nvme_slowdown: float = 1.15  # an update's time over the disk's own: docs/nvme.md
    decode_step_s: float = 0.0008  # launches and waits a step that no byte explains: assumed
    collective_s: float = 12e-6  # of one all-reduce of a decode step within a node: assumed
    load_s: float = 0.0004  # of a call of vLLM's loader, and of an adapter's tensor or stack: docs/placement.md
    bind_s: float = 0.00004  # for vLLM to take an adapter's matrix: docs/sync.md
    digest_bytes_per_s: float = 1.8e9  # SHA-256 of an adapter, once at each end: one core of an AMD EPYC
    tensor_s: float = 0.00006  # to pack, receive and stack an expert's tensor: docs/sync.md


@dataclass(frozen=True)
class Seconds:
    """Of one step."""

    generate: float
    score: float
    update: float  # all mini-batches, the optimizer's part included
    optimizer: float  # of `update`
    sync: float
    turns: float  # handing shared GPUs over

    def record(self) -> dict[str, float]:
        total = self.generate + self.score + self.update + self.sync + self.turns
        return {**vars(self), "synchronous_step": total}


def shares_from(files: Sequence[Path]) -> tuple[Shares, list[str]]:
    """The shares with what `beam-rl bench … --json` has measured in their places, and a line for each that was used."""
    shares, notes = Shares(), []
    for file in files:
        result = _read(file)
        match result["name"]:
            case "sync":
                shares = replace(shares, sync_bandwidth=result["ratio"])
                notes.append(f"sync_bandwidth = {result['ratio']:.2f}, measured ({file})")
            case "nvme":
                slowdown = 1 / result["ratio"]
                shares = replace(shares, nvme_slowdown=slowdown)
                notes.append(f"nvme_slowdown = {slowdown:.2f}, measured ({file})")
            case name:
                raise InputError(f"--bench {file}: the plan uses results of sync and nvme, not of {name}")
    return shares, notes


def _read(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        name, ratio = result["name"], float(result["ratio"])
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--bench {file}: no result of `beam-rl bench … --json` ({error})") from None
    if not ratio > 0:
        raise InputError(f"--bench {file}: ratio = {ratio}: a positive number is expected")
    return {"name": name, "ratio": ratio}


# --- training ---------------------------------------------------------------------------------------------


def train_seconds(case: Case, tokens: float, mean_length: float, shares: Shares) -> tuple[float, float, float]:
    """(score, forward and backward of all updates, optimizer of all updates) for a step's tokens."""
    trainer, p = case.recipe.trainer, case.recipe.trainer.parallel
    machine = case.machine
    flops = machine.fp8_flops if case.native_mxfp8 else machine.bf16_flops
    rate = p.ranks * flops * shares.train_flops
    forward = forward_flops(case.work, tokens, mean_length) / rate
    # An adapter needs no gradients of weights: a backward pass of one forward's work, not of two.
    passes = (2 if case.adapter else 3) + {"none": 0.0, "selective": 0.6, "full": 1.0}[trainer.recompute]
    exchange = exchange_seconds(case, tokens, shares)
    packs = max(1.0, tokens / (trainer.mini_batches * p.dp * trainer.token_budget))
    bubble = 1 + (p.pp - 1) / (p.vpp * packs)  # of each mini-batch; scoring runs the mini-batches one by one, too
    again = {"none": 0.0, "selective": 1.0, "full": 1.0}[trainer.recompute]
    score, update = (forward + exchange) * bubble, (passes * forward + (2 + again) * exchange) * bubble
    return score, update, trainer.mini_batches * optimizer_seconds(case, shares)


def exchange_seconds(case: Case, tokens: float, shares: Shares) -> float:
    """A forward pass's exchanges of a rank: tokens to experts and back, and the gathers of tensor parallelism."""
    p, config, machine = case.recipe.trainer.parallel, case.config, case.machine
    each = case.recipe.cluster.gpus_per_node or machine.gpus_per_node
    stream = tokens / (p.dp * p.cp * p.tp)  # tokens whose residual stream a rank of a stage has
    row = case.value_bytes * config["hidden_size"]
    sparse = config["mlp_layer_types"].count("sparse") / p.pp
    share = 1 - 1 / (p.ep * p.etp)
    to_experts = 2 * stream * config["num_experts_per_tok"] * row * sparse * share
    gathers = 4 * stream * p.tp * row * config["num_hidden_layers"] / p.pp * (1 - 1 / p.tp)
    near, far = machine.nvlink_bytes_per_s * shares.train_link, machine.network_bytes_per_s * shares.train_link
    crossing = max(0.0, 1 - each / (p.ep * p.etp))  # of the tokens, to experts on other nodes
    return to_experts * ((1 - crossing) / near + crossing / far) + gathers / (near if p.tp <= each else far)


def optimizer_seconds(case: Case, shares: Shares) -> float:
    """One update of the fullest node's or rank's state: read and written, from where it lives."""
    states = [memory.state_bytes(shape, case.replicas, case.optimizer) for shape in case.shapes]
    if case.optimizer.offload == "nvme":
        node = max(sum(states[rank] for rank in ranks) for ranks in case.ranks_on.values())
        return 2 * node / case.machine.nvme_bytes_per_s * shares.nvme_slowdown
    lives = case.machine.pcie_bytes_per_s if case.optimizer.offload == "cpu" else case.machine.hbm_bytes_per_s
    return 2 * max(states) / lives


# --- sampling ---------------------------------------------------------------------------------------------


def decode_step_seconds(case: Case, requests: float, context: float, shares: Shares) -> float:
    """One token for each of an engine's requests: bytes read, FLOPs, collectives, and what is always there."""
    machine, e, config = case.machine, case.recipe.rollout.parallel, case.config
    work, workers = case.work, e.workers
    experts = config["num_experts"]
    met = experts * (1 - (1 - config["num_experts_per_tok"] / experts) ** requests) if experts else 0.0
    element = 33 / 32 if case.scheme else case.value_bytes
    weights = (work.dense + met * work.expert) * element / workers
    kv = requests * case.engine.kv_of(round(context)) / e.dp
    bandwidth = (weights + kv) / (machine.hbm_bytes_per_s * shares.generate_bandwidth)
    rate = machine.fp8_flops if case.scheme and case.native_engine else machine.bf16_flops
    compute = 2 * work.active * requests / workers / (rate * shares.generate_flops)
    collectives = 2 * config["num_hidden_layers"] * shares.collective_s if workers > 1 else 0.0
    return max(bandwidth, compute) + collectives + shares.decode_step_s


def generate_seconds(case: Case, lengths: Sequence[float], shares: Shares) -> float:
    """Until the last of an engine's share of the responses is there; requests beyond the engine's room wait."""
    from beam_rl.plan.simulate import finish_times

    return max(finish_times(case, lengths, shares), default=0.0)


# --- weights ----------------------------------------------------------------------------------------------


def sync_size(case: Case) -> tuple[int, int]:
    """Bytes and tensors of one sync."""
    config, value = case.config, case.value_bytes
    if case.adapter is not None:
        sent = sync_shapes(case.adapter, config).values()
        return value * sum(map(math.prod, sent)), len(sent)
    nbytes = 0.0
    for name, stored in case.model.tensors.items():
        mxfp8 = case.scheme is not None and case.scheme.has(name)
        nbytes += stored.count * (4 if stored.fp32 else 33 / 32 if mxfp8 else value)
    return round(nbytes), len(case.model.tensors)


def transport(case: Case) -> str:
    """What `sync.transport: auto` comes to (`rollout.sync.place.choose`)."""
    if case.recipe.sync.transport != "auto":
        return case.recipe.sync.transport
    if case.on_gpus and not case.shares_gpus:
        return "nccl"
    if case.on_gpus and case.recipe.rollout.engines * case.recipe.rollout.parallel.workers == 1:
        return "ipc"
    first = case.node_of_rank[0]
    return "shm" if all(node == first for node, engines in case.engines_on.items() if engines) else "gloo"


def sync_seconds(case: Case, shares: Shares) -> float:
    """From the first rank to every engine; gathering, sending and loading go on at the same time, the slowest counts."""
    nbytes, tensors = sync_size(case)
    machine, workers = case.machine, case.recipe.rollout.engines * case.recipe.rollout.parallel.workers
    apart = case.nodes > 1
    link = machine.network_bytes_per_s if apart else machine.nvlink_bytes_per_s
    rate = {
        "nccl": link * shares.sync_bandwidth,  # one broadcast
        "ipc": machine.hbm_bytes_per_s / 2 * shares.sync_bandwidth,
        "shm": machine.pcie_bytes_per_s * shares.sync_bandwidth,
        "gloo": min(shares.gloo_bytes_per_s, machine.network_bytes_per_s / workers),  # to each worker on its own
    }[transport(case)]
    gather = nbytes / (link * shares.sync_bandwidth) if len(case.shapes) > 1 else 0.0
    return max(gather, nbytes / rate, _loading_seconds(case, shares, nbytes, tensors))


def _loading_seconds(case: Case, shares: Shares, nbytes: int, tensors: int) -> float:
    """What each tensor takes, whatever its size; of an adapter also the digests that prove that it has arrived."""
    if case.adapter is not None:
        matrices = sum(1 for _ in adapter_modules(case.adapter, case.config))
        return tensors * shares.load_s + matrices * shares.bind_s + 2 * nbytes / shares.digest_bytes_per_s
    experts = [name for name in case.model.tensors if ".experts." in name]
    stacks = {re.sub(r"\.experts\.\d+\.", ".experts.", name) for name in experts}  # each loaded in one call
    return len(experts) * shares.tensor_s + (tensors - len(experts) + len(stacks)) * shares.load_s


def turn_seconds(case: Case) -> float:
    """Shared GPUs: what the trainer takes out and back, and a sleeping engine's base, over the fullest GPU's own link."""
    if not case.shares_gpus:
        return 0.0
    moved = 0
    for shape in case.shapes:
        whole = memory.waiting_bytes(shape, case.replicas, case.optimizer)
        frozen = memory.weight_bytes(shape) if case.adapter else 0
        moved = max(moved, 2 * whole - frozen)  # what never changes is copied out once
    base = case.engine.weights if case.adapter else 0
    return (moved + 2 * base) / case.machine.pcie_bytes_per_s
