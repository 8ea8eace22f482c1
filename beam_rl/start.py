"""What stands between a command and the loop: reads the inputs, opens the run's folder, shows what goes on."""

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from beam_rl.errors import InputError
from beam_rl.recipe.load import load
from beam_rl.recipe.tree import Recipe
from beam_rl.report import Console, Report
from beam_rl.run import Run

log = logging.getLogger(__name__)


def run_training(recipe: Recipe, folder: Path, resume: str | None) -> None:
    """Opens (or resumes) the run in `folder`, trains, and prints where everything lies."""
    from beam_rl.inputs import prepare
    from beam_rl.loop import train

    with Console() as console:
        inputs = prepare(recipe, folder / ".cache", console.warm_start)
        with Run.open(folder, recipe.model_dump(mode="json"), resume, recipe.checkpoint) as run:
            with Report(console, run, recipe) as report:
                train(recipe, inputs, run, report)
                report.summary()


def run_evaluation(source: Path, overrides: Iterable[str]) -> dict[str, Any]:
    """Evaluates a recipe's starting model or a run's last checkpoint; the JSON object of `beam-rl eval`."""
    import tempfile

    from beam_rl.cluster import Cluster
    from beam_rl.evaluate import evaluate
    from beam_rl.inputs import prepare
    from beam_rl.verifiers import make_verifier

    checkpoint = last_checkpoint(source) if source.is_dir() else None
    recipe = load(source / "recipe.yaml" if source.is_dir() else source, overrides)
    if recipe.data.eval is None:
        raise InputError("data.eval is missing: name the data set to evaluate on")
    with Console() as console, tempfile.TemporaryDirectory(prefix="beam-rl-") as scratch:
        inputs = prepare(recipe, Path(scratch), console.warm_start)
        with (
            Cluster(recipe, inputs.model_path, Path(scratch), console) as cluster,
            make_verifier(recipe.verifier) as judge,
        ):
            if checkpoint:
                cluster.policy.load(checkpoint.trainer)
            cluster.engines.load(cluster.policy, version=checkpoint.step if checkpoint else 0)
            samples = len(inputs.eval_prompts) * recipe.eval.samples_per_prompt
            with console.phase("evaluating", samples) as advance_to:
                scores = evaluate(inputs.eval_prompts, cluster.engines, judge, inputs.decode, recipe, advance_to)
        return scores.record(inputs.eval_task)


def run_export(checkpoint: Path, out: Path) -> None:
    """Loads a checkpoint into the trainer's layout and writes its weights as an HF folder."""
    import tempfile

    from beam_rl.cluster import ray_session
    from beam_rl.inputs import find_model
    from beam_rl.policy import Policy

    if out.exists():
        raise InputError(f"{out}: exists already; name a new folder")
    saved = open_checkpoint(checkpoint)
    recipe = load(checkpoint.parents[1] / "recipe.yaml")
    with Console() as console, tempfile.TemporaryDirectory(prefix="beam-rl-") as scratch:
        model = find_model(recipe, console.warm_start)
        with ray_session(recipe.cluster.address, Path(scratch)), Policy(recipe, model) as policy:
            with console.phase("exporting"):
                policy.load(saved.trainer)
                policy.export(out)
