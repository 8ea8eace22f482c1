"""Waits for calls to all ranks of the trainer and, when they don't come back, says which rank is to blame.

A rank that dies is known within a second, whatever the others wait for. One that hangs holds the others up until their
operation's time limit, or it is the last one to answer. Knows nothing about what ranks compute.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTLE_S = 5.0  # between the first failure and the verdict: who fails first is often the victim
ANSWER_S = 3.0  # for a living rank to say what it is doing
GLOO_ERROR = re.compile(r"gloo/transport|Timed out waiting \d+ms|Connection closed by peer|DistBackendError")
NCCL_TIMEOUT = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(.*?OpType=(\w+)")
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')
FATAL = re.compile(r"Fatal Python error: (.+)")


class RankError(RuntimeError):
    """A rank of the trainer has died or does not go on; the message is one line that names it."""


@dataclass(frozen=True)
class Rank:
    """One rank, for people."""

    number: int
    place: str  # "dp 1, tp 0"; empty where there is one rank
    log: Path

    def __str__(self) -> str:
        return f"trainer rank {self.number}" + (f" ({self.place})" if self.place else "")


def gather(
    calls: Sequence[Any], ranks: Sequence[Rank], doing: str, limit_s: float, timeout_s: float | None = None
) -> list[Any]:
    """The results of one call to each rank.

    Args:
        calls: Ray's references, in the ranks' order.
        doing: what the ranks were asked for, in the words of an error.
        limit_s: for the others once the first has its result: ranks that wait for each other end together.
    Raises:
        RankError: a rank died or did not take part; which one.
        TimeoutError: not all were done after `timeout_s`.
        Exception: what a rank raised itself.
    """
    import ray

    waiting = {call: i for i, call in enumerate(calls)}
    results: dict[int, Any] = {}
    failures: dict[int, Exception] = {}
    asked = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    end = float("inf")
    while waiting:
        patience = min(end, asked) - time.monotonic()
        done, _ = ray.wait(list(waiting), timeout=None if patience == float("inf") else max(0.0, patience))
        if not done:
            break
        for call in done:
            i = waiting.pop(call)
            try:
                results[i] = ray.get(call)
            except ray.exceptions.RayError as error:
                failures[i] = error
                end = min(end, time.monotonic() + SETTLE_S)
        end = min(end, time.monotonic() + limit_s)
        if any(_has_died(error) and not _gave_up(ranks[i]) for i, error in failures.items()):
            break  # the others may wait for it for long
    if failures or (waiting and time.monotonic() < asked):
        raise verdict(failures, [ranks[i] for i in waiting.values()], ranks, doing, limit_s)
    if waiting:
        raise TimeoutError(f"{doing}: not done in {timeout_s:g} s")
    return [results[i] for i in range(len(calls))]


def verdict(
    failures: dict[int, Exception], silent: Sequence[Rank], ranks: Sequence[Rank], doing: str, limit_s: float
) -> Exception:
    """What to raise: the death of a rank, else a rank's own error, else who kept the others waiting."""
    at = time.strftime("%H:%M:%S")
    victims: list[str] = []
    for i, error in failures.items():
        if _has_died(error):
            if not (operation := _gave_up(ranks[i])):
                return RankError(
                    f"{ranks[i]} died at {at} while {doing}: {cause_of_death(ranks[i])}; its log is {ranks[i].log}"
                )
            victims.append(f"{ranks[i]} waited {limit_s:g} s in {operation}")
        elif hasattr(getattr(error, "cause", None), "engines"):  # a SyncError: an engine failed, and no rank
            return error
        elif operation := operation_of(error):
            victims.append(f"{ranks[i]} gave up in {operation}")
        else:
            return error
    waited = f": {victims[0]}" if victims else f" {limit_s:g} s after the others were done"
    if silent:
        rank = silent[0]
        return RankError(f"{rank} did not go on at {at} while {doing}{waited}; its log is {rank.log}")
    return RankError(f"the trainer's ranks lost each other at {at} while {doing}{waited}; see {ranks[0].log.parent}")


def operation_of(error: Exception) -> str | None:
    """The collective operation that a rank's error came from, and where it was called; None for any other error."""
    trace = str(getattr(error, "traceback_str", error))
    if not GLOO_ERROR.search(trace):
        return None
    frames = FRAME.findall(trace)
    names = [name for file, _, name in frames if file.endswith("distributed_c10d.py") and name != "wrapper"]
    callers = [(file, line, name) for file, line, name in frames if "/torch/" not in file]
    where = f" ({Path(callers[-1][0]).name}, line {callers[-1][1]})" if callers else ""
    return f"{names[-1] if names else callers[-1][2] if callers else 'a collective operation'}{where}"


def cause_of_death(rank: Rank) -> str:
    """What its log says; a process that is killed from outside has no last words."""
    found = FATAL.findall(_tail(rank.log))
    return found[-1] if found else "killed from outside (SIGKILL, which the kernel also sends when memory runs out)"


def _has_died(error: Exception) -> bool:
    import ray

    return isinstance(error, ray.exceptions.RayActorError)


def _gave_up(rank: Rank) -> str | None:
    """The operation in which NCCL's watchdog ended the process, if that is what happened."""
    found = NCCL_TIMEOUT.findall(_tail(rank.log))
    return found[-1] if found else None


def _tail(log: Path, size: int = 64 * 1024) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
