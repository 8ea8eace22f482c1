"""Searches layouts of the recipe's own number of GPUs for those that fit, and ranks them by estimated time.

The real model is built for every layout that is tried, so the search goes from the likeliest on and looks at some.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product

import numpy as np
from numpy.typing import NDArray

from beam_rl.layout import check_layout
from beam_rl.plan.case import Case, seat
from beam_rl.plan.model_shapes import shapes_of_layouts
from beam_rl.plan.plan import Plan, make_plan
from beam_rl.plan.times import Shares
from beam_rl.recipe.tree import Parallel, Recipe

TRIES = 8  # layouts that the real model is built for
SHOWN = 5
SIZES = (1, 2, 4, 8, 16, 32)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Suggestion:
    overrides: list[str]  # as for the command line
    fullest_bytes: int
    step_s: float


def suggest(case: Case, shares: Shares, lengths: NDArray[np.float64], tries: int = TRIES) -> list[Suggestion]:
    """Layouts of `trainer.parallel` and `trainer.recompute` that fit, the quickest first."""
    layouts = list(islice(_ordered(case), tries))
    shapes = shapes_of_layouts(case.counted, layouts)
    found: list[Suggestion] = []
    for parallel, of_ranks in zip(layouts, shapes, strict=True):
        for recompute in RECOMPUTE:  # less recomputation is quicker
            recipe = _with(case.recipe, parallel, recompute)
            shelves, nodes = seat(recipe, case.machine, case.on_gpus)
            tried = replace(case, recipe=recipe, shelves=shelves, nodes=nodes, shapes=of_ranks)
            plan = make_plan(recipe, shares, lengths, tried)
            if plan.fits:
                found.append(_suggestion(plan, case.recipe))
                break
    return sorted(found, key=lambda s: s.step_s)[:SHOWN]


def _ordered(case: Case) -> Iterator[Parallel]:
    """Layouts that the model allows, least communication first: little tensor and pipeline parallelism."""
    ranks, per_node = case.recipe.trainer.parallel.ranks, case.machine.gpus_per_node
    candidates = []
    for tp, pp, ep in product(SIZES, SIZES, (*SIZES, 64)):
        dp, rest = divmod(ranks, tp * pp)
        if rest or not dp or tp > per_node or (dp * tp) % ep:
            continue
        parallel = Parallel(dp=dp, tp=tp, sp=tp > 1, ep=ep, pp=pp)
        if not check_layout(case.config, parallel, case.adapter):
            candidates.append(parallel)
    # First those that hold every expert once, whose tokens stay within a node.
    yield from sorted(candidates, key=lambda p: (-p.ep * p.pp, p.ep * p.etp > per_node, -p.ep, p.tp))


def _with(recipe: Recipe, parallel: Parallel, recompute: str) -> Recipe:
    trainer = recipe.trainer.model_copy(update={"parallel": parallel, "recompute": recompute})
    return recipe.model_copy(update={"trainer": trainer})


def _suggestion(plan: Plan, before: Recipe) -> Suggestion:
    trainer = plan.case.recipe.trainer
    changes = {f"parallel.{key}": value for key, value in trainer.parallel.model_dump().items()}
    changes["recompute"] = trainer.recompute
    old = {f"parallel.{key}": value for key, value in before.trainer.parallel.model_dump().items()}
    old["recompute"] = before.trainer.recompute
    overrides = [f"trainer.{key}={_yaml(value)}" for key, value in changes.items() if value != old[key]]
    fullest = max(place.peak.total for place in [*plan.ranks, *plan.engines])
    return Suggestion(overrides, fullest, plan.seconds.record()["synchronous_step"])


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()
