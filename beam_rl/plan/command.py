"""`beam-rl plan`, and the plan inside `beam-rl train`.

Imports what it needs when it is called, so that the command line is quick.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from beam_rl.errors import InputError

if TYPE_CHECKING:
    from beam_rl.recipe.tree import Recipe

STATE_BYTES = 20  # of a parameter: the weight, its gradient, Adam's main copy and moments, and the engine's weight


def run(
    recipe_file: Path,
    overrides: Iterable[str],
    as_json: bool,
    suggesting: bool,
    simulating: bool,
    lengths_run: Path | None,
    bench: Sequence[Path],
) -> bool:
    """Prints the plan; whether it fits."""
    from beam_rl.plan import table
    from beam_rl.plan.plan import make_plan
    from beam_rl.plan.simulate import draw_lengths, lengths_of_run, simulate
    from beam_rl.plan.suggest import suggest
    from beam_rl.plan.times import shares_from
    from beam_rl.recipe.load import load

    recipe = load(recipe_file, overrides)
    shares, notes = shares_from(bench)
    r = recipe.rollout
    drawn = draw_lengths(r.prompts_per_step * r.samples_per_prompt * 4, r.max_response_tokens, recipe.seed)
    lengths = lengths_of_run(lengths_run) if lengths_run else drawn
    plan = make_plan(recipe, shares, lengths)
    plan.notes.extend(notes)
    timelines = simulate(plan.case, shares, lengths) if simulating else []
    suggestions = suggest(plan.case, shares, lengths) if suggesting else []
    if as_json:
        record = plan.record()
        if simulating:
            record["simulation"] = [asdict(timeline) for timeline in timelines]
        if suggesting:
            record["suggestions"] = [asdict(suggestion) for suggestion in suggestions]
        print(json.dumps(record))
        return plan.fits
    table.show(plan)
    if simulating:
        table.show_timelines(timelines)
    if suggesting:
        table.show_suggestions(suggestions)
    return plan.fits


def show_for(recipe: "Recipe") -> None:
    """The plan on stderr, for `train --dry-run`; a line where there can't be one, as of a model that is not there yet.

    InputError for a model that the trainer would refuse.
    """
    from rich.console import Console

    from beam_rl.plan import table
    from beam_rl.plan.model_shapes import Unbuildable
    from beam_rl.plan.plan import make_plan

    try:
        plan = make_plan(recipe)
    except Unbuildable:
        raise
    except InputError as error:
        print(f"no plan: {error}", file=sys.stderr)
        return
    table.show(plan, Console(file=sys.stderr, highlight=False, soft_wrap=True))


def refuse_if_too_large(recipe: "Recipe") -> None:
    """InputError, one line, if the run can't fit the machines of `cluster.gpu`, or this machine where it has no GPU."""
    from beam_rl.plan.plan import make_plan
    from beam_rl.plan.tensors import NotCounted

    try:
        if recipe.cluster.gpu is None and not _may_be_too_large(recipe):
            return
        plan = make_plan(recipe)
    except NotCounted:
        return
    if plan.problems:
        first = plan.problems[0]
        more = f" (and {len(plan.problems) - 1} more: beam-rl plan)" if len(plan.problems) > 1 else ""
        raise InputError(f"{first.key}: {first.message}{more}")


def _may_be_too_large(recipe: "Recipe") -> bool:
    """A quick look, so that small runs start at once: whether a model's state takes a quarter of a CPU's memory."""
    from beam_rl.doctor import find_gpus
    from beam_rl.plan.case import host_memory
    from beam_rl.plan.description import describe
    from beam_rl.tiny.sizes import SIZES

    if recipe.model.path in SIZES or recipe.cluster.address != "local" or find_gpus():
        return False  # of another machine's ranks this one's memory says nothing
    count = sum(stored.count for stored in describe(recipe).tensors.values())
    return STATE_BYTES * count > host_memory() / 4
