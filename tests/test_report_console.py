"""What a run shows in a file and on a terminal, and the names that its numbers have."""

import io
import os
import re
import threading
import time
from pathlib import Path

import pytest

from beam_rl.report.console import Console
from beam_rl.report.metric_names import (
    METRICS,
    UnknownMetric,
    check_names,
    eval_metric,
    format_bytes,
    format_seconds,
    format_value,
)
from beam_rl.run import Run

RECIPE = {"name": "toy", "trainer": {"steps": 50}, "checkpoint": {"keep_last": 1, "keep_best": True}}

STEP = {
    "reward/mean": 0.4801,
    "eval/toy/avg@8": 0.936,
    "parity/abs_logprob_diff_mean": 3.14e-6,
    "parity/abs_logprob_diff_max": 2e-5,
    "loss/clip_fraction": 0.0123,
    "loss/entropy": 0.4567,
    "optim/grad_norm": 0.8123,
    "rollout/tokens_per_s": 1534.4,
    "time/step_s": 123.45,
    "time/generate_s": 80.0,
    "time/score_s": 3.2,
    "time/update_s": 9.99,
    "time/sync_s": 0.034,
    "time/idle_s": 30.2,
}

# The names that users and their dashboards rely on.
CONTRACT = """
reward/mean reward/stderr reward/shuffled eval/toy/avg@8 eval/toy/pass@8 eval/toy/low@8 eval/toy/high@8
parity/abs_logprob_diff_mean parity/abs_logprob_diff_max
parity/mismatch_kl
replay/rows replay/missing_rows replay/route_agreement sync/seconds sync/bytes sync/version sync/buckets time/step_s
time/generate_s time/verify_s time/score_s time/update_s time/sync_s time/save_s time/write_s time/eval_s
time/hold_s time/turn_s time/idle_s rollout/continued rollout/engine_restarts rollout/redone turn/bytes turn/seconds
rollout/drafted rollout/draft_acceptance rollout/turns_mean rollout/environment_s rollout/environment_failures
rollout/tokens rollout/tokens_per_s rollout/truncated rollout/staleness sampling/dropped_groups verifier/timeouts
verifier/errors loss/policy loss/clip_fraction loss/entropy loss/kl optim/grad_norm optim/router_grad_norm
optim/skipped_updates optim/lr optim/tflops memory/gpu_peak_bytes memory/host_peak_bytes nvme/read_bytes nvme/write_bytes
nvme/seconds
""".split()


def test_the_names_are_the_contracts_and_no_others() -> None:
    check_names(CONTRACT)
    assert len(METRICS) == len(CONTRACT) and eval_metric("toy", "avg", 8) in CONTRACT
    check_names([eval_metric("org/aime25", "pass", 8)])


@pytest.mark.parametrize("name", ["rewards/mean", "eval/avg@8", "eval/toy/avg@k", "eval//avg@8", "step"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(UnknownMetric, match=re.escape(repr(name))):
        check_names(["reward/mean", name])


def test_a_mistyped_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownMetric, match="did you mean reward/mean"):
        check_names(["rewards/mean"])


def test_values_are_formatted_with_their_unit() -> None:
    assert [format_seconds(s) for s in (0.034, 12.34, 99.97, 245, 7380)] == [
        "0.03 s",
        "12.3 s",
        "100.0 s",
        "4 min 05 s",
        "2 h 03 min",
    ]
    assert [format_bytes(n) for n in (0, 512, 4.1e6, 1.234e12)] == ["0 B", "512 B", "4.1 MB", "1.23 TB"]
    for name, value, shown in [
        ("eval/toy/avg@8", 0.936, "93.6 %"),
        ("sync/bytes", 2.5e9, "2.5 GB"),
        ("time/step_s", 1.5, "1.5 s"),
        ("rollout/tokens", 12345, "12,345"),
        ("rollout/tokens_per_s", 1534.4, "1,534 tokens/s"),
        ("optim/tflops", 212.34, "212 TFLOP/s"),
        ("parity/mismatch_kl", 1.23e-9, "1.2e-09"),
        ("reward/mean", 0.0, "0"),
        ("loss/kl", None, "–"),
    ]:
        assert format_value(name, value) == shown


def test_a_file_gets_plain_lines_of_at_most_100_columns() -> None:
    out = io.StringIO()
    with Console(steps=1000, file=out) as console:
        with console.phase("starting engines", once=True):
            pass
        with console.phase("sampling", total=256) as phase:
            phase.advance(256)
        console.step(0, {"eval/toy/avg@8": 0.475})
        console.step(999, STEP)
        console.warn("verifier: 3 time-outs")
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "starting engines …" and re.fullmatch(r"starting engines: 0\.\d\d s", lines[1])
    header, first, row, warning = lines[2:]
    assert header.split() == (
        ["step", "reward", "eval", "|Δlogp|", "clip", "entropy", "grad", "tok/s", "step", "s"]
        + ["gen", "score", "upd", "sync", "idle"]
    )
    assert first.split() == ["0/1000", "47.5%"] and first.index("47.5%") + 5 == header.index("eval") + 4
    assert row.split() == (
        ["999/1000", "0.480", "93.6%", "3.1e-06", "1.2%", "0.457", "0.812", "1534", "123.5"]
        + ["80.0", "3.20", "9.99", "0.03", "30.2"]
    )
    assert warning == "warning: verifier: 3 time-outs"


def test_a_stream_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    with Console(steps=5, file=stream) as console:
        console.step(1, STEP)
        console.note("β → 1 · …")
    assert b"|dlogp|" in raw.getvalue() and b"? -> 1 - ..." in raw.getvalue()


def test_a_row_with_an_unlisted_name_is_refused() -> None:
    with pytest.raises(UnknownMetric):
        Console(steps=5, file=io.StringIO()).step(1, {"reward": 1.0})


class Terminal:
    """A real pseudo-terminal, read by a thread."""

    def __init__(self) -> None:
        self._reader, writer = os.openpty()
        self.stream = os.fdopen(writer, "w")
        self.text = ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._reader, 65536):
                self.text += data.decode()
        except OSError:  # the other end is closed
            pass

    def close(self) -> str:
        self.stream.close()
        self._thread.join()
        os.close(self._reader)
        return self.text


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    return Terminal()


