"""Does the gap between trainer and engine grow over a run? Prints one JSON line a run.

    python benchmarks/gap_slope.py runs/tiny_cpu ...

The gap is `parity/abs_logprob_diff_mean`. It falls with the policy's entropy (a token that is nearly certain leaves little
to differ in), so beside the slope over the steps there is the slope at a given entropy, from the least-squares fit
gap = a + b · entropy + c · step. Each comes with its standard error and with `growth`: what the slope adds over the whole
run, as a share of the mean gap.
"""

import json
import sys
from pathlib import Path

import numpy as np


def slope(gap: np.ndarray, step: np.ndarray, *beside: np.ndarray) -> dict[str, float]:
    """Of `gap` over `step`, the variables `beside` held fixed; all are (steps,)."""
    x = np.stack([np.ones_like(gap), *(v - v.mean() for v in (step, *beside))], 1)
    fit, *_ = np.linalg.lstsq(x, gap)
    rest = gap - x @ fit
    error = (np.linalg.inv(x.T @ x)[1, 1] * (rest @ rest) / (len(gap) - x.shape[1])) ** 0.5
    figures = {"slope": fit[1], "error": error, "growth": fit[1] * (step[-1] - step[0]) / gap.mean()}
    return {name: float(f"{figure:.2g}") for name, figure in figures.items()}


def of_run(run: Path) -> dict[str, object]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss/entropy" in row]
    step, gap, entropy = (
        np.array([row[name] for row in rows], float)
        for name in ("step", "parity/abs_logprob_diff_mean", "loss/entropy")
    )
    return {
        "run": run.name,
        "mean gap": float(f"{gap.mean():.2g}"),
        "over the steps": slope(gap, step),
        "at a given entropy": slope(gap, step, entropy),
    }


if __name__ == "__main__":
    for run in sys.argv[1:]:
        print(json.dumps(of_run(Path(run))))
