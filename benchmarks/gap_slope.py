"""Does the gap between trainer and engine grow over a run? Prints one JSON line a run.

    python benchmarks/gap_slope.py runs/tiny_cpu ...

The gap is `parity/abs_logprob_diff_mean`. A policy that grows surer rounds less (the error of log p is about 1 − p times
that of the logits), so the gap is also given as a share of the step's mean entropy. Slopes are least squares over the
steps, with their standard error; `growth` is what the slope adds over the whole run, as a share of the mean.
"""

import json
import sys
from pathlib import Path

import numpy as np


def slope(steps: np.ndarray, values: np.ndarray) -> dict[str, float]:
    """Least-squares slope per step of `values` (steps,), and its standard error."""
    (slope, _), covariance = np.polyfit(steps, values, 1, cov=True)
    growth = slope * (steps[-1] - steps[0]) / values.mean()
    figures = {"mean": values.mean(), "slope": slope, "error": covariance[0, 0] ** 0.5, "growth": growth}
    return {name: float(f"{figure:.3g}") for name, figure in figures.items()}


def of_run(run: Path) -> dict[str, object]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss/entropy" in row]
    steps, gap, entropy = (
        np.array([row[name] for row in rows]) for name in ("step", "parity/abs_logprob_diff_mean", "loss/entropy")
    )
    return {"run": run.name, "steps": len(rows), "gap": slope(steps, gap), "gap / entropy": slope(steps, gap / entropy)}


if __name__ == "__main__":
    for run in sys.argv[1:]:
        print(json.dumps(of_run(Path(run))))
