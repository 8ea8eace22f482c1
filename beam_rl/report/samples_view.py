"""Samples with their verdicts, side by side over the steps. HTML; every text in it is escaped."""

import html
from collections.abc import Mapping, Sequence

from beam_rl.report.history import History, evenly
from beam_rl.report.series import mean
from beam_rl.run import Json

PROMPTS = 8  # rows of held-out prompts
SAMPLES = 4  # rows of what was trained on
STEPS = 4  # columns
LONG = 280  # characters; a longer text is folded
MOST = 6000  # characters of a text that the page holds
escape = html.escape


def samples_section(run: History) -> str:
    """Held-out prompts over the evaluations, then what was trained on; empty where a run has kept neither."""
    parts = []
    held_out = _by_prompt(run.evaluations)
    if held_out:
        parts += ["<h3>The same held-out prompts, at each evaluation</h3>", _over_steps(held_out, run.evaluations)]
    again = {row: found for row, found in _by_prompt(run.samples).items() if len(found) > 1}
    if again:
        parts += ["<h3>Prompts that came again in training</h3>", _over_steps(again, run.samples)]
    if run.samples:
        parts += ["<h3>Samples that were trained on</h3>", _columns(run.samples)]
    return f"<section><h2>Samples</h2>{''.join(parts)}</section>" if parts else ""


def _by_prompt(steps: Mapping[int, Sequence[Json]]) -> dict[int, dict[int, Json]]:
    """A prompt's row in its data set → step → its first response there; of those that have a text."""
    found: dict[int, dict[int, Json]] = {}
    for step, rows in steps.items():
        for row in rows:
            if "row" in row and "text" in row:
                found.setdefault(row["row"], {}).setdefault(step, row)
    return found


def _over_steps(prompts: Mapping[int, Mapping[int, Json]], steps: Mapping[int, object]) -> str:
    """A row a prompt, a column a step."""
    columns = evenly(sorted(steps), STEPS)
    body = []
    for found in list(prompts.values())[:PROMPTS]:
        cells = "".join(f"<td>{_response(found[step]) if step in found else ''}</td>" for step in columns)
        body.append(f"<tr><th>{_prompt(next(iter(found.values())))}</th>{cells}</tr>")
    return _framed(["prompt", *(f"step {step:,}" for step in columns)], body)


def _columns(steps: Mapping[int, Sequence[Json]]) -> str:
    """A column a step, its samples one below the other."""
    columns = evenly(sorted(steps), STEPS)
    body = []
    for i in range(min(SAMPLES, max(len(steps[step]) for step in columns))):
        shown = [steps[step][i] if i < len(steps[step]) else None for step in columns]
        cells = "".join(f"<td>{_prompt(row) + _response(row) if row else ''}</td>" for row in shown)
        body.append(f"<tr>{cells}</tr>")
    return _framed([f"step {step:,}" for step in columns], body)


def _framed(head: Sequence[str], body: Sequence[str]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    table = f"<table class=samples><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f"<div class=scroll>{table}</div>"


def _prompt(row: Json) -> str:
    return f"<div class=prompt>{_text(row.get('prompt'))}<small>answer {_text(row.get('answer'))}</small></div>"


def _response(row: Json) -> str:
    """A verdict, what else is known of the sample, and its text, or its turns."""
    turns = row.get("turns") or [("", row.get("text"))]
    return f"<div>{_verdict(row)}</div>" + "".join(_turn(str(who), text) for who, text in turns)


def _turn(who: str, text: object) -> str:
    """What the model or an environment said; `who` is empty where nobody else spoke."""
    name = f"<small>{escape(who)}</small> " if who else ""
    return f"<div class={'environment' if who == 'environment' else 'response'}>{name}{_text(text)}</div>"


def _verdict(row: Json) -> str:
    scores = row.get("scores") or []
    score = row.get("score", scores[0] if scores else None)
    style, word = "partly", f"score {score}"
    if score in (0, 1):
        style, word = ("right", "✓ right") if score else ("wrong", "✗ wrong")
    notes = []
    if scores and all(s in (0, 1) for s in scores):
        notes.append(f"{sum(scores):.0f} of {len(scores)} right")
    elif scores:
        notes.append(f"mean {mean(scores):.3g}")
    if row.get("reward") is not None and row["reward"] != score:
        notes.append(f"reward {row['reward']:.3g}")
    if row.get("advantage"):
        notes.append(f"advantage {row['advantage']:+.2f}")
    if row.get("finish_reason") == "length":
        notes.append("cut off at the limit")
    return f'<span class="{style}">{escape(word)}</span> <small>{escape(" · ".join(notes))}</small>'


def _text(value: object) -> str:
    """Escaped; a long one is folded, a very long one is cut."""
    text = "–" if value is None else str(value)
    rest = len(text) - MOST
    if rest > 0:
        text = f"{text[:MOST]} … and {rest:,} characters more"
    if len(text) <= LONG:
        return f"<span class=text>{escape(text)}</span>"
    return (
        f"<details><summary><span class=text>{escape(text[: LONG // 2])} …</span></summary>"
        f"<span class=text>{escape(text)}</span></details>"
    )
