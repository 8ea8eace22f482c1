"""Writes a small, warm-started Beam with its tokenizer and its task's data, or finds the one already made.

Promises a folder that is complete or absent, and the same bits for the same seed, dtype and versions on one machine.
Knows nothing about recipes.
"""

import fcntl
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from transformers import BeamForCausalLM
from transformers.utils import logging

from beam_rl.tiny import task
from beam_rl.tiny.checkpoint import TORCH_DTYPE, Dtype, fresh_model, save_hf
from beam_rl.tiny.task import Problem
from beam_rl.tiny.warmstart import Progress, Schedule, accuracy, one_thread, warm_start

TRAIN_ROWS, EVAL_ROWS = 20_000, 128
EVAL_SAMPLES = 8


@dataclass(frozen=True)
class TinyReport:
    """What was written, and how good it is at the start."""

    path: Path
    parameters: int
    loss: float  # of the last supervised step, nats a token
    avg_at_8: float  # share of 1, on the held-out problems at temperature 1
    pass_at_8: float
    seconds: float


def write_tiny(
    out: Path,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    dtype: Dtype = "fp32",
    schedule: Schedule | None = None,
) -> TinyReport:
    """Makes a tiny Beam in the new folder `out`: config, weights, tokenizer, train.jsonl and eval.jsonl.

    Args:
        out: must not exist, or be an empty folder.
        seed: of the weights and of the demonstrations; the problems in the files are the same for every seed.
        progress: called after each supervised step.
        dtype: of the file's tensors; the router stays FP32. Training is always in FP32.
        schedule: of the warm start; the default is what the cached checkpoint gets.
    Raises:
        ValueError: `out` is taken.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists already; name a new or empty folder")
    started = time.perf_counter()
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.unfinished-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        with one_thread():
            model = fresh_model(seed)
            loss = warm_start(model, seed, schedule or Schedule(), progress)
            save_hf(model, unfinished, dtype)
            held_out = write_data(unfinished)
            average, best = accuracy(load(unfinished, dtype), held_out, EVAL_SAMPLES)
        os.replace(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    parameters = sum(p.numel() for p in model.parameters())
    return TinyReport(out, parameters, loss, average, best, time.perf_counter() - started)


def load(folder: Path, dtype: Dtype) -> BeamForCausalLM:
    """The model as a user will load it, so that the report tells of the files and not of what was in memory."""
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # the caller draws the only bar
    try:
        return BeamForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPE[dtype], experts_implementation="eager")
    finally:
        if had_bars:
            logging.enable_progress_bar()


def write_data(folder: Path) -> list[Problem]:
    """Writes train.jsonl and eval.jsonl (columns `prompt`, chat messages, and `answer`); returns the held-out ones."""
    rng = random.Random("toy task")
    held_out = task.draw_distinct(rng, held_out=True, count=EVAL_ROWS)
    write_jsonl(folder / "eval.jsonl", held_out)
    write_jsonl(
        folder / "train.jsonl",
        task.draw_distinct(rng, held_out=False, count=TRAIN_ROWS),
    )
    return held_out


def write_jsonl(path: Path, problems: Iterable[Problem]) -> None:
    with path.open("w") as file:
        for problem in problems:
            messages = [{"role": "user", "content": " ".join(problem)}]
            file.write(json.dumps({"prompt": messages, "answer": str(task.solve(problem))}) + "\n")


def cache_root() -> Path:
    """`BEAM_RL_CACHE`, else `$XDG_CACHE_HOME/beam-rl`, else `~/.cache/beam-rl`."""
    if own := os.environ.get("BEAM_RL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "beam-rl"


def fingerprint() -> str:
    """A short hash of what decides the files' content besides seed and dtype: our code, the libraries' versions."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for version in (
        torch.__version__,
        transformers.__version__,
        tokenizers.__version__,
    ):
        digest.update(version.encode())
    return digest.hexdigest()[:12]


def cached_tiny(
    seed: int = 0,
    dtype: Dtype = "fp32",
    progress: Progress | None = None,
    *,
    schedule: Schedule | None = None,
) -> Path:
    """The folder of the tiny Beam with this seed and dtype; made on first use, about a minute, then found.

    Processes that ask at once wait for the first of them. `schedule` as in `write_tiny`.
    """
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{fingerprint()} {schedule or Schedule()}".encode()).hexdigest()[:12]
    folder = root / f"tiny-seed{seed}-{dtype}-{key}"
    with (root / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also if this process is killed
        if not folder.exists():
            write_tiny(folder, seed, progress, dtype=dtype, schedule=schedule)
    return folder
