"""Decode speed and slot memory of an engine that serves an adapter: experts at their true rank, padded, and no adapter.

The engine is the one that a run samples with, with random weights in the shape of Beam.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from beam_rl.bench.result import AsJson, Result, show
from beam_rl.errors import InputError
from beam_rl.lora import ALL_TARGETS, Adapter, adapter_tensors, repeated_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from beam_rl.rollout.engine import Engine
    from beam_rl.rollout.launch import EngineSettings
    from beam_rl.samples import Request

PROMPT_TOKENS, EOS = 4, 1
RUNS = 5  # of which the fastest counts: other work on the machine only ever slows it down
BUCKET_BYTES, DEADLINE_S = 64 * 2**20, 120.0


@dataclass(frozen=True)
class Case:
    """Layers of Beam: one dense, the others sparse; every second one with full attention."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    dense: int  # inner size of the dense layer
    expert: int  # inner size of an expert
    experts: int
    top_k: int
    vocabulary: int
    dtype: str
    rank: int = 64
    concurrency: int = 32
    tokens: int = 256


class Shape(StrEnum):
    small = "small"  # this module's; the others are Beam's own sizes and `moe_lora_gpu`'s
    whole = "whole"
    shard = "shard"


SMALL = Case(256, 4, 4, 1, 512, 128, 32, 8, 4096, "fp32", tokens=64)


@dataclass(frozen=True)
class Measured:
    """tokens_s: sampled tokens a second, all requests together."""

    tokens_s: float
    slot_bytes: int
    expert_slot_bytes: int
    sync_s: float


