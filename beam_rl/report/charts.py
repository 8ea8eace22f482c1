"""Charts as HTML: an SVG that stretches with the page, its labels as text beside it, so both are sharp at every width.

Takes computed series; knows nothing about runs. All text that comes in is escaped here.
"""

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from beam_rl.report.series import Series, decades, thinned, ticks

MOST_POINTS = 300  # of a line; a chart is some 500 pixels wide
SIDE = 1000  # of the SVG's own square, which is stretched to the plot
Format = Callable[[float], str]
Scale = Callable[[float], float]  # a value to the SVG's own unit


@dataclass(frozen=True)
class Line:
    series: Series
    color: int  # of the palette in page.css, from 1
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """The vertical axis: its ends, its ticks, and how a value is written."""

    low: float
    high: float
    ticks: list[float]
    label: Format
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value stands: 0 at the bottom, 1 at the top; beyond the ends at the end."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return min(1.0, max(0.0, (at - low) / (high - low)))


def line_chart(
    title: str,
    lines: Sequence[Line],
    label: Format,
    log: bool = False,
    bound: float | None = None,
    zero: bool = False,
    most: float = math.inf,
    note: str = "",
) -> str:
    """Lines over steps with the bands of their intervals; nothing where no line has a point.

    Args:
        log: a logarithmic axis; values of 0 stand at its lower end.
        bound: a horizontal line at what must not be exceeded.
        zero: the axis starts at 0.
        most: the axis ends there, at the latest.
    """
    lines = [replace(line, series=thinned(line.series, MOST_POINTS)) for line in lines if line.series]
    if not lines:
        return ""
    axis = _axis(lines, label, log, bound, zero, most)
    first = min(line.series.steps[0] for line in lines)
    last = max(line.series.steps[-1] for line in lines)
    span = (last - first) or 1.0

    def x(step: float) -> float:
        return (step - first) / span * SIDE

    def y(value: float) -> float:
        return (1 - axis.share(value)) * SIDE

    shapes = [f'<path class="grid" d="M0 {y(tick):.1f}H{SIDE}"/>' for tick in axis.ticks]
    shapes += [_band(line, x, y) for line in lines]
    if bound is not None:
        shapes.append(f'<path class="bound" d="M0 {y(bound):.1f}H{SIDE}"/>')
    shapes += [_stroke(line, x, y) for line in lines]
    entries = [(line.series.name, f"c{line.color}{' dashed' if line.dashed else ''}") for line in lines]
    if bound is not None:
        entries.append((f"bound of the mean, {label(bound)}", "bound"))
    steps = [tick for tick in ticks(first, last, 5) if tick == int(tick)]
    return figure(
        title,
        "".join(shapes),
        y_labels=[(axis.share(tick), axis.label(tick)) for tick in axis.ticks],
        x_labels=[((step - first) / span, f"{step:,.0f}") for step in steps],
        legend=entries if len(entries) > 1 else [],
        readout=_readout(lines, label, first, span),
        note=note,
    )


