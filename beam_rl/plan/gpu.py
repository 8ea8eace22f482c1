"""What each trainer rank's and engine worker's GPU holds at the moments of a step when it is fullest.

On a CPU: what the process of a rank or a worker holds of the host's memory. Formulas are in `memory.py`,
`activations.py` and `engine_memory.py`; here they meet the recipe.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from beam_rl.layout import place_of
from beam_rl.plan import activations, memory
from beam_rl.plan.case import Case
from beam_rl.plan.engine_memory import ASLEEP_BYTES, GRAPHS_BYTES, on_gpu
from beam_rl.plan.hardware import GIB
from beam_rl.plan.memory import Bytes
from beam_rl.plan.other_activations import other_parts

GPU_LIBRARIES_BYTES = int(1.5 * GIB)  # a process's CUDA context, NCCL's buffers, cuBLAS's workspaces
CPU_RANK_BYTES = 940_000_000  # resident in a trainer rank without a model, measured: torch, Megatron, Ray
CPU_BF16_BYTES = (
    850_000_000  # more in BF16, measured: oneDNN keeps what it compiled for the last 1024 shapes of a product
)
CPU_WORKER_BYTES = 1_700_000_000  # in an engine before it has a model: vLLM and what it compiles


@dataclass(frozen=True)
class Place:
    """A GPU, or on a CPU a process, and what it holds at each moment."""

    name: str
    node: int
    parameters: int
    moments: dict[str, Bytes]
    limit: int

    @property
    def fullest(self) -> str:
        return max(self.moments, key=lambda moment: self.moments[moment].total)

    @property
    def peak(self) -> Bytes:
        return self.moments[self.fullest]

    def record(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "gpu_bytes": asdict(self.peak),
            "gpu_limit": self.limit,
            "moment": self.fullest,
            "moments": {name: asdict(held) for name, held in self.moments.items()},
        }


def rank_places(case: Case) -> list[Place]:
    """Every trainer rank's GPU, with what an engine on it holds where they share it."""
    kinds = case.config["mlp_layer_types"]
    activation = [stage_activations(case, pp) for pp in range(case.recipe.trainer.parallel.pp)]
    places = []
    for rank, shape in enumerate(case.shapes):
        pp = place_of(rank, case.recipe.trainer.parallel, kinds).pp
        moments = _moments(case, rank, round(activation[pp]))
        node = case.node_of_rank[rank]
        places.append(Place(f"rank {rank}", node, shape.parameters, moments, case.machine.hbm_bytes))
    return places


def engine_places(case: Case) -> list[Place]:
    """Every engine worker's GPU, where it is not a rank's too."""
    places = []
    for shelf in case.shelves:
        if shelf.engine is None or (case.shares_gpus and shelf.ranks):
            continue
        for worker in range(case.recipe.rollout.parallel.workers):
            name = f"engine {shelf.engine} worker {worker}"
            moments = {"rollout": engine_sampling(case), "sync": _engine_loading(case)}
            places.append(Place(name, shelf.node, 0, moments, case.machine.hbm_bytes))
    return places


def stage_activations(case: Case, pp: int) -> float:
    """Peak bytes of a rank of this pipeline stage in an update."""
    trainer, p = case.recipe.trainer, case.recipe.trainer.parallel
    kinds = case.stage_kinds(pp)
    # 1F1B: a stage has begun as many micro-batches as there are stages after it; virtual stages begin some more.
    in_flight = (p.pp - pp) if p.vpp == 1 else (2 * (p.pp - pp - 1) + (p.vpp - 1) * p.pp + 1) / p.vpp
    in_flight = min(in_flight, micro_batches(case))
    stage = activations.Stage(kinds.count("dense"), kinds.count("sparse"), in_flight, pp == p.pp - 1)
    own, there = sizes(case), tokens(case)
    parts = activations.beam_parts(own, there) if case.model.folder is None else other_parts(own, there)
    return activations.peak(
        parts,
        own,
        there,
        stage,
        trainer.recompute,
        trainer.logprob_chunk_tokens,
        head_trainable=case.adapter is None,
        workspace_bytes=logit_bytes(case),
    )


