"""The report: one HTML page that asks nothing of the network, of one run, or of several side by side.

Puts together what `history` reads, `series` computes and `charts` draws. Text of samples and recipes comes from models
and people: all of it is escaped, and the page's own policy lets a browser load nothing and run page.js alone.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from beam_rl.errors import InputError
from beam_rl.report import facts
from beam_rl.report.charts import Format, Line, bar_chart, line_chart
from beam_rl.report.history import History, read_history, told_apart
from beam_rl.report.metric_names import format_bytes, format_seconds, metric
from beam_rl.report.samples_view import samples_section
from beam_rl.report.series import TIME_PARTS, eval_tasks, series, time_bars
from beam_rl.run import write_file

PAGE, COMPARISON = "report.html", "compare.html"
BARS = 80
PALETTE = 8
LEAST_SHARE = 0.005  # of the time, for a part to be drawn
PART_COLORS = {
    "generate": 1,
    "verify": 7,
    "score": 3,
    "update": 4,
    "sync": 5,
    "hand over": 6,
    "evaluate": 2,
    "other": 9,
    "save": 8,
}
STYLE, SCRIPT = ((Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
escape = html.escape


def write_page(folders: Sequence[Path], out: Path | None = None, ended: bool = False) -> Path:
    """Reads the runs' folders and writes their page; where `out` is not given, into the first run's folder.

    Args:
        ended: the process that trains is about to end (`history.read_history`).
    Raises:
        InputError: a folder that holds no run, or a page that can't be written.
    """
    histories = told_apart([read_history(folder, ended) for folder in folders])
    target = out or folders[0] / (PAGE if len(folders) == 1 else COMPARISON)
    try:
        write_file(target, page(histories))
    except OSError as error:
        raise InputError(f"{target}: can't be written ({error.strerror})") from None
    return target


def page(histories: Sequence[History]) -> str:
    """The whole page: of one run, or the comparison of several."""
    if len(histories) == 1:
        run = histories[0]
        return document(f"{run.name}, step {run.step}", run_sections(run))
    return document(" · ".join(run.name for run in histories), comparison_sections(histories))


def document(title: str, sections: Iterable[str]) -> str:
    allowed = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(sections)}"
        f"<footer>beam-rl report · {datetime.now():%Y-%m-%d %H:%M}</footer></main><script>{SCRIPT}</script></body></html>\n"
    )


def run_sections(run: History) -> list[str]:
    return [
        _header(run),
        _section("Reward and evaluation", _grid(_learning([run])) + _evaluations_table(run)),
        _section("Trainer against engine", _grid(_agreement([run]))),
        _section("Where the time went", _time(run)),
        _section("Throughput and memory", _grid(_throughput([run]))),
        _section("The optimizer's steps", _grid(_optimization([run]))),
        samples_section(run),
        _recipe(run),
    ]


def comparison_sections(runs: Sequence[History]) -> list[str]:
    table = _table(["", *(run.name for run in runs)], facts.comparison(runs), swatches=True)
    differing = facts.differing_keys(runs)
    keys = (
        _table(["recipe key", *(run.name for run in runs)], differing) if differing else "<p>The recipes are alike.</p>"
    )
    gaps = [f"{run.name}: {gap}" for run in runs for gap in run.gaps]
    return [
        f"<header><h1>{escape(' · '.join(run.name for run in runs))}</h1>{_gaps(gaps)}</header>",
        _section("Outcome", table),
        _section("Reward and evaluation", _grid(_learning(runs))),
        _section("Trainer against engine", _grid(_agreement(runs))),
        _section("Throughput and memory", _grid(_throughput(runs))),
        _section("The optimizer's steps", _grid(_optimization(runs))),
        _section("What the recipes differ in", keys),
    ]


def _header(run: History) -> str:
    tiles = "".join(
        f"<div class=tile><h2>{escape(t.name)}</h2><strong>{escape(t.value)}</strong><small>{escape(t.note)}</small></div>"
        for t in facts.tiles(run)
    )
    return (
        f'<header><h1>{escape(run.name)} <em class="{run.standing}">{escape(facts.standing(run))}</em></h1>'
        f"<p>{escape(facts.what_was_run(run))}</p><p class=headline>{escape(facts.headline(run))}</p>"
        f"{_gaps(run.gaps)}<div class=tiles>{tiles}</div></header>"
    )


def _gaps(gaps: Sequence[str]) -> str:
    return f"<ul class=gaps>{''.join(f'<li>{escape(gap)}</li>' for gap in gaps)}</ul>" if gaps else ""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _grid(charts: Iterable[str]) -> str:
    drawn = "".join(charts)
    return f"<div class=grid>{drawn}</div>" if drawn else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], swatches: bool = False) -> str:
    marks = [f'<i class="c{color(i - 1)}"></i>' if swatches and i else "" for i in range(len(head))]
    top = "".join(f"<th>{mark}{escape(cell)}</th>" for mark, cell in zip(marks, head, strict=True))
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def color(index: int) -> int:
    return index % PALETTE + 1


# -- charts: of one run a line has the metric's name, of several the run's -------------------------------------------


def _learning(runs: Sequence[History]) -> list[str]:
    reward = _lines(runs, [("reward/mean", "mean reward", {"error": "reward/stderr"})])
    note = "band: 95 % interval over prompts" if _has_band(reward) else ""
    charts = [line_chart("Reward of the samples that were trained on", reward, number, note=note)]
    for task, k in dict.fromkeys(pair for run in runs for pair in eval_tasks(run.rows)):
        ends = {"low": f"eval/{task}/low@{k}", "high": f"eval/{task}/high@{k}"}
        wanted = [(f"eval/{task}/avg@{k}", f"avg@{k}", ends), (f"eval/{task}/pass@{k}", f"pass@{k}", {})]
        lines = _lines(runs, wanted)
        note = "band: 95 % interval of avg@k over prompts" if _has_band(lines) else ""
        charts.append(line_chart(f"Evaluation: {task}", lines, percent, note=note, most=1.0))
    return charts


def _agreement(runs: Sequence[History]) -> list[str]:
    gap: Wanted = [("parity/abs_logprob_diff_mean", "mean", {}), ("parity/abs_logprob_diff_max", "max", {})]
    bounds = {bound for run in runs if (bound := facts.parity_bound(run)) is not None}
    bound = bounds.pop() if len(bounds) == 1 else None
    title = "|Δ log p| between trainer and engine, nats"
    agreement: Wanted = [("replay/route_agreement", "agreement", {})]
    return [
        line_chart(title, _lines(runs, gap), scientific, log=True, bound=bound),
        _chart("Mismatch KL, nats", runs, [("parity/mismatch_kl", "KL", {})], scientific, log=True),
        _chart("Replayed expert sets the trainer would choose too", runs, agreement, percent, most=1.0),
        _chart("Versions that samples are behind", runs, [("rollout/staleness", "staleness", {})], number, zero=True),
    ]


def _throughput(runs: Sequence[History]) -> list[str]:
    memory: Wanted = [("memory/gpu_peak_bytes", "GPU", {}), ("memory/host_peak_bytes", "host", {})]
    nvme: Wanted = [("nvme/read_bytes", "read", {}), ("nvme/write_bytes", "written", {})]
    return [
        _chart("Tokens sampled a second", runs, [("rollout/tokens_per_s", "tokens/s", {})], number, zero=True),
        _chart(
            "Drafted tokens that were accepted", runs, [("rollout/draft_acceptance", "accepted", {})], percent, most=1.0
        ),
        _chart("Tokens sampled a step", runs, [("rollout/tokens", "tokens", {})], number, zero=True),
        _chart("Seconds a step", runs, [("time/step_s", "step", {})], seconds, zero=True) if len(runs) > 1 else "",
        _chart("Peak memory of a trainer rank", runs, memory, format_bytes, zero=True),
        _chart("NVMe traffic a step", runs, nvme, format_bytes, zero=True),
    ]


def _optimization(runs: Sequence[History]) -> list[str]:
    return [
        _chart("Gradient norm", runs, [("optim/grad_norm", "gradient norm", {})], number, zero=True),
        _chart("Entropy, nats", runs, [("loss/entropy", "entropy", {})], number, zero=True),
        _chart("Tokens where the clip was binding", runs, [("loss/clip_fraction", "clipped", {})], percent, zero=True),
    ]


Wanted = Sequence[tuple[str, str, dict[str, str]]]  # a metric, its name in the legend, where its interval is


def _chart(title: str, runs: Sequence[History], wanted: Wanted, label: Format, **axis: Any) -> str:
    """A line chart; nothing where all there is to draw is 0."""
    lines = _lines(runs, wanted)
    if not any(value for line in lines for value in line.series.values):
        return ""
    there = [name for key, name, _ in wanted if _has(runs, key)]
    if len(wanted) > len(there) == 1:
        title = f"{title}: {there[0]}"
    return line_chart(title, lines, label, **axis)


def _lines(runs: Sequence[History], wanted: Wanted) -> list[Line]:
    """A line a metric; of several runs the colour tells the run, and metrics after the first are dashed."""
    lines = []
    wanted = [entry for entry in wanted if _has(runs, entry[0])]
    for r, run in enumerate(runs):
        for m, (name, title, ends) in enumerate(wanted):
            metric(name)  # a chart of a name that isn't listed would stay empty for ever
            rows = run.rows if name.startswith("eval/") else run.trained
            drawn = series(rows, name, title, **ends)
            if len(runs) > 1:
                drawn = replace(drawn, name=f"{run.name} {title}" if len(wanted) > 1 else run.name)
            lines.append(Line(drawn, color(r if len(runs) > 1 else m), dashed=m > 0 and len(runs) > 1))
    return lines


def _has(runs: Sequence[History], key: str) -> bool:
    return any(key in row for run in runs for row in run.rows)


def _has_band(lines: Sequence[Line]) -> bool:
    return any(low == low for line in lines for low in line.series.low)


def _time(run: History) -> str:
    bars = time_bars(run.rows, BARS)
    totals = {name: sum(parts[name] for _, _, parts in bars) for name in TIME_PARTS}
    whole = sum(totals.values())
    if not whole:
        return ""
    shown = [name for name, total in totals.items() if total / whole > LEAST_SHARE]
    parts = [(name, PART_COLORS[name], f"{totals[name] / whole:.0%}") for name in shown]
    named = [(f"{a}" if a == b else f"{a}–{b}", [means[name] for name in shown]) for a, b, means in bars]
    chart = bar_chart("Seconds of each step, by part", named, parts, seconds)
    return f"{chart}<p class=note>{escape(facts.idle_sentence(run))}</p>"


def _evaluations_table(run: History) -> str:
    rows = facts.evaluations(run)
    return _table(["step", "task", "avg@k", "95 % interval", "pass@k"], rows) if rows else ""


def _recipe(run: History) -> str:
    if not run.recipe:
        return ""
    return _section(
        "Recipe",
        f"<details><summary>every key as it was resolved</summary><pre>{escape(facts.as_yaml(run))}</pre></details>",
    )


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def seconds(value: float) -> str:
    return format_seconds(value) if value >= 100 else f"{value:.3g} s"


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def scientific(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}".replace(".0e", "e")
