"""What a run's folder tells of the run: its steps, evaluations, samples and recipe, as plain data.

Reads what is there and says in a sentence what is not: a folder that was copied in part, or whose last line was cut off
by a kill, still gives a report. Writes nothing; computes and draws nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from beam_rl.errors import InputError
from beam_rl.run import Json, checkpoints, in_use, saved_steps

SAMPLED_STEPS = 6  # of which samples are read: the first, the last, and some between
Standing = Literal["training", "done", "stopped"]


@dataclass(frozen=True)
class History:
    folder: Path
    name: str
    recipe: Json  # as recipe.yaml holds it; {} where there is none
    rows: list[Json]  # metrics.jsonl, by step
    standing: Standing
    samples: dict[int, list[Json]] = field(default_factory=dict)  # step → responses that were trained on
    evaluations: dict[int, list[Json]] = field(default_factory=dict)  # step → held-out prompts with their scores
    checkpoint: str | None = None  # the last complete one
    gaps: list[str] = field(default_factory=list)  # what is missing or broken, a sentence each

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def trained(self) -> list[Json]:
        """The steps without step 0, in which nothing is trained."""
        return [row for row in self.rows if row["step"] > 0]

    def key(self, dotted: str) -> Any:
        """The recipe's value, None where the recipe does not have it."""
        value: Any = self.recipe
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read_history(folder: Path, ended: bool = False) -> History:
    """Reads a run's folder.

    Args:
        ended: the process that has the folder is about to let go of it.
    Raises:
        InputError: there is no run.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name a run's, such as runs/tiny_cpu")
    if not any((folder / name).exists() for name in ("recipe.yaml", "metrics.jsonl")):
        raise InputError(f"{folder}: holds no run (neither recipe.yaml nor metrics.jsonl)")
    gaps: list[str] = []
    recipe = _read_recipe(folder / "recipe.yaml", gaps)
    rows = _read_rows(folder / "metrics.jsonl", gaps)
    samples = _read_steps(folder / "samples", gaps)
    evaluations = _read_steps(folder / "samples" / "eval", gaps)
    if not rows:
        gaps.append("No step is reported yet.")
    saved = checkpoints(folder)
    wanted = recipe.get("trainer", {}).get("steps") if isinstance(recipe.get("trainer"), dict) else None
    done = bool(rows) and wanted is not None and rows[-1]["step"] >= wanted
    standing: Standing = "done" if done else "training" if in_use(folder) and not ended else "stopped"
    last = str(saved[-1].path) if saved else None
    name = str(recipe.get("name") or folder.resolve().name)
    return History(folder, name, recipe, rows, standing, samples, evaluations, last, gaps)


def told_apart(runs: Sequence[History]) -> list[History]:
    """The same with names of their own: their folders', where their recipes' are alike."""
    for name in (lambda run: run.name, lambda run: run.folder.resolve().name, lambda run: str(run.folder)):
        names = [name(run) for run in runs]
        if len(set(names)) == len(runs):
            break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def evenly(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of them, the first and the last among them, the others evenly between."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _read_recipe(file: Path, gaps: list[str]) -> Json:
    try:
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        gaps.append("recipe.yaml is missing, so neither settings nor bounds are shown.")
    except (OSError, ValueError, yaml.YAMLError) as error:
        gaps.append(f"recipe.yaml can't be read ({str(error).splitlines()[0]}), so settings and bounds are not shown.")
    else:
        if isinstance(recipe, dict):
            return recipe
        gaps.append("recipe.yaml holds no recipe, so neither settings nor bounds are shown.")
    return {}


def _read_rows(file: Path, gaps: list[str]) -> list[Json]:
    """The steps in order; of a step that is there twice the later line counts."""
    rows = {row["step"]: row for row in _read_lines(file, gaps) if isinstance(row.get("step"), int)}
    return [rows[step] for step in sorted(rows)]


def _read_steps(folder: Path, gaps: list[str]) -> dict[int, list[Json]]:
    """The rows of some steps' files."""
    steps = saved_steps(folder)
    read = {step: _read_lines(folder / f"step_{step}.jsonl", gaps) for step in evenly(steps, SAMPLED_STEPS)}
    return {step: rows for step, rows in read.items() if rows}


def _read_lines(file: Path, gaps: list[str]) -> list[Json]:
    """A file's JSON objects, one a line. What is not one is left out, and said."""
    try:
        lines = (
            file.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
        )  # a text may hold others
    except FileNotFoundError:
        gaps.append(f"{file.name} is missing.")
        return []
    except OSError as error:
        gaps.append(f"{file.name} can't be read ({error.strerror}).")
        return []
    found, broken = [], []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            found.append(row)
        else:
            broken.append(number)
    if broken == [len(lines)]:
        gaps.append(f"The last line of {file.name} is cut off and left out.")
    elif broken:
        gaps.append(f"{len(broken)} lines of {file.name} are not JSON and left out, the first is line {broken[0]}.")
    return found
