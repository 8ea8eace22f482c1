"""What a person sees while a run goes on: a live line with the phase, a row a step, a summary at the end.

On a terminal the live line moves below the rows; into a file or a pipe go the rows alone, without control codes. Takes
numbers under the names of `metric_names`; knows nothing about where they come from.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

import rich.console
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from beam_rl.report.metric_names import check_names, format_seconds, format_value, metric
from beam_rl.run import Run, read_metrics

PLAIN_WIDTH = 100  # columns where there is no terminal to ask
ROWS_BETWEEN_HEADERS = 25

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Column:
    title: str
    width: int  # the gap to its left included
    cell: Callable[[Metrics], str]  # empty where the step has no such number
    style: str = ""


@dataclass
class Phase:
    """What is going on; whoever runs it counts `done` up."""

    name: str
    total: int | None
    started: float
    once: bool  # not a part of a step
    done: int = 0

    def advance(self, count: int = 1) -> None:
        self.done += count

    def __str__(self) -> str:
        counts = "" if self.total is None else f" {self.done}/{self.total}"
        return f"{self.name}{counts}"


class Console:
    """The terminal of one run; a context manager, so that the cursor comes back whatever happens."""

    def __init__(self, steps: int, file: TextIO | None = None) -> None:
        """
        Args:
            steps: how many the run will have done at its end.
            file: default stdout.
        """
        self._console = rich.console.Console(file=file, highlight=False)
        if not self._console.is_terminal:
            self._console.width = PLAIN_WIDTH
        self._steps = steps
        self._step = 0  # done so far
        self._rows = 0
        self._phases: list[Phase] = []
        self._spinner = Spinner("dots" if self._unicode else "line", style="cyan")
        self._live = Live(get_renderable=self._status, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Console":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    @contextmanager
    def phase(self, name: str, total: int | None = None, once: bool = False) -> Iterator[Phase]:
        """Names what is going on: "sampling", with 256 to do.

        Args:
            once: not a part of a step, like starting the engines: it leaves a line with its seconds.
        """
        phase = Phase(name, total, time.monotonic(), once)
        self._phases.append(phase)
        if once and not self._console.is_terminal:
            self._print(Text(f"{name} …"))
        try:
            yield phase
        finally:
            self._phases.remove(phase)
        if once:
            self._print(Text(f"{phase}: {format_seconds(time.monotonic() - phase.started)}", style="dim"))

    def step(self, step: int, metrics: Metrics) -> None:
        """One row. Raises UnknownMetric for a name that is not listed."""
        check_names(metrics)
        first = 2 * len(str(self._steps)) + 3  # "12/50" and a gap, also on the left
        columns = _fitting(self._console.width - first)
        if self._rows % ROWS_BETWEEN_HEADERS == 0:
            self._print(Text("step".rjust(first) + "".join(c.title.rjust(c.width) for c in columns), style="bold"))
        self._rows += 1
        row = Text(f"{step}/{self._steps}".rjust(first))
        for column in columns:
            row.append(column.cell(metrics).rjust(column.width), style=column.style)
        row.rstrip()
        self._print(row)
        self._step = step

    def resume(self, step: int) -> None:
        """The run goes on after `step`; for the live line."""
        self._step = step

    def note(self, line: str) -> None:
        self._print(Text(line))

    def warn(self, line: str) -> None:
        self._print(Text(f"warning: {line}", style="yellow"))

    def summary(self, run: Run) -> None:
        """Where everything lies and what came out: a panel, or plain lines where there is no terminal."""
        facts = summary_facts(run)
        width = max(len(name) for name, _ in facts)
        if not self._console.is_terminal:
            for name, value in facts:
                self._print(Text(f"{name.ljust(width)}  {value}"))
            return
        table = Table.grid(padding=(0, 2))
        for name, value in facts:
            table.add_row(Text(name, style="dim"), Text(value))
        self._console.print(Panel(table, title=str(run.recipe.get("name", "")), title_align="left", expand=False))

    @property
    def _unicode(self) -> bool:
        return self._console.encoding.lower().startswith("utf")

    def _print(self, text: Text) -> None:
        if not self._unicode:
            text = Text(_ascii(text.plain), style=text.style)
        self._console.print(text, soft_wrap=True)

    def _status(self) -> Any:
        if not self._phases:
            return Text("")
        phase = self._phases[-1]
        seconds = time.monotonic() - phase.started
        step = "" if phase.once else f"step {min(self._step + 1, self._steps)}/{self._steps} · "
        line = f"{step}{phase} · {seconds:.0f} s"
        self._spinner.update(text=Text(line if self._unicode else _ascii(line)))
        return self._spinner


def _fitting(width: int) -> list[Column]:
    """The columns that fit: the parts of the step, on the right, go first."""
    fitting: list[Column] = []
    for column in COLUMNS:
        width -= column.width
        if width < 0:
            break
        fitting.append(column)
    return fitting


def summary_facts(run: Run) -> list[tuple[str, str]]:
    """The summary as (name, value) pairs, from what the run's folder holds, earlier parts of a resumed run included."""
    history = list(read_metrics(run.folder))
    facts = [("steps", f"{history[-1]['step'] if history else 0} of {run.recipe['trainer']['steps']}")]
    facts += [(name, _first_to_last(history, name)) for name in _eval_names(history)]
    times = [line["time/step_s"] for line in history if "time/step_s" in line]
    if times:
        facts.append(("step time", f"{format_seconds(sum(times) / len(times))} on average"))
    parity = [line for line in history if "parity/abs_logprob_diff_mean" in line]
    if parity:
        mean, largest = (parity[-1].get(f"parity/abs_logprob_diff_{which}") for which in ("mean", "max"))
        facts.append(("last |Δlogp|", f"{_short(mean)} mean, {_short(largest)} max"))
    facts.append(("run", str(run.folder)))
    if (run.folder / "report.html").exists():
        facts.append(("report", str(run.folder / "report.html")))
    latest, best = run.latest(), run.best()
    if latest:
        facts.append(("last checkpoint", str(latest.path)))
    if best and best != latest:
        facts.append(("best checkpoint", f"{best.path} (score {best.score:.3f})"))
    return facts


