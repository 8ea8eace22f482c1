"""Writes a small, warm-started Beam with its tokenizer and its task's data.

Promises a folder that is complete or absent, and the same bits for the same seed, dtype and versions on one machine.
Knows nothing about recipes.
"""

import json
import os
import random
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import BeamForCausalLM
from transformers.utils import logging

from beam_rl.tiny import task as digits
from beam_rl.tiny.cache import REPORT
from beam_rl.tiny.checkpoint import TORCH_DTYPE, Dtype, fresh_model, save_hf
from beam_rl.tiny.sizes import TINY, Schedule, Size
from beam_rl.tiny.task import Problem
from beam_rl.tiny.warmstart import Progress, graded, one_thread, warm_start

EVAL_SAMPLES = 8


@dataclass(frozen=True)
class TinyReport:
    """What was written, and how good it is at the start; shares of 1, on the held-out problems."""

    path: Path
    parameters: int
    loss: float  # of the last supervised step, nats a token
    steps: int
    target: float | None  # that the warm start had, for avg@8
    reached: bool
    avg_at_8: float  # at temperature 1
    pass_at_8: float
    greedy: float
    by_level: dict[int, tuple[float, float]]  # level: avg@8, pass@8
    seconds: float

    @property
    def summary(self) -> str:
        """One line for people."""
        missed = "" if self.reached else f" (target {self.target:.0%} MISSED)"
        levels = ", ".join(f"{100 * avg:.0f}/{100 * best:.0f}" for avg, best in self.by_level.values())
        return (
            f"{self.parameters:,} parameters, warm-started in {self.steps} steps and {self.seconds:.0f} s{missed}; eval "
            f"avg@8 {self.avg_at_8:.1%}, pass@8 {self.pass_at_8:.1%}, greedy {self.greedy:.1%}"
            + (f"; avg/pass by level {levels}" if len(self.by_level) > 1 else "")
        )


def write_tiny(
    out: Path,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    dtype: Dtype = "fp32",
    schedule: Schedule | None = None,
    size: Size = TINY,
) -> TinyReport:
    """Makes a small Beam in the new folder `out`: config, weights, tokenizer, train.jsonl and eval.jsonl.

    Args:
        out: must not exist, or be an empty folder.
        seed: of the weights and of the demonstrations; the problems in the files are the same for every seed.
        progress: called after each supervised step.
        dtype: of the file's tensors; the router stays FP32. The size says what training is in.
        schedule: of the warm start; the default is the size's, which the cached checkpoint gets.
    Raises:
        ValueError: `out` is taken, or the size wants a GPU and there is none.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists already; name a new or empty folder")
    device = device_for(size)
    started = time.perf_counter()
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.unfinished-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        with one_thread():
            model = fresh_model(seed, size, device)
            outcome = warm_start(model, seed, schedule or size.schedule, progress, size.task)
            save_hf(model, unfinished, dtype, size)
            held_out = write_data(unfinished, size)
            parameters = sum(p.numel() for p in model.parameters())
            del model  # the one that is loaded needs its memory
            table, greedy = grade(load(unfinished, dtype, size, device), held_out, size)
        report = TinyReport(
            path=out,
            parameters=parameters,
            loss=outcome.loss,
            steps=outcome.steps,
            target=(schedule or size.schedule).target,
            reached=outcome.reached,
            avg_at_8=table.mean().item(),
            pass_at_8=table.amax(1).mean().item(),
            greedy=greedy,
            by_level=by_level(table, held_out, size),
            seconds=time.perf_counter() - started,
        )
        if report.target is not None:
            (unfinished / REPORT).write_text(json.dumps(asdict(report) | {"path": out.name, "summary": report.summary}))
        os.replace(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if device != "cpu":
            torch.cuda.empty_cache()  # engines of this machine want it all
    return report


def device_for(size: Size) -> str:
    """Where a size is made; ValueError where it cannot be."""
    if not size.gpu:
        return "cpu"
    if not torch.cuda.is_available():
        raise ValueError(
            f"{size.name}: making this Beam takes minutes on a GPU and days without, and there is none; use tiny, or the "
            "folder of one that was made elsewhere"
        )
    return "cuda:0"


def load(folder: Path, dtype: Dtype, size: Size = TINY, device: str = "cpu") -> BeamForCausalLM:
    """The model as a user will load it, so that the report tells of the files and not of what was in memory."""
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # the caller draws the only bar
    try:
        model = BeamForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPE[dtype], experts_implementation=size.experts)
    finally:
        if had_bars:
            logging.enable_progress_bar()
    return model.to(device)


def grade(model: BeamForCausalLM, held_out: Sequence[Problem], size: Size) -> tuple[Tensor, float]:
    """(problems, samples) scores at temperature 1, and the share that is right greedily."""
    table = graded(model, held_out, EVAL_SAMPLES, task=size.task)
    return table, graded(model, held_out, 1, task=size.task, greedy=True).mean().item()


def by_level(table: Tensor, problems: Sequence[Problem], size: Size) -> dict[int, tuple[float, float]]:
    """avg@k and pass@k of every level of the task, the lowest first."""
    levels = torch.tensor([size.task.level_of(problem) for problem in problems])
    return {
        int(level): (table[levels == level].mean().item(), table[levels == level].amax(1).mean().item())
        for level in levels.unique()
    }


def write_data(folder: Path, size: Size = TINY) -> list[Problem]:
    """Writes train.jsonl and eval.jsonl (columns `prompt`, chat messages, and `answer`); returns the held-out ones."""
    rng, draw = random.Random("toy task"), size.task.draw_problem
    held_out = digits.draw_distinct(rng, True, size.eval_rows, draw)
    write_jsonl(folder / "eval.jsonl", held_out, size)
    write_jsonl(folder / "train.jsonl", digits.draw_distinct(rng, False, size.train_rows, draw), size)
    return held_out


def write_jsonl(path: Path, problems: Iterable[Problem], size: Size) -> None:
    with path.open("w") as file:
        for problem in problems:
            messages = [{"role": "user", "content": " ".join(problem)}]
            file.write(json.dumps({"prompt": messages, "answer": size.task.solve(problem)}) + "\n")
