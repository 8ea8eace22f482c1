"""Saves a run's state while training goes on: every rank copies its part to the host, and a thread sees it written.

Promises: a checkpoint has its name only when every rank has written; a failure is told when it happens and raised at the
next step; one save at a time. Knows nothing about what a checkpoint contains.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from beam_rl.interrupts import held
from beam_rl.policy import Policy
from beam_rl.recipe.tree import Checkpoint
from beam_rl.run import Run
from beam_rl.watch import RankError


class _Writing(threading.Thread):
    """A save on its way to the disk."""

    def __init__(self, write: Callable[[], object], warn: Callable[[str], None]) -> None:
        super().__init__(name="checkpoint", daemon=True)  # daemon: a process that is told to end does so
        self._write, self._warn = write, warn
        self.error: BaseException | None = None
        self.seconds = 0.0

    def run(self) -> None:
        started = time.perf_counter()
        try:
            self._write()
        except BaseException as error:
            self.error = error
            if not isinstance(error, RankError):  # which the training meets, too
                self._warn(f"saving failed: {' '.join(str(error).split())}")
        self.seconds = time.perf_counter() - started


class Saver:
    """Saves into a run's folder what the ranks of its policy hold."""

    def __init__(
        self, run: Run, policy: Policy, settings: Checkpoint, with_adapter: bool, warn: Callable[[str], None]
    ) -> None:
        self.run, self.policy, self.settings = run, policy, settings
        self.with_adapter = with_adapter  # also as an HF folder
        self._warn = warn
        self._writing: _Writing | None = None
        self._metrics: dict[str, float] = {}

    def save(
        self,
        step: int,
        rest: Callable[[Path], None],
        state: dict[str, Any],
        score: float | None,
        timeout_s: float | None = None,
    ) -> None:
        """Returns when training may go on; the checkpoint is complete after `wait`.

        Args:
            rest: writes what belongs to the checkpoint beside the trainer's state; called later, from another thread.
            state, score: as for `Run.checkpoint`.
        Raises:
            SaveError: this save failed or, found out now, the one before it.
            TimeoutError: the ranks were not done with their part in `timeout_s` seconds.
        """
        started = time.perf_counter()
        with held():
            self.wait(timeout_s)
            if self.with_adapter:
                self.run.adapter(step, partial(self.policy.export, form="adapter", timeout_s=timeout_s))
            if self.settings.asynchronous:
                self.policy.stage(timeout_s)
                write = _both(self.policy.write, rest)
                self._writing = _Writing(lambda: self.run.checkpoint(step, write, state, score), self._warn)
                self._writing.start()
            else:
                write = _both(partial(self.policy.save, timeout_s=timeout_s), rest)
                self.run.checkpoint(step, write, state, score)
        self._metrics["time/save_s"] = self._metrics.get("time/save_s", 0.0) + time.perf_counter() - started

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the last save is complete; raises what it failed with, or TimeoutError."""
        if self._writing is None:
            return
        self._writing.join(timeout_s)
        if self._writing.is_alive():
            raise TimeoutError(f"a checkpoint was not complete in {timeout_s} s")
        self.check()

    def check(self) -> None:
        """Raises what a save has failed with meanwhile."""
        if self._writing is None or self._writing.is_alive():
            return
        done, self._writing = self._writing, None
        self._metrics["time/write_s"] = done.seconds
        if done.error is not None:
            raise done.error

    def take_metrics(self) -> dict[str, float]:
        """`time/save_s`, for which training has stood still, and `time/write_s` of what is complete, since last asked."""
        taken, self._metrics = self._metrics, {}
        return taken


def _both(first: Callable[[Path], None], second: Callable[[Path], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        first(folder)
        second(folder)

    return write