def moe_lora(
    shape: Annotated[
        Shape | None,
        typer.Option(
            help="Small layers, or on a GPU Beam's own, or one GPU's part of them at TP 8.",
            show_default="whole on a GPU, small on a CPU",
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests sampled at the same time.")] = 32,
    as_json: AsJson = False,
) -> None:
    """An engine's decode with an adapter whose experts have their true rank, beside the same without an adapter.

    The figure is the sampled tokens a second with the experts' slots at rank / top-k, the limit those without an adapter.
    Beside them an engine whose expert slots are padded to the rank of the dense modules, as vLLM does by itself.
    """
    from beam_rl.bench import measure

    on_gpu = measure.device().type == "cuda"
    chosen = shape or (Shape.whole if on_gpu else Shape.small)
    if chosen == Shape.small:
        show(bench(replace(SMALL, concurrency=concurrency)), as_json)
        return
    if not on_gpu:
        raise InputError(f"--shape {chosen}: layers of Beam's size are for a GPU; use small")
    from beam_rl.bench import moe_lora_gpu

    show(moe_lora_gpu.bench([chosen.value], concurrency=concurrency), as_json)


def bench(case: Case) -> Result:
    """Measures the three engines one after the other."""
    from beam_rl.bench import measure

    typer.echo("measuring an engine without an adapter, one with true and one with padded expert ranks", err=True)
    expert_ranks = {"plain": None, "true": case.rank // case.top_k, "padded": case.rank}
    measured = measure.in_fresh_process(run, case, list(expert_ranks.values()))
    runs = dict(zip(expert_ranks, measured, strict=True))
    return Result(
        name="moe-lora",
        figure=runs["true"].tokens_s,
        unit="token/s",
        limit=runs["plain"].tokens_s,
        machine=measure.machine(measure.device()),
        detail={
            **asdict(case),
            "expert_rank": expert_ranks["true"],
            "padded_tokens_per_second": runs["padded"].tokens_s,
            "padded_share_of_the_limit": runs["padded"].tokens_s / runs["plain"].tokens_s,
            "slots_bytes": runs["true"].slot_bytes,
            "padded_slots_bytes": runs["padded"].slot_bytes,
            "expert_slots_bytes": runs["true"].expert_slot_bytes,
            "padded_expert_slots_bytes": runs["padded"].expert_slot_bytes,
            "sync_seconds": runs["true"].sync_s,
        },
    )


def run(case: Case, expert_ranks: list[int | None]) -> list[Measured]:
    """One engine after the other, to be called in a fresh process. Each has its experts' rank; None: no adapter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model_config(case)))
        settings = [engine_settings(case, Path(folder), rank) for rank in expert_ranks]
        return asyncio.run(_measure_all(case, settings))


async def _measure_all(case: Case, settings: list["EngineSettings"]) -> list[Measured]:
    return [await _measure(case, each) for each in settings]


def model_config(case: Case) -> dict[str, Any]:
    """config.json of the case's model."""
    return {
        "architectures": ["BeamForCausalLM"],
        "model_type": "beam",
        "vocab_size": case.vocabulary,
        "hidden_size": case.hidden,
        "intermediate_size": case.dense,
        "num_hidden_layers": case.layers,
        "mlp_layer_types": ["dense"] + ["sparse"] * (case.layers - 1),
        "layer_types": ["sliding_attention", "full_attention"] * (case.layers // 2),
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": 128 if case.hidden >= 1024 else 64,
        "sliding_window": 512,
        "moe_intermediate_size": case.expert,
        "num_experts": case.experts,
        "num_experts_per_tok": case.top_k,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 4096,
        "eos_token_id": EOS,
    }


def engine_settings(case: Case, folder: Path, expert_rank: int | None) -> "EngineSettings":
    """What starts an engine with random weights in the case's shape; expert_rank: None for no adapter."""
    from beam_rl.rollout.launch import EngineSettings

    # A scale of 1 for both; what an adapter's values are does not change the time.
    adapter = expert_rank and Adapter(case.rank, case.rank, expert_rank, expert_rank, ALL_TARGETS)
    return EngineSettings(
        model=str(folder),
        dtype="fp32" if case.dtype == "fp32" else "bf16",
        max_model_len=PROMPT_TOKENS + case.tokens,
        max_num_seqs=case.concurrency,
        max_batched_tokens=max(512, case.concurrency),
        kv_cache_gib=0.25,
        gpu_memory_utilization=0.9,
        seed=0,
        routing_replay=False,
        host="127.0.0.1",
        log_dir=str(folder),
        adapter=adapter or None,
        random_weights=True,
    )


async def _measure(case: Case, settings: "EngineSettings") -> Measured:
    from beam_rl.rollout.engine import Engine

    engine = Engine(settings)
    await engine.start()
    try:
        sync_s, slots, expert_slots = 0.0, 0, 0
        if settings.adapter is not None:
            sync_s = await _load_adapter(engine, settings.adapter, model_config(case))
            found = await engine.adapter_slots()
            slots = sum(s.bytes for s in found)
            expert_slots = sum(s.bytes for s in found if s.module.endswith(".experts"))
        rates = [await _tokens_per_second(engine, case, seed) for seed in range(RUNS + 1)]
        return Measured(max(rates[1:]), slots, expert_slots, sync_s)  # the first run compiles and warms up
    finally:
        await engine.stop()


def requests(case: Case, seed: int) -> list["Request"]:
    """As many as the case samples at the same time; each seed has ids of its own."""
    from beam_rl.samples import Request

    first = range(2, 2 + PROMPT_TOKENS)
    return [
        Request(f"{seed}-{i}", [(t + 7 * i) % case.vocabulary for t in first], 1000 * seed + i, case.tokens, 1.0)
        for i in range(case.concurrency)
    ]


async def _tokens_per_second(engine: "Engine", case: Case, seed: int) -> float:
    start = time.perf_counter()
    sampled = [len(done.token_ids) async for done in engine.generate(requests(case, seed))]
    return sum(sampled) / (time.perf_counter() - start)


async def _load_adapter(engine: "Engine", adapter: Adapter, config: dict[str, Any]) -> float:
    """Syncs a random adapter into the engine the way a trainer does; returns the seconds it took."""
    import torch

    from beam_rl.adapter_stacks import stacked
    from beam_rl.rollout.sync.link import Link
    from beam_rl.rollout.sync.local import LocalSync

    link = Link("shm", BUCKET_BYTES, DEADLINE_S, checksums=True, host="127.0.0.1")
    sync = LocalSync(engine, link, torch.device("cpu"))
    await sync.join()
    start = time.perf_counter()
    await sync.load(stacked(_random_tensors(adapter, config), config), version=1)
    return time.perf_counter() - start


def _random_tensors(adapter: Adapter, config: dict[str, Any]) -> Iterator[tuple[str, "Tensor"]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    repeated = repeated_tensors(adapter, config)
    for name, shape in adapter_tensors(adapter, config).items():
        if name not in repeated:
            yield name, torch.randn(shape, generator=generator) * 0.01
