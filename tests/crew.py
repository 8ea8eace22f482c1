"""A trainer of two ranks on the tiny checkpoint, without engines, for the tests that kill and stop ranks."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

from beam_rl.policy import Policy
from beam_rl.recipe.load import load
from beam_rl.samples import Completion, Prompt, Sample

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
PROMPT = [1, 12, 17, 32, 22, 20, 28, 33]


def samples(count: int = 16, seed: int = 0) -> list[Sample]:
    """Random responses: what they say is of no matter to the machinery."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        tokens = rng.integers(3, 33, 12, dtype=np.int32)
        completion = Completion(f"s{i}", tokens, np.full(12, -2.0, np.float32), None, "stop", 0)
        made.append(Sample(Prompt(i, i, PROMPT, "5"), completion, weight=1 / (12 * count), advantage=(-1.0) ** i))
    return made


@contextlib.contextmanager
def crew(model: Path, logs: Path, overrides: Sequence[str] = ()) -> Iterator[Policy]:
    """Two data-parallel ranks, ready."""
    recipe = load(TINY, ["trainer.parallel.dp=2", "trainer.deterministic=true", *overrides])
    with Policy(recipe, model, logs) as policy:
        policy.wait_ready()
        policy.score([samples()])
        yield policy


def ranks() -> list[psutil.Process]:
    """The processes of this process's trainer, first rank first."""
    found = [p for p in psutil.Process().children(recursive=True) if "PolicyWorker" in " ".join(p.cmdline())]
    return sorted(found, key=lambda p: p.pid)


def all_gone(processes: Sequence[psutil.Process], patience_s: float = 10.0) -> bool:
    return not psutil.wait_procs(processes, timeout=patience_s)[1]


def wait_for(condition, patience_s: float = 60.0) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)
