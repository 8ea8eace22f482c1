"""What the report says in words and numbers: a run's headline, its key figures, and how runs differ. Draws nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import yaml

from beam_rl.errors import InputError
from beam_rl.report.history import History
from beam_rl.report.metric_names import format_bytes, format_seconds
from beam_rl.report.series import Gain, Rows, eval_tasks, mean, paired_gain, series
from beam_rl.run import Json, flat

LAST = 10  # steps that a figure at the end is averaged over
MOST_EVALUATIONS = 12  # rows of the table


@dataclass(frozen=True)
class Tile:
    name: str
    value: str
    note: str = ""


def standing(run: History) -> str:
    """Where the run stands: "step 20 of 50, training"."""
    steps = run.key("trainer.steps")
    of = f" of {steps}" if steps is not None else ""
    return f"step {run.step}{of}, {run.standing}"


def what_was_run(run: History) -> str:
    """One line: model, what is trained, algorithm, pace, batch, seed."""
    if not run.recipe:
        return ""
    rank = run.key("model.lora.rank")
    parts = [
        f"model {run.key('model.path')}",
        f"LoRA of rank {rank}" if rank else "all weights",
        str(run.key("trainer.precision")),
        f"{run.key('algorithm.advantage')} with {run.key('algorithm.loss')}",
        str(run.key("rollout.pace")).replace("_", " "),
        f"{run.key('rollout.prompts_per_step')} prompts × {run.key('rollout.samples_per_prompt')} samples a step",
        f"seed {run.key('seed')}",
    ]
    return " · ".join(parts)


def headline(run: History) -> str:
    """What came out so far: the evaluation's rise with its interval, else the reward's."""
    found = gain(run)
    if found:
        task, k, first, last = first_and_last(run)
        return f"{task} avg@{k}: {first:.1%} → {last:.1%}, {gain_text(found)}"
    reward = series(run.rows, "reward/mean").values
    if len(reward) > 1:
        return f"mean reward: {reward[0]:.3g} → {mean(reward[-LAST:]):.3g} (the last {min(LAST, len(reward))} steps)"
    return ""


def first_and_last(run: History) -> tuple[str, str, float, float]:
    """(task, k, avg@k of the first evaluation, of the last) of the run's first task."""
    task, k = eval_tasks(run.rows)[0]
    values = series(run.rows, f"eval/{task}/avg@{k}").values
    return task, k, values[0], values[-1]


def gain(run: History) -> Gain | None:
    """From the first evaluation to the last: paired by prompt where the run has kept the prompts' scores."""
    if not eval_tasks(run.rows):
        return None
    task, k = eval_tasks(run.rows)[0]
    line = series(run.rows, f"eval/{task}/avg@{k}")
    if len(line.steps) < 2:
        return None
    first, last = (run.evaluations.get(int(line.steps[i]), []) for i in (0, -1))
    paired = paired_gain(_prompt_means(first), _prompt_means(last))
    return paired or Gain(line.values[-1] - line.values[0])


def gain_text(found: Gain) -> str:
    """In points: "+41.3 points (95 % interval +37.0 to +45.5)"."""
    text = f"{100 * found.value:+.1f} points"
    if found.low is None or found.high is None:
        return text
    return f"{text} (95 % interval {100 * found.low:+.1f} to {100 * found.high:+.1f})"


def tiles(run: History) -> list[Tile]:
    """The key figures that the run has."""
    rows, shown = run.rows, []
    for task, k in eval_tasks(rows):
        line = series(rows, f"eval/{task}/avg@{k}", low=f"eval/{task}/low@{k}", high=f"eval/{task}/high@{k}")
        known = line.low[-1] == line.low[-1]
        between = f"{line.low[-1]:.1%} to {line.high[-1]:.1%}, " if known else ""
        shown.append(Tile(f"{task} avg@{k}", f"{line.values[-1]:.1%}", f"{between}step {line.steps[-1]:.0f}"))
    shown += _last_mean("reward", rows, "reward/mean", lambda v: f"{v:.3g}")
    gap = series(rows, "parity/abs_logprob_diff_mean").values
    if gap:
        bound = parity_bound(run)
        note = f"largest mean of any step{f'; bound {bound:g}' if bound else ''}"
        shown.append(Tile("|Δ log p|", f"{max(gap):.1e}", note))
    shown += _last_mean("step", run.trained, "time/step_s", format_seconds)
    shown += _last_mean("tokens/s sampled", rows, "rollout/tokens_per_s", lambda v: f"{v:,.0f}")
    for name, key in (("GPU memory", "memory/gpu_peak_bytes"), ("host memory", "memory/host_peak_bytes")):
        peak = max(series(rows, key).values, default=0.0)
        if peak:
            shown.append(Tile(name, format_bytes(peak), "peak of a trainer rank"))
    if run.checkpoint:
        shown.append(Tile("checkpoint", run.checkpoint.rsplit("/", 1)[-1], "the last complete one"))
    return shown