def micro_batches(case: Case) -> int:
    """Of a replica in one update at most, if all samples were as long as can be."""
    trainer = case.recipe.trainer
    samples = case.samples // (trainer.mini_batches * trainer.parallel.dp)
    return max(1, -(-samples // max(1, trainer.token_budget // case.longest)))


def logit_bytes(case: Case) -> int:
    """Of a logit of the current chunk: `megatron.logprobs.workspace_bytes`."""
    narrow = case.value_bytes < activations.FP32
    if not case.on_gpus:
        return 14 if narrow else 8
    return case.value_bytes + (activations.FP32 if narrow and case.recipe.trainer.numerics == "fp32_head" else 0)


def sizes(case: Case) -> activations.Sizes:
    c, p = case.config, case.recipe.trainer.parallel
    return activations.Sizes(
        hidden=c["hidden_size"],
        queries=c["num_attention_heads"] * c["head_dim"] // p.tp,
        keys=c["num_key_value_heads"] * c["head_dim"] // p.tp,
        dense=c["intermediate_size"] // p.tp,
        expert=c["moe_intermediate_size"] // p.etp,
        experts=c["num_experts"],
        top_k=c["num_experts_per_tok"],
        vocabulary=c["vocab_size"] // p.tp,
        value_bytes=case.value_bytes,
        fused=case.on_gpus,
        **({} if case.model.folder is None else _of_other(case)),
    )


def _of_other(case: Case) -> dict[str, Any]:
    """What layers of other models than Beam have or lack, as the checkpoint's tensors tell."""
    config, tensors = case.config, case.model.tensors
    rope = config.get("rope_parameters") or {}
    shared = [s.shape[0] for name, s in tensors.items() if ".shared_expert" in name and name.endswith("up_proj.weight")]
    return {
        "head_norms": any(name.endswith("self_attn.q_norm.weight") for name in tensors),
        "rotary": round(config["head_dim"] * rope.get("partial_rotary_factor", 1.0)),
        "shared": max(shared, default=0) // case.recipe.trainer.parallel.tp,
    }


def tokens(case: Case) -> activations.Tokens:
    p, budget = case.recipe.trainer.parallel, pack_tokens(case)
    stream = budget / p.cp / (p.tp if p.sp else 1)
    imbalance = activations.EXPERT_IMBALANCE if p.ep > 1 else 1.0
    # Each of ep · etp ranks brings its tokens; a rank computes 1 / ep of the rows, and its part of each with etp.
    routed = stream * p.etp * case.config["num_experts_per_tok"] * imbalance
    return activations.Tokens(stream, budget / p.cp, routed, budget / p.cp)


def pack_tokens(case: Case) -> int:
    """Tokens of the fullest micro-batch: what the budget allows, or all there are."""
    trainer = case.recipe.trainer
    there = case.samples * case.longest // (trainer.mini_batches * trainer.parallel.dp)
    return min(trainer.token_budget, max(there, case.longest))


def _moments(case: Case, rank: int, activation_bytes: int) -> dict[str, Bytes]:
    shape, s = case.shapes[rank], case.recipe.sync
    mine = (shape, case.replicas, case.optimizer)
    libraries = Bytes(buffers=libraries_bytes(case))
    moments = {
        "start": memory.at_start(*mine) + libraries,
        "update": memory.at_update(*mine, activation_bytes, case.native_mxfp8) + libraries,
    }
    sync = memory.at_sync(shape, s.bucket_bytes if rank == 0 else 0, largest_synced(case))
    if not case.shares_gpus:
        optimizer = moments["update"].optimizer
        gradients = moments["update"].gradients
        moments["sync"] = replace(sync, optimizer=optimizer, gradients=gradients) + libraries
        return moments
    asleep = Bytes(buffers=ASLEEP_BYTES)
    moments["update"] += asleep
    moments["sync"] = sync + libraries + _engine_loading(case)
    moments["rollout"] = engine_sampling(case) + libraries
    return moments


def libraries_bytes(case: Case) -> int:
    """Of a trainer rank's process, whatever the model."""
    if case.on_gpus:
        return GPU_LIBRARIES_BYTES
    return CPU_RANK_BYTES + (CPU_BF16_BYTES if case.value_bytes < 4 else 0)


def largest_synced(case: Case) -> int:
    """Bytes of the largest tensor that a sync sends, embedding or head; of an adapter, what is held of a layer's experts."""
    config = case.config
    if case.adapter is None:
        return case.value_bytes * config["vocab_size"] * config["hidden_size"]
    wide = max(config["num_attention_heads"] * config["head_dim"], config["intermediate_size"])
    experts = config["num_experts"] * case.adapter.expert_rank
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    each = hidden + 2 * inner + max(hidden, inner)  # gate and up, and the stack that is made of a part of them
    return case.value_bytes * max(case.adapter.rank * wide * 2, experts * each)


def engine_sampling(case: Case) -> Bytes:
    r = case.recipe.rollout
    if case.on_gpus:
        sampling = on_gpu(case.engine, case.machine.hbm_bytes, r.gpu_memory_utilization)
        said = r.engine_args.get("kv_cache_memory_bytes")  # vLLM then takes that, whatever the share would leave
        return sampling if said is None else replace(sampling, kv_cache=int(said))
    kv_cache = int(r.kv_cache_gib * GIB) * r.parallel.pp  # each worker of a CPU engine takes it
    return Bytes(
        weights=case.engine.weights,
        adapters=case.engine.adapters,
        kv_cache=kv_cache // r.parallel.pp,
        buffers=case.engine.step + CPU_WORKER_BYTES,
    )


def _engine_loading(case: Case) -> Bytes:
    """In a sync: the weights, and what travels; the KV cache is not there where GPUs are shared, else it stays.

    An adapter travels through host memory.
    """
    sampling, buckets = engine_sampling(case), 2 * case.recipe.sync.bucket_bytes
    arriving = 0 if case.adapter else buckets + loading_bytes(case)
    if not case.on_gpus:
        return replace(sampling, buffers=CPU_WORKER_BYTES + (buckets if case.adapter else arriving))
    if not case.shares_gpus:
        return replace(sampling, kv_cache=max(0, sampling.kv_cache), buffers=GRAPHS_BYTES + arriving)
    return replace(sampling, kv_cache=0, buffers=ASLEEP_BYTES + arriving)


def loading_bytes(case: Case) -> int:
    """vLLM's loader keeps a layer's tensors, whole, until it has them all, and makes the worker's part of them anew."""
    c, e = case.config, case.recipe.rollout.parallel
    experts = 3 * c["num_experts"] * c["moe_intermediate_size"] * c["hidden_size"]
    whole = experts * (33 / 32 if case.scheme else case.value_bytes)
    return round(whole * (1 + 1 / (e.tp * e.dp)))
