"""Where the gap between trainer and engine comes from: each source switched off, or alone, on the recipe's own model.

What the recipe can choose is run again with the other choice, trainer and engine started anew; what it can't is measured on
the responses of the first run. Knows nothing about Megatron or vLLM beyond their handles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
from numpy.typing import NDArray
from rich.table import Table

from beam_rl.cluster import Cluster
from beam_rl.inputs import Inputs, check_config_for
from beam_rl.model_config import full_config
from beam_rl.other_models import fitted
from beam_rl.parity.check import response_logp, sample, token_ids
from beam_rl.recipe.load import overridden, parse
from beam_rl.recipe.tree import Recipe
from beam_rl.samples import Sample
from beam_rl.step import Display
from beam_rl.verifiers.worker import one_line

WIDTH = 120  # columns where there is no terminal to ask
AS_IS = "as the recipe says"
CHOICES = {  # what the recipe can choose, by what a person calls it
    "logits rounded to the activations' precision after the softcap, both sides": ["trainer.numerics=engine"],
    "logits in FP32 after the softcap, trainer alone": ["trainer.numerics=reference"],
    "head and logits in FP32, both sides": ["trainer.numerics=fp32_head"],
    "neither replay nor the engine's rounding": ["rollout.routing_replay=false", "trainer.numerics=reference"],
}


@dataclass(frozen=True)
class Gap:
    """|Δlogp| of the sampled tokens, nats. between: the two sides, or why there is nothing to tell."""

    source: str
    between: str
    mean: float | None = None
    max: float | None = None
    tokens: int = 0


def sources(recipe: Recipe, inputs: Inputs, others: Sequence[str], folder: Path, display: Display) -> Iterator[Gap]:
    """The recipe's gap first, then what it is made of; a choice that fails is a row that says why.

    Args:
        others: more choices to try, each some `key=value` with spaces between.
    Raises:
        InputError: a choice that is no recipe for this model, before anything is measured.
    """
    config = full_config(inputs.model_path)
    tried = {AS_IS: recipe}
    for name, overrides in (CHOICES | {other: other.split() for other in others}).items():
        other, _ = fitted(parse(overridden(recipe.model_dump(mode="json"), overrides)), config)
        check_config_for(other, config)
        if other not in tried.values():
            tried[name] = other
    for i, (name, choice) in enumerate(tried.items()):
        try:
            yield from gaps_of(choice, inputs, name, folder / str(i), display)
        except Exception as error:  # what is measured already is worth telling
            if name == AS_IS:
                raise
            yield Gap(name, f"did not run: {one_line(error)}")


def gaps_of(recipe: Recipe, inputs: Inputs, name: str, folder: Path, display: Display) -> list[Gap]:
    """The gap of one choice; of the recipe itself also the one without replay, and the engine's to itself."""
    with Cluster(recipe, inputs.model_path, folder, display) as cluster:
        with display.phase("syncing", once=True), cluster.turns.to_engines():
            cluster.sync.bring(0)
        with display.phase("sampling", once=True):
            samples = sample(recipe, inputs, cluster.engines)
            of_engine = _engine_gaps(recipe, inputs, cluster, samples) if name == AS_IS else []
        cluster.turns.to_trainer()
        with display.phase("scoring", once=True):
            gaps = [_trainer_gap(name, cluster, samples)]
            if name == AS_IS and recipe.rollout.routing_replay:
                free = [replace(s, completion=replace(s.completion, routes=None)) for s in samples]
                gaps.append(_trainer_gap("without replay of the routes", cluster, free))
    return gaps + of_engine


def _trainer_gap(name: str, cluster: Cluster, samples: Sequence[Sample]) -> Gap:
    scores = cluster.policy.score([samples])
    return _gap(name, "trainer – engine", scores.logp, scores.logp_engine)


def _engine_gaps(recipe: Recipe, inputs: Inputs, cluster: Cluster, samples: Sequence[Sample]) -> list[Gap]:
    """The engine in another batch, and by another way through its kernels, for the same tokens."""
    cluster.engines.forget_prefixes()
    alone = [sample(recipe, inputs, cluster.engines, only=slice(i, i + 1))[0] for i in range(len(samples))]
    gaps = [_gap("a request alone, not in a batch", "engine – itself", *_common(samples, alone))]
    if recipe.rollout.parallel.workers == 1 and inputs.is_beam:  # probing looks into one, of Beam
        temperature = recipe.rollout.temperature
        prefilled = [cluster.engines.probe(token_ids(s), s.completion.routes, temperature, False) for s in samples]
        sampled = np.concatenate([s.completion.logp for s in samples])
        again = response_logp(samples, prefilled)
        gaps.append(_gap("a whole response at once, not token by token", "engine – itself", again, sampled))
    return gaps


def _common(a: Sequence[Sample], b: Sequence[Sample]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Both log-probabilities of each response's tokens up to the first that differs, which were drawn after the same."""
    pairs = []
    for first, second in zip(a, b, strict=True):
        x, y = first.completion, second.completion
        shorter = min(len(x.token_ids), len(y.token_ids))
        differs = np.flatnonzero(x.token_ids[:shorter] != y.token_ids[:shorter])
        end = int(differs[0]) if len(differs) else shorter
        pairs.append((x.logp[:end], y.logp[:end]))
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


def _gap(source: str, between: str, a: NDArray[np.float32], b: NDArray[np.float32]) -> Gap:
    away = np.abs(a.astype(np.float64) - b)
    return Gap(source, between, float(away.mean()), float(away.max()), len(away))


def record(gaps: Sequence[Gap]) -> dict[str, Any]:
    """As JSON."""
    return {
        gap.source: {"between": gap.between, "mean": gap.mean, "max": gap.max, "tokens": gap.tokens} for gap in gaps
    }


def show(gaps: Sequence[Gap]) -> None:
    table = Table(title="|Δlogp| of the sampled tokens", title_justify="left")
    for column in ("", "between", "mean", "max", "tokens"):
        table.add_column(column, justify="left" if column in ("", "between") else "right")
    for gap in gaps:
        known = gap.mean is not None and gap.max is not None
        numbers = (f"{gap.mean:.2e}", f"{gap.max:.2e}", f"{gap.tokens:,}") if known else ("–", "–", "–")
        table.add_row(gap.source, gap.between, *numbers)
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
