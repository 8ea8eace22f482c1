"""What stands between a command and the loop: reads the inputs, opens the run's folder, shows what goes on."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from beam_rl.errors import InputError
from beam_rl.inputs import Inputs, check_start_adapter, prepare, start_adapter
from beam_rl.parity.compare import Comparison
from beam_rl.recipe.load import load, overridden, parse
from beam_rl.recipe.tree import Recipe
from beam_rl.report import Console, Report
from beam_rl.run import Checkpoint, Run, check_folder, checkpoint_at, checkpoints

if TYPE_CHECKING:
    from beam_rl.engines import Engines
    from beam_rl.megatron.settings import ExportForm
    from beam_rl.parity.sources import Gap


def run_training(recipe: Recipe, folder: Path, resume: str | None) -> None:
    """Opens (or resumes) the run in `folder`, trains, and prints where everything lies."""
    from beam_rl.loop import train

    opening = (folder.resolve(), recipe.model_dump(mode="json"), _resume(resume))
    check_folder(*opening)  # before the work of reading the data; what reads them may still refuse, and leave no folder
    with Console(recipe.trainer.steps) as console:
        inputs = prepare(recipe, console)
        if resume in (None, "auto") and not checkpoints(folder):
            check_start_adapter(recipe, inputs.model_path)
        with Run.open(*opening) as run:
            _show_opening(run, inputs, resume, console)
            if run.resumed is None or run.resumed.step < recipe.trainer.steps:
                with Report(console, run, recipe.logging) as report:
                    train(_going_on(inputs.recipe) if run.resumed else inputs.recipe, inputs, run, report)
            console.summary(run)


def _going_on(recipe: Recipe) -> Recipe:
    """For a trainer that loads a checkpoint: the adapter that training once started from is no longer needed."""
    if recipe.model.lora is None:
        return recipe
    lora = recipe.model.lora.model_copy(update={"adapter": None})
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": lora})})


def _show_opening(run: Run, inputs: Inputs, resume: str | None, console: Console) -> None:
    for note in inputs.notes:
        console.note(note)
    if run.set_aside:
        console.note(f"no checkpoint to go on from: starting anew, the earlier steps are in {run.set_aside}")
    elif resume and run.resumed is None:
        console.note(f"{run.folder} holds no run to resume: starting a new one")
    if run.resumed and run.resumed.step >= run.recipe["trainer"]["steps"]:
        console.note(f"step {run.resumed.step} is there: the run is done, and trainer.steps says how far to go on")


def run_evaluation(source: Path, overrides: Iterable[str], k: int | None = None) -> dict[str, Any]:
    """Evaluates a recipe's starting model, an HF folder, or a run's checkpoint; the JSON object of `beam-rl eval`.

    k: of pass@k; default: eval.samples_per_prompt.
    """
    from beam_rl.episodes import make_episodes
    from beam_rl.evaluate import evaluate
    from beam_rl.rollouts import attend, beside
    from beam_rl.verifiers import make_verifier

    recipe, checkpoint = _to_evaluate(source, overrides)
    samples = recipe.eval.samples_per_prompt
    if recipe.data.eval is None:
        raise InputError("data.eval is missing: name the data set to evaluate on")
    if k is not None and not 1 <= k <= samples:
        raise InputError(f"--k {k}: pass@{k} needs as many samples a prompt, and eval.samples_per_prompt = {samples}")
    with contextlib.ExitStack() as stack:
        console = stack.enter_context(Console(0, file=sys.stderr))
        folder = stack.enter_context(scratch())
        alone = checkpoint is None and not start_adapter(recipe) and recipe.rollout_precision != "mxfp8"
        inputs = prepare(recipe, console, trains=not alone)
        recipe = inputs.recipe
        verifier = make_verifier(recipe.verifier)
        stack.callback(verifier.close)
        where = (inputs, folder, console)
        served = _engines_alone(recipe, *where) if alone else _engines_of_trainer(recipe, checkpoint, *where)
        engines, mend = stack.enter_context(served)
        with console.phase("evaluating", len(inputs.eval_prompts) * samples, once=True) as phase:
            engines.episodes = stack.enter_context(make_episodes(recipe.environment, inputs.frame, inputs.decode))
            work = partial(evaluate, inputs.eval_prompts, engines, verifier, inputs.decode, recipe, phase.advance)
            answers = attend(beside(work), mend)
    return answers.summary(k).record(inputs.eval_task)


Served = tuple["Engines", Callable[[], None]]  # and what to do again and again while they sample, for those that die


@contextlib.contextmanager
def _engines_alone(recipe: Recipe, inputs: Inputs, logs: Path, console: Console) -> Iterator[Served]:
    """Engines that have read the model's folder themselves: no trainer is needed where nothing was trained."""
    from beam_rl.cluster import ray_session
    from beam_rl.engines import Engines

    model, rollout = recipe.model, recipe.rollout
    recipe = recipe.model_copy(
        update={
            "model": model.model_copy(update={"lora": None}),
            "rollout": rollout.model_copy(update={"routing_replay": False}),
        }
    )
    slots = rollout.engines * rollout.parallel.workers
    with ray_session(recipe.cluster.address, logs, slots), Engines(recipe, inputs.model_path, logs) as engines:

        def serve_fresh() -> None:
            engines.serve(0, engines.fresh())

        with console.phase("starting engines", once=True):
            engines.serve(0, engines.standing())
        yield engines, serve_fresh