def _eval_names(history: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for line in history for name in line if name.startswith("eval/"))
    return [name for name in names if "/avg@" in name]


def _first_to_last(history: Sequence[Mapping[str, Any]], name: str) -> str:
    lines = [line for line in history if name in line]
    first, last = lines[0], lines[-1]
    if first is last:
        return f"{format_value(name, first[name])} (step {first['step']})"
    values = f"{format_value(name, first[name])} → {format_value(name, last[name])}"
    return f"{values} (step {first['step']} → {last['step']})"


def _number(name: str) -> Callable[[Metrics], str]:
    metric(name)  # a column of a name that isn't listed would stay empty for ever
    return lambda metrics: _short(metrics[name]) if name in metrics else ""


def _percent(name: str) -> Callable[[Metrics], str]:
    metric(name)
    return lambda metrics: f"{100 * metrics[name]:.1f}%" if name in metrics else ""


def _seconds(name: str) -> Callable[[Metrics], str]:
    metric(name)

    def cell(metrics: Metrics) -> str:
        value = metrics.get(name)
        if value is None:
            return ""
        return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"

    return cell


def _rate(metrics: Metrics) -> str:
    value = metrics.get("rollout/tokens_per_s")
    if value is None:
        return ""
    return f"{value:.0f}" if value < 100_000 else f"{value / 1000:.0f}k"


def _eval(metrics: Metrics) -> str:
    """The first task's avg@k; the others are in metrics.jsonl."""
    values = [value for name, value in metrics.items() if name.startswith("eval/") and "/avg@" in name]
    return f"{100 * values[0]:.1f}%" if values else ""


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.3f}" if 0.01 <= abs(value) < 1000 else f"{value:.1e}"


def _ascii(text: str) -> str:
    for fancy, plain in (("Δ", "d"), ("→", "->"), ("·", "-"), ("…", "..."), ("–", "-")):
        text = text.replace(fancy, plain)
    return text.encode("ascii", "replace").decode()


COLUMNS = (
    Column("reward", 8, _number("reward/mean"), "bold"),
    Column("eval", 7, _eval, "bold green"),
    Column("|Δlogp|", 9, _number("parity/abs_logprob_diff_mean")),
    Column("clip", 6, _percent("loss/clip_fraction")),
    Column("entropy", 8, _number("loss/entropy")),
    Column("grad", 7, _number("optim/grad_norm")),
    Column("tok/s", 7, _rate),
    Column("step s", 7, _seconds("time/step_s")),
    Column("gen", 6, _seconds("time/generate_s"), "dim"),
    Column("score", 6, _seconds("time/score_s"), "dim"),
    Column("upd", 6, _seconds("time/update_s"), "dim"),
    Column("sync", 6, _seconds("time/sync_s"), "dim"),
    Column("idle", 6, _seconds("time/idle_s"), "dim"),
)
