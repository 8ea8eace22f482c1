"""What the report draws, computed: series over steps, their intervals, where the time went. Plain numbers in and out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Rows = Sequence[Mapping[str, float]]
Z95 = 1.96  # standard errors to each side of a mean
NAN = math.nan

# The parts of a step that follow each other in the loop and the metrics that they are made of; `other` is the step's
# rest, and `save` stands between two steps.
TIME_PARTS = {
    "generate": ("time/generate_s",),
    "verify": ("time/verify_s",),
    "score": ("time/score_s",),
    "update": ("time/update_s",),
    "sync": ("time/sync_s",),
    "hand over": ("time/hold_s", "time/turn_s"),
    "evaluate": ("time/eval_s",),
    "other": (),
    "save": ("time/save_s",),
}


@dataclass(frozen=True)
class Series:
    """One line: `low` and `high` are the ends of a 95 % interval, NaN where there is none."""

    name: str
    steps: list[float]
    values: list[float]
    low: list[float]
    high: list[float]

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True)
class Gain:
    """A difference of two means over the same prompts, with its 95 % interval where there is one."""

    value: float
    low: float | None = None
    high: float | None = None


def series(rows: Rows, metric: str, name: str = "", low: str = "", high: str = "", error: str = "") -> Series:
    """A metric over the steps that have it.

    Args:
        low, high: metrics that hold the ends of its interval.
        error: or the metric that holds its standard error.
    """
    found = [row for row in rows if _number(row.get(metric))]
    steps, values = [float(row["step"]) for row in found], [float(row[metric]) for row in found]
    half = [Z95 * row[error] if _number(row.get(error)) else NAN for row in found]

    def ends(key: str, sign: int) -> list[float]:
        given = [float(row[key]) if _number(row.get(key)) else NAN for row in found]
        return [v + sign * h if math.isnan(g) else g for g, v, h in zip(given, values, half, strict=True)]

    return Series(name or metric, steps, values, ends(low, -1), ends(high, 1))


def thinned(line: Series, most: int) -> Series:
    """At most so many points: means of neighbours, the ends of whose intervals are averaged too."""
    if len(line.steps) <= most:
        return line
    parts = bins(len(line.steps), most)
    columns = (line.steps, line.values, line.low, line.high)
    return Series(line.name, *([mean(column[a:b]) for a, b in parts] for column in columns))


def bins(count: int, most: int) -> list[tuple[int, int]]:
    """Splits range(count) into at most `most` neighbouring parts, as even as can be; their (first, end)."""
    parts = min(count, most)
    return [(i * count // parts, (i + 1) * count // parts) for i in range(parts)]


def mean(values: Sequence[float]) -> float:
    """Of those that are numbers; NaN where none is."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else NAN


def time_parts(row: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step by TIME_PARTS; their sum is the step's time and what saving took before it."""
    parts = {name: sum(float(row.get(key, 0.0)) for key in keys) for name, keys in TIME_PARTS.items()}
    inside = sum(parts.values()) - parts["save"]
    return parts | {"other": max(0.0, float(row.get("time/step_s", inside)) - inside)}


def time_bars(rows: Rows, most: int) -> list[tuple[int, int, dict[str, float]]]:
    """(first step, last step, mean seconds a step by part), at most so many, neighbours averaged. Step 0 trains nothing."""
    timed = [row for row in rows if row["step"] > 0 and "time/step_s" in row]
    bars = []
    for a, b in bins(len(timed), most):
        parts = [time_parts(row) for row in timed[a:b]]
        means = {name: mean([part[name] for part in parts]) for name in TIME_PARTS}
        bars.append((int(timed[a]["step"]), int(timed[b - 1]["step"]), means))
    return bars


def eval_tasks(rows: Rows) -> list[tuple[str, str]]:
    """(task, k) of every evaluation in the rows, in their order."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("eval/") and "/avg@" in name)
    return [(name.split("/")[1], name.split("@")[1]) for name in names]


def paired_gain(first: Mapping[int, float], last: Mapping[int, float]) -> Gain | None:
    """How much the mean score rose on the prompts that both have; None where there is no such prompt.

    The interval is mean ± 1.96 standard errors of the prompts' own differences: what makes a prompt hard is in both
    scores and drops out, so it is narrower than that of two unrelated means (arXiv:2411.00640, section 4).

    Args:
        first, last: a prompt's row in its data set → its mean score.
    """
    rises = [last[row] - first[row] for row in first.keys() & last.keys()]
    if not rises:
        return None
    centre = mean(rises)
    if len(rises) < 2:
        return Gain(centre)
    variance = sum((rise - centre) ** 2 for rise in rises) / (len(rises) - 1)
    half = Z95 * math.sqrt(variance / len(rises))
    return Gain(centre, centre - half, centre + half)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from within [low, high], about so many."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float, most: int = 5) -> list[float]:
    """Powers of ten from within [low, high], at most about so many."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, -(-(last - first + 1) // most))
    return [10.0**e for e in range(first, last + 1, stride)]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