def test_a_terminal_gets_a_live_line_and_its_cursor_back(terminal: Terminal) -> None:
    with pytest.raises(KeyboardInterrupt), Console(steps=50, file=terminal.stream) as console:
        console.resume(12)
        with console.phase("sampling", total=256) as phase:
            phase.advance(113)
            time.sleep(0.6)  # two refreshes
        console.step(13, STEP)
        raise KeyboardInterrupt
    text = terminal.close()
    assert re.search(r"step 13/50 · sampling 113/256 · [01] s", text)
    assert "13/50" in text and "0.480" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # show after hide


def test_a_narrow_terminal_loses_columns_not_the_layout(terminal: Terminal, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with Console(steps=50, file=terminal.stream) as console:
        console.step(13, STEP)
    rows = [re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", line).rstrip() for line in terminal.close().splitlines()]
    rows = [row for row in rows if row.strip()]
    assert len(rows) == 2 and max(map(len, rows)) <= 60 and rows[0].endswith("tok/s")


def test_the_summary_tells_where_things_are_and_what_came_out(tmp_path: Path, terminal: Terminal) -> None:
    plain = io.StringIO()
    with Run.open(tmp_path / "toy", RECIPE) as run:
        run.log_metrics(0, {"eval/toy/avg@8": 0.475})
        run.log_metrics(1, STEP | {"time/step_s": 1.0})
        run.checkpoint(1, lambda folder: (folder / "weights").touch(), {}, score=0.936)
        run.log_metrics(2, STEP | {"time/step_s": 3.0, "eval/toy/avg@8": 0.9, "parity/abs_logprob_diff_max": 0.02})
        run.checkpoint(2, lambda folder: (folder / "weights").touch(), {}, score=0.9)
        for stream in (plain, terminal.stream):
            with Console(steps=50, file=stream) as console:
                console.summary(run)
    text = terminal.close()
    for words in (
        "2 of 50",
        "47.5 % → 90.0 % (step 0 → 2)",
        "2.0 s on average",
        "3.1e-06 mean, 0.020 max",
        f"{tmp_path}/toy\n",
        "checkpoints/step_2",
        "checkpoints/step_1 (score 0.936)",
    ):
        assert words in plain.getvalue()
    assert "47.5 % → 90.0 %" in text and "toy" in text and "╭" in text and "╭" not in plain.getvalue()


def test_the_summary_of_a_run_without_steps(tmp_path: Path) -> None:
    out = io.StringIO()
    with Run.open(tmp_path / "toy", RECIPE) as run:
        Console(steps=50, file=out).summary(run)
    assert "0 of 50" in out.getvalue()


def test_the_documentation_lists_every_metric_as_the_code_has_it() -> None:
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}` | {m.unit or '–'} | {m.meaning} |" for name, m in METRICS.items()]
