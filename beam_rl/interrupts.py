"""Ctrl-C and a scheduler's SIGTERM: the first ends a run where nothing is lost, a second one later ends it at once.

The first one raises `Interrupted` in the main thread; inside `held` at its end, or when a part of the grace time is used
up. Knows nothing about checkpoints.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

import psutil

TO_END = 0.2  # the part of the grace time that is kept for ending the run's processes
TO_HOLD = 0.5  # the part after which nothing is waited for any more; what is left between them is for saving
# Ray and Slurm signal every process of a job: the run, and `uv run` above it, which hands the signal on to the run.
ECHO_S = 0.5


class Interrupted(KeyboardInterrupt):
    """A signal has asked the process to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.lost = ""  # what could not be saved, in a few words

    @property
    def exit_code(self) -> int:
        """A SIGTERM that costs nothing is no failure: the scheduler starts the run again later."""
        if self.signum == signal.SIGTERM:
            return 1 if self.lost else 0
        return 128 + self.signum


class _Signals:
    """What has come so far; there is one, as signals are the process's own."""

    def __init__(self) -> None:
        self.grace_s = 25.0
        self.first: int | None = None
        self.echoes_end = 0.0  # time.monotonic()
        self.deadline = 0.0  # time.monotonic()
        self.holds = 0

    def receive(self, signum: int, frame: FrameType | None) -> None:
        if signum == self.first and time.monotonic() < self.echoes_end:
            return
        if self.first is not None:
            end_at_once(signum)
        self.first, self.echoes_end = signum, time.monotonic() + ECHO_S
        self.deadline = time.monotonic() + self.grace_s * (1 - TO_END)
        if not self.holds:
            raise Interrupted(signum)
        signal.setitimer(signal.ITIMER_REAL, self.grace_s * TO_HOLD)

    def expire(self, signum: int, frame: FrameType | None) -> None:
        if self.holds and self.first is not None:
            raise Interrupted(self.first)


_signals = _Signals()


def install(grace_s: float = 25.0) -> None:
    """Takes over SIGINT and SIGTERM.

    Args:
        grace_s: from the first signal on, until the process must have ended.
    """
    _signals.grace_s = grace_s
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _signals.receive)
    signal.signal(signal.SIGALRM, _signals.expire)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Not to be interrupted half way: a signal waits for the end of this, as long as the grace time allows."""
    came_before = _signals.first
    _signals.holds += 1
    try:
        yield
    finally:
        _signals.holds -= 1
        if _signals.first is not None and not _signals.holds:
            signal.setitimer(signal.ITIMER_REAL, 0)
    if _signals.first != came_before and not _signals.holds and _signals.first is not None:
        raise Interrupted(_signals.first)


def time_left(otherwise: float) -> float:
    """Seconds until saving must have ended; `otherwise` where no signal has come."""
    return otherwise if _signals.first is None else max(0.0, _signals.deadline - time.monotonic())


def end_at_once(signum: int) -> None:
    """Kills what this process has started, and ends."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os.write(2, b"beam-rl: ended at once; --resume goes on from the last checkpoint, if there is one\n")
    os._exit(128 + signum)
