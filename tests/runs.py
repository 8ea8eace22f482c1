"""`beam-rl train` as a user starts it, in a process of its own, for the tests of whole runs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

MARK = "BEAM_RL_TEST_RUN"  # environment variable by which a test finds every process of its run
SECRETS = {"HF_TOKEN": "hf_" + "n0tAr3alK3y" * 3, "WANDB_API_KEY": "5ec2e7" * 6 + "beef"}  # every run has them to keep
# Ray counts a node as lost after five checks without it, which by default takes 15 s.
SOON_LOST = {"RAY_health_check_period_ms": "1000"}


def start(recipe: Path, overrides: Sequence[str], out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "beam_rl.cli", "train", str(recipe), *overrides, *more, "--out", str(out)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | SECRETS | {MARK: str(out)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a test run in the background ignores
    )


def finish(process: subprocess.Popen[str], out: Path, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a run that must end with `code` and leave no process behind."""
    stdout, stderr = process.communicate(timeout=500)
    assert process.returncode == code, f"{stdout}\n{stderr}"
    assert not left_behind(out, 10)
    return stdout, stderr


def run(recipe: Path, overrides: Sequence[str], out: Path, *more: str, code: int = 0) -> tuple[str, str]:
    return finish(start(recipe, overrides, out, *more), out, code)


def left_behind(out: Path, patience_s: float, but: Sequence[str] = ()) -> list[psutil.Process]:
    """The run's processes that are still there after so long; `but` those of these names."""
    end = time.monotonic() + patience_s
    while True:
        alive = members(out, but)
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.2)


def members(out: Path, but: Sequence[str] = ()) -> list[psutil.Process]:
    """Processes that carry the run's mark in their environment, which every child inherits; `but` those of these names."""
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get(MARK) == str(out) and process.name() not in but
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def kill_rank(out: Path, rank: int) -> None:
    """kill -9 for the trainer's rank that prints to logs/trainer-<rank>.log."""
    log = str((out / "logs" / f"trainer-{rank}.log").resolve())
    next(p for p in members(out) if any(file.path == log for file in p.open_files())).kill()


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def samples(run: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run / "samples" / f"step_{step}.jsonl").read_text().splitlines()]


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 400
    while time.monotonic() < end and process.poll() is None:
        if (run / "metrics.jsonl").exists() and any(line["step"] >= step for line in metrics(run)):
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"step {step} did not come: {process.communicate()}")