def bar_chart(
    title: str, bars: Sequence[tuple[str, Sequence[float]]], parts: Sequence[tuple[str, int, str]], label: Format
) -> str:
    """Stacked bars.

    Args:
        bars: a bar's name and the height of each part.
        parts: each part's name, colour, and what the legend says of it.
    """
    top = max((sum(heights) for _, heights in bars), default=0.0)
    if not top:
        return ""
    marks, width = ticks(0, top), SIDE / len(bars)
    gap = 0.0 if len(bars) > 60 else 0.14 * width
    shapes = [f'<path class="grid" d="M0 {(1 - tick / top) * SIDE:.1f}H{SIDE}"/>' for tick in marks]
    for i, (_, heights) in enumerate(bars):
        base = 0.0
        for (_, color, _), height in zip(parts, heights, strict=True):
            if height > 0:
                y, h = (1 - (base + height) / top) * SIDE, height / top * SIDE
                left = i * width + gap / 2
                shapes.append(
                    f'<rect class="c{color}" x="{left:.1f}" y="{y:.1f}" width="{width - gap:.1f}" height="{h:.1f}"/>'
                )
            base += height
    shown = [i for i in range(len(bars)) if i % max(1, -(-len(bars) // 6)) == 0]
    readout = {
        "at": [round((i + 0.5) / len(bars), 4) for i in range(len(bars))],
        "names": [f"step {name}" for name, _ in bars],
        "lines": [
            {
                "name": name,
                "class": f"c{color}",
                "values": [label(heights[p]) if heights[p] else "" for _, heights in bars],
            }
            for p, (name, color, _) in enumerate(parts)
        ],
    }
    return figure(
        title,
        "".join(shapes),
        y_labels=[(tick / top, label(tick)) for tick in marks],
        x_labels=[((i + 0.5) / len(bars), bars[i][0]) for i in shown],
        legend=[(f"{name} {said}", f"c{color}") for name, color, said in parts],
        readout=readout,
    )


def figure(
    title: str,
    shapes: str,
    y_labels: Sequence[tuple[float, str]],
    x_labels: Sequence[tuple[float, str]],
    legend: Sequence[tuple[str, str]],
    readout: object,
    note: str = "",
) -> str:
    """A titled plot. Labels come with their place, 0 to 1 from the left or the bottom; `readout` is for page.js."""
    keys = "".join(f'<span><i class="{style}"></i>{html.escape(name)}</span>' for name, style in legend)
    ys = "".join(f'<b style="bottom:{100 * at:.2f}%">{html.escape(text)}</b>' for at, text in y_labels)
    xs = "".join(f'<u style="left:{100 * at:.2f}%">{html.escape(text)}</u>' for at, text in x_labels)
    data = html.escape(json.dumps(readout, ensure_ascii=False, separators=(",", ":")))
    return (
        f"<figure><figcaption><h3>{html.escape(title)}</h3>"
        f"{f'<p>{html.escape(note)}</p>' if note else ''}"
        f"{f'<div class=legend>{keys}</div>' if keys else ''}</figcaption>"
        f'<div class="plot" data-readout="{data}">'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img" aria-label="{html.escape(title)}">'
        f"{shapes}</svg>{ys}{xs}</div></figure>"
    )


def _axis(lines: Sequence[Line], label: Format, log: bool, bound: float | None, zero: bool, most: float) -> Axis:
    values = [v for line in lines for column in (line.series.values, line.series.low, line.series.high) for v in column]
    values = [v for v in values if not math.isnan(v)] + ([] if bound is None else [bound])
    if log:
        positive = [v for v in values if v > 0] or [1.0]
        low = 10.0 ** math.floor(math.log10(min(positive)) - 0.05)
        high = 10.0 ** math.ceil(math.log10(max(positive)) + 0.05)
        return Axis(low, high, decades(low, high), label, log=True)
    low, high = min(values), max(values)
    if zero:
        low = min(0.0, low)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (low if zero and low == 0 else low - room), min(high + room, max(high, most))
    return Axis(low, high, ticks(low, high), label)


def _band(line: Line, x: Scale, y: Scale) -> str:
    """The area between the ends of the intervals."""
    s = line.series
    known = [i for i in range(len(s.steps)) if not (math.isnan(s.low[i]) or math.isnan(s.high[i]))]
    if len(known) < 2:
        return ""
    upper = [f"{x(s.steps[i]):.1f} {y(s.high[i]):.1f}" for i in known]
    lower = [f"{x(s.steps[i]):.1f} {y(s.low[i]):.1f}" for i in reversed(known)]
    return f'<path class="band c{line.color}" d="M{"L".join(upper + lower)}Z"/>'


def _stroke(line: Line, x: Scale, y: Scale) -> str:
    """The line, with a dot at each point where there are few."""
    s = line.series
    points = [f"{x(step):.1f} {y(value):.1f}" for step, value in zip(s.steps, s.values, strict=True)]
    style = f"c{line.color}{' dashed' if line.dashed else ''}"
    path = f'<path class="line {style}" d="M{"L".join(points)}"/>'
    if len(points) > 12:
        return path
    return path + f'<path class="dots c{line.color}" d="{"".join(f"M{point}h0" for point in points)}"/>'


def _readout(lines: Sequence[Line], label: Format, first: float, span: float) -> object:
    """What page.js shows of the step under the pointer."""
    steps = sorted({step for line in lines for step in line.series.steps})
    shown = []
    for line in lines:
        s, at = line.series, {step: i for i, step in enumerate(line.series.steps)}
        values = [_with_interval(s, at[step], label) if step in at else "" for step in steps]
        shown.append({"name": s.name, "class": f"c{line.color}", "values": values})
    return {
        "at": [round((step - first) / span, 4) for step in steps],
        "names": [f"step {step:,.0f}" for step in steps],
        "lines": shown,
    }


def _with_interval(s: Series, i: int, label: Format) -> str:
    if math.isnan(s.low[i]):
        return label(s.values[i])
    return f"{label(s.values[i])} ({label(s.low[i])} to {label(s.high[i])})"
