"""What it costs an engine to hand out each token's experts for the trainer to replay: tokens a second with and without.

The engine is the one that a run samples with, with random weights in the shape of Beam.
"""

import asyncio
import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from beam_rl.bench.moe_lora import SMALL, Case, engine_settings, model_config, requests
from beam_rl.bench.result import AsJson, Result, show

if TYPE_CHECKING:
    from beam_rl.rollout.launch import EngineSettings

RUNS = 6  # of which the first compiles and the fastest counts: other work on the machine only ever slows it down
ON_GPU = {"hidden": 2048, "layers": 8, "heads": 16, "kv_heads": 4, "dense": 4096, "expert": 512, "experts": 256}


@dataclass(frozen=True)
class Measured:
    """tokens_s: sampled tokens a second, all requests together; route_bytes: of one token."""

    tokens_s: float
    route_bytes: float


def replay(
    concurrency: Annotated[int, typer.Option(min=1, help="Requests sampled at the same time.")] = 32,
    as_json: AsJson = False,
) -> None:
    """An engine's generation while it hands out the experts of every token and layer, beside the same without.

    The figure is the sampled tokens a second with routing replay, the limit those without. A token's routes are one byte for
    each of its experts in each MoE layer, two where there are more than 256 experts.
    """
    show(bench(concurrency), as_json)


def bench(concurrency: int) -> Result:
    """Measures the two engines one after the other."""
    from beam_rl.bench import measure

    where = measure.device()
    case = replace(SMALL, concurrency=concurrency)
    if where.type == "cuda":
        case = replace(case, **ON_GPU, vocabulary=16384, dtype="bf16", tokens=256)
    typer.echo("measuring an engine without routes and one with them", err=True)
    without, with_routes = measure.in_fresh_process(run, case)
    detail: dict[str, Any] = {**asdict(case), "moe_layers": case.layers - 1}
    detail["route_values_a_token"] = (case.layers - 1) * case.top_k
    detail["route_bytes_a_token"] = with_routes.route_bytes
    machine = measure.machine(where)
    return Result("replay", with_routes.tokens_s, "token/s", without.tokens_s, machine, detail)


def run(case: Case) -> tuple[Measured, Measured]:
    """Without routes, and with them; to be called in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model_config(case)))
        settings = engine_settings(case, Path(folder), None)
        return asyncio.run(_measure_both(case, settings))


async def _measure_both(case: Case, settings: "EngineSettings") -> tuple[Measured, Measured]:
    without = await _measure(case, settings)
    return without, await _measure(case, replace(settings, routing_replay=True))


async def _measure(case: Case, settings: "EngineSettings") -> Measured:
    from beam_rl.rollout.engine import Engine

    engine = Engine(settings)
    await engine.start()
    try:
        found = [await _sample(engine, case, seed) for seed in range(RUNS)]
        return max(found[1:], key=lambda measured: measured.tokens_s)
    finally:
        await engine.stop()


async def _sample(engine: Any, case: Case, seed: int) -> Measured:
    start = time.perf_counter()
    done = [completion async for completion in engine.generate(requests(case, seed))]
    seconds = time.perf_counter() - start
    rows = sum(len(c.routes) for c in done if c.routes is not None)
    route_bytes = sum(c.routes.nbytes for c in done if c.routes is not None)
    return Measured(sum(len(c.token_ids) for c in done) / seconds, route_bytes / max(rows, 1))
