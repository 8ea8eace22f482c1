"""Searches layouts of the recipe's own number of GPUs for those that fit, and ranks them by estimated time.

The real model is built for every layout that is tried, so the search goes from the likeliest on and stops early.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from beam_rl.errors import InputError
from beam_rl.layout import check_layout
from beam_rl.plan.case import Case, case_of, seat
from beam_rl.plan.plan import Plan, make_plan
from beam_rl.recipe.tree import Parallel, Recipe

TRIES = 12  # candidates that the real model is counted for
SIZES = (1, 2, 4, 8, 16, 32)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Suggestion:
    overrides: list[str]  # as for the command line
    fullest_bytes: int
    step_s: float


def suggest(recipe: Recipe, most: int = 5) -> list[Suggestion]:
    """Layouts of `trainer.parallel` and `trainer.recompute` that fit, the quickest first."""
    base = case_of(recipe)
    found: list[Suggestion] = []
    tried: dict[str, Case] = {}
    for parallel in _ordered(base):
        if len(tried) >= TRIES or len(found) >= 3 * most:
            break
        for recompute in RECOMPUTE:
            plan = _plan(_with(recipe, parallel, recompute), tried)
            if plan is not None and plan.fits:
                found.append(_suggestion(plan, parallel, recompute))
                break  # less recomputation is quicker
    return sorted(found, key=lambda s: s.step_s)[:most]


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
    # Whole-model replicas of experts take most memory, so much expert parallelism comes first.
    yield from sorted(candidates, key=lambda p: (-min(p.ep * p.pp, ranks), p.tp * p.pp, p.pp))


def _with(recipe: Recipe, parallel: Parallel, recompute: str) -> Recipe:
    trainer = recipe.trainer.model_copy(update={"parallel": parallel, "recompute": recompute})
    return recipe.model_copy(update={"trainer": trainer})


def _plan(recipe: Recipe, tried: dict[str, Case]) -> Plan | None:
    """None where the recipe can't be laid out like this. The model is built once for a layout."""
    key = recipe.trainer.parallel.model_dump_json()
    try:
        if key in tried:
            shelves, nodes = seat(recipe, tried[key].machine, tried[key].on_gpus)
            case = replace(tried[key], recipe=recipe, shelves=shelves, nodes=nodes)
        else:
            case = tried[key] = case_of(recipe)
        return make_plan(recipe, case=case)
    except InputError:
        return None


def _suggestion(plan: Plan, parallel: Parallel, recompute: str) -> Suggestion:
    overrides = [
        f"trainer.parallel.{key}={str(value).lower()}"
        for key, value in parallel.model_dump().items()
        if value is not None and key != "vpp"
    ]
    fullest = max(place.peak.total for place in [*plan.ranks, *plan.engines])
    step = plan.seconds.record()["synchronous_step"]
    return Suggestion([*overrides, f"trainer.recompute={recompute}"], fullest, step)