def idle_sentence(run: History) -> str:
    """How much of the time the trainer had nothing to do."""
    timed = [row for row in run.trained if "time/idle_s" in row and "time/step_s" in row]
    whole = sum(row["time/step_s"] for row in timed)
    if not whole:
        return ""
    return f"The trainer had nothing to do for {sum(row['time/idle_s'] for row in timed) / whole:.0%} of the time."


def evaluations(run: History) -> list[list[str]]:
    """A row an evaluation: step, task, avg@k, interval, pass@k."""
    table = []
    for task, k in eval_tasks(run.rows):
        rows = [row for row in run.rows if f"eval/{task}/avg@{k}" in row]
        for row in rows[:: max(1, -(-len(rows) // MOST_EVALUATIONS))]:
            low, high = row.get(f"eval/{task}/low@{k}"), row.get(f"eval/{task}/high@{k}")
            between = "–" if low is None or high is None else f"{low:.1%} to {high:.1%}"
            passed = row.get(f"eval/{task}/pass@{k}")
            scores = [f"{row[f'eval/{task}/avg@{k}']:.1%}", between, "–" if passed is None else f"{passed:.1%}"]
            table.append([str(row["step"]), task, *scores])
    return table


def comparison(runs: Sequence[History]) -> list[list[str]]:
    """A row a figure, a column a run."""
    table = [["where it stands", *(standing(run) for run in runs)]]
    tasks = dict.fromkeys(pair for run in runs for pair in eval_tasks(run.rows)[:1])
    for task, k in tasks:
        name = f"eval/{task}/avg@{k}"
        lines = [series(run.rows, name).values for run in runs]
        table.append([f"{task} avg@{k}", *(f"{v[0]:.1%} → {v[-1]:.1%}" if v else "–" for v in lines)])
    gains = [gain(run) for run in runs]
    table.append(["gain", *(gain_text(found) if found else "–" for found in gains)])
    figures = [
        (f"reward, last {LAST} steps", "reward/mean", lambda v: f"{mean(v[-LAST:]):.3g}"),
        ("|Δ log p|, largest mean", "parity/abs_logprob_diff_mean", lambda v: f"{max(v):.1e}"),
        ("seconds a step", "time/step_s", lambda v: format_seconds(mean(v))),
        ("tokens/s sampled", "rollout/tokens_per_s", lambda v: f"{mean(v):,.0f}"),
        ("TFLOP/s of a rank's updates", "optim/tflops", lambda v: f"{mean(v):.3g}"),
        ("GPU memory, peak", "memory/gpu_peak_bytes", lambda v: format_bytes(max(v))),
        ("host memory, peak", "memory/host_peak_bytes", lambda v: format_bytes(max(v))),
    ]
    for title, key, text in figures:
        columns = [series(run.trained, key).values for run in runs]
        if any(columns):
            table.append([title, *(text(values) if values else "–" for values in columns)])
    return table


def differing_keys(runs: Sequence[History]) -> list[list[str]]:
    """A row a recipe key whose value is not the same in all runs."""
    recipes = [flat(run.recipe) for run in runs]
    keys = sorted(set().union(*recipes))
    return [
        [key, *(str(recipe.get(key, "–")) for recipe in recipes)]
        for key in keys
        if len({repr(recipe.get(key)) for recipe in recipes}) > 1
    ]


def parity_bound(run: History) -> float | None:
    """What the recipe allows the mean |Δ log p| to be; None where the recipe is not one of this version."""
    from beam_rl.parity.check import logprob_mean_bound
    from beam_rl.recipe.load import parse

    try:
        return logprob_mean_bound(parse(run.recipe))
    except InputError:
        return None


def as_yaml(run: History) -> str:
    return yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)


def _prompt_means(rows: Sequence[Json]) -> dict[int, float]:
    return {row["row"]: mean(row["scores"]) for row in rows if row.get("scores") and "row" in row}


def _last_mean(name: str, rows: Rows, key: str, text: Callable[[float], str]) -> list[Tile]:
    values = series(rows, key).values[-LAST:]
    if not values:
        return []
    return [Tile(name, text(mean(values)), f"mean of the last {len(values)} steps" if len(values) > 1 else "")]