@contextlib.contextmanager
def _engines_of_trainer(
    recipe: Recipe, checkpoint: Checkpoint | None, inputs: Inputs, logs: Path, console: Console
) -> Iterator[Served]:
    """Engines with the weights that a trainer has loaded."""
    from beam_rl.cluster import Cluster

    version = checkpoint.step if checkpoint else 0
    with Cluster(recipe, inputs.model_path, logs, console) as cluster:
        if checkpoint:
            cluster.turns.to_trainer()
            cluster.policy.load(checkpoint.path)
        with cluster.turns.to_engines():
            cluster.sync.bring(version)

        def mend() -> None:
            cluster.policy.check()
            cluster.engines.check()
            if not cluster.turns.shared or (not cluster.engines.serving() and cluster.engines.fresh()):
                with cluster.turns.to_engines():
                    cluster.sync.mend(version)

        yield cluster.engines, mend


def run_parity(source: Path, overrides: Iterable[str]) -> Comparison:
    """Compares trainer, engine and reference on the recipe's starting model; what goes on is shown on stderr."""
    from beam_rl.parity.check import check

    recipe = load(source, overrides)
    with Console(0, file=sys.stderr) as console, scratch() as folder:
        inputs = prepare(recipe, console)
        return check(inputs.recipe, inputs, folder, console)


def run_sources(source: Path, overrides: Iterable[str], others: Sequence[str]) -> "list[Gap]":
    """Where the gap between trainer and engine comes from, on the recipe's starting model."""
    from beam_rl.parity.sources import sources

    recipe = load(source, overrides)
    with Console(0, file=sys.stderr) as console, scratch() as folder:
        inputs = prepare(recipe, console)
        return list(sources(inputs.recipe, inputs, others, folder, console))


def run_export(path: Path, out: Path, form: "ExportForm | None" = None) -> None:
    """Loads a checkpoint into the trainer's layout and writes an HF folder.

    form: default: the adapter where the run trains one, else all weights.
    """
    from beam_rl.cluster import ray_session  # before Ray, which reads the environment that it sets
    from beam_rl.inputs import find_model
    from beam_rl.policy import Policy

    path, out = path.resolve(), out.resolve()
    if out.exists():
        raise InputError(f"{out}: exists already; name a new folder")
    checkpoint = checkpoint_at(path)
    recipe = _going_on(load(checkpoint.path.parents[1] / "recipe.yaml"))
    chosen = _export_form(form, recipe)
    with Console(0, file=sys.stderr) as console, scratch() as logs:
        model = find_model(recipe, console)
        with ray_session(recipe.cluster.address, logs), Policy(recipe, model, logs) as policy:
            with console.phase("starting the trainer", once=True):
                policy.wait_ready()
            with console.phase("exporting", once=True):
                policy.load(checkpoint.path)
                policy.export(out, chosen)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for caches and logs that nobody will ask for."""
    with tempfile.TemporaryDirectory(prefix="beam-rl-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _export_form(asked: "ExportForm | None", recipe: Recipe) -> "ExportForm":
    if recipe.model.lora is None:
        if asked in ("adapter", "merged"):
            raise InputError(f"--{asked}: this run trains all weights (it has no model.lora); use --full")
        if asked == "mxfp8" and recipe.rollout_precision != "mxfp8":
            raise InputError(
                "--mxfp8: neither trainer.precision nor rollout.precision of this run is mxfp8; use --full"
            )
        return asked or "full"
    if asked in ("full", "mxfp8"):
        raise InputError(f"--{asked}: this run trains an adapter (it has model.lora); use --adapter or --merged")
    return asked or "adapter"


def _resume(option: str | None) -> Literal["auto"] | Path | None:
    return "auto" if option == "auto" else Path(option).resolve() if option else None


def _to_evaluate(source: Path, overrides: Iterable[str]) -> tuple[Recipe, Checkpoint | None]:
    if not source.is_dir():
        return load(source, overrides), None
    if (source / "config.json").exists():
        return _recipe_for_model(source, overrides), None
    checkpoint = checkpoint_at(source.resolve())
    return _going_on(load(checkpoint.path.parents[1] / "recipe.yaml", overrides)), checkpoint


def _recipe_for_model(folder: Path, overrides: Iterable[str]) -> Recipe:
    """A recipe's defaults for an HF folder: in FP32 if its weights are, its data set from the overrides."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / 'config.json'}: can't be read: {error}") from None
    precision = "fp32" if str(config.get("dtype", config.get("torch_dtype"))).endswith("float32") else "bf16"
    tree: dict[str, Any] = {"name": "eval", "model": {"path": str(folder)}, "trainer": {"precision": precision}}
    tree = overridden(tree, overrides)
    data = tree.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("eval"), dict):
        raise InputError(
            f"{folder} is a model: name the data set to evaluate it on, as in data.eval.path=FILE verifier.name=math"
        )
    data.setdefault("train", {key: value for key, value in data["eval"].items() if key != "task"})
    return parse(tree)
