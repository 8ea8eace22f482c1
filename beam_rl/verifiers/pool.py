"""Grades mathematical answers, or whatever a user's function judges, in processes that can be killed.

Promises one verdict per item, in order, within the time limit of each, whatever the model wrote: no exception, no
second reward, no alarm signal in this process, from any thread. A worker that dies or is stopped from outside is
replaced and its item judged anew, once. Knows nothing about mathematics.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import beam_rl
from beam_rl.credentials import without_secrets
from beam_rl.errors import InputError
from beam_rl.verifiers.extract import extract_answer
from beam_rl.verifiers.types import Verdict, VerifyItem

START_LIMIT_S = 120.0  # to import SymPy, on a machine that is busy with other things
MEMORY_BYTES = 2 * 2**30  # address space of one worker; an idle one takes about 0.3 GiB
MAX_ANSWER_CHARACTERS = 4000  # a longer "answer" is not one
MAX_TRIES = 2  # of an item whose worker was lost: it may have been the item's own doing
MAX_FAILED_STARTS = 3  # in a row, after which it is not chance


@dataclass
class _Item:
    """Something to grade."""

    index: int  # of its verdict
    line: str  # for the worker
    tries: int = 0


@dataclass
class _Worker:
    """A grading process and what it is doing."""

    process: subprocess.Popen[str]
    deadline: float  # of the start, or of the item at hand
    ready: bool = False
    item: _Item | None = None


class VerifierPool:
    """Workers that live as long as the pool, or until an answer has to be cut short."""

    def __init__(
        self,
        workers: int = 2,
        timeout_s: float = 5.0,
        memory_bytes: int = MEMORY_BYTES,
        function: str | None = None,
    ) -> None:
        """function: `module:name` or `FILE.py:name` of what grades (`worker.load`); None: mathematical answers."""
        self._function = function
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()  # one scoring at a time; callers may be threads
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._failed_starts = 0  # in a row
        self._closing = False
        for _ in range(workers):
            self._start()

    def score(self, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One verdict per item, in order: 1.0 where the response's final answer equals the gold one, or the function's.

        Raises InputError where the function can't be loaded.
        """
        verdicts: list[Verdict | None] = [None] * len(items)
        waiting: deque[_Item] = deque()
        for i, item in enumerate(items):
            if self._function:
                waiting.append(_Item(i, json.dumps([item.response, item.gold, item.finish_reason])))
                continue
            answer = extract_answer(item.response, finished=item.finish_reason != "length")
            if len(item.gold) > MAX_ANSWER_CHARACTERS:
                verdicts[i] = Verdict(0.0, error=f"the gold answer has {len(item.gold)} characters")
            elif answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
                verdicts[i] = Verdict(0.0)
            else:
                waiting.append(_Item(i, json.dumps([item.gold, answer])))
        with self._lock:
            try:
                while waiting or any(worker.item for worker in self._workers):
                    if self._closing:
                        raise RuntimeError("the verifier was closed")
                    self._hand_out(waiting)
                    for i, verdict in self._collect(waiting):
                        verdicts[i] = verdict
            finally:  # an interrupt leaves items at hand, whose verdicts must not be taken for the next ones'
                for worker in [worker for worker in self._workers if worker.item]:
                    self._replace(worker)
        return [verdict or Verdict(0.0, error="not graded") for verdict in verdicts]

    def close(self) -> None:
        """Ends the workers; the pool can't score after that, and what is being scored now is broken off."""
        self._closing = True
        for worker in list(self._workers):
            worker.process.kill()
        with self._lock:
            for worker in list(self._workers):
                self._stop(worker)
            self._selector.close()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        arguments = [str(self._memory_bytes), str(self._timeout_s), *([self._function] if self._function else [])]
        process = start_worker("beam_rl.verifiers.worker", arguments, self._function is not None, pipe=subprocess.PIPE)
        worker = _Worker(process, time.monotonic() + START_LIMIT_S)
        self._workers.append(worker)
        assert process.stdout
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)

    def _stop(self, worker: _Worker) -> int:
        """Kills one worker and returns its exit status."""
        assert worker.process.stdin and worker.process.stdout
        self._selector.unregister(worker.process.stdout)
        self._workers.remove(worker)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)  # and what a user's function has started
        status = worker.process.wait()
        worker.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # it died with a line unread
            worker.process.stdin.close()
        return status

    def _replace(self, worker: _Worker) -> int:
        """Kills a worker and starts another one; returns the exit status.

        Raises RuntimeError where one after the other does not start.
        """
        status = self._stop(worker)
        self._failed_starts = 0 if worker.ready else self._failed_starts + 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RuntimeError(
                f"verifier.workers: {MAX_FAILED_STARTS} grading processes in a row did not start (the last one's exit "
                f"status is {status})"
            )
        self._start()
        return status

    def _hand_out(self, waiting: deque[_Item]) -> None:
        """Gives each idle worker an item. It reads what it is given, so writing can't block for long."""
        for worker in list(self._workers):
            if not waiting or not worker.ready or worker.item:
                continue
            assert worker.process.stdin
            try:
                worker.process.stdin.write(waiting[0].line + "\n")
            except BrokenPipeError:  # it died while idle
                self._replace(worker)
                continue
            worker.item, worker.deadline = waiting.popleft(), time.monotonic() + self._timeout_s
            worker.item.tries += 1

    def _collect(self, waiting: deque[_Item]) -> list[tuple[int, Verdict]]:
        """Waits for a reply, a start or a deadline; returns the verdicts that have come to be."""
        busy = [worker for worker in self._workers if worker.item or not worker.ready]
        patience = min((worker.deadline for worker in busy), default=time.monotonic()) - time.monotonic()
        verdicts = []
        for key, _ in self._selector.select(max(0.0, patience)):
            verdicts += self._hear(key.data, waiting)
        for worker in [w for w in self._workers if w in busy and time.monotonic() >= w.deadline]:
            if worker.item and _is_stopped(worker.process.pid) and worker.item.tries < MAX_TRIES:
                waiting.appendleft(worker.item)
            elif worker.item:
                verdicts.append((worker.item.index, Verdict(0.0, timed_out=True)))
            elif worker.ready:
                continue
            self._replace(worker)
        return verdicts

    def _hear(self, worker: _Worker, waiting: deque[_Item]) -> list[tuple[int, Verdict]]:
        """Takes a worker's line: that it has started, or its verdict. No line: it died."""
        assert worker.process.stdout
        line = worker.process.stdout.readline()
        item, worker.item = worker.item, None
        if not line.endswith("\n"):
            status = self._replace(worker)
            if item and item.tries < MAX_TRIES:
                waiting.appendleft(item)
                return []
            return [(item.index, Verdict(0.0, error=f"the grading process died ({status})"))] if item else []
        if item is None:
            if line != "ready\n":
                raise InputError(f"verifier.name = {self._function}: {line.strip()}")
            worker.ready = True
            return []
        reply = json.loads(line)
        if reply["error"] and reply["error"].startswith("MemoryError"):  # what it left half done is not to be trusted
            self._replace(worker)
        return [(item.index, Verdict(reply["score"], error=reply["error"]))]


def start_worker(
    module: str, arguments: Sequence[str], own_code: bool, pipe: int = subprocess.DEVNULL, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[str]:
    """A process for code that the run does not trust with anything: no keys, no terminal, a session of its own.

    Args:
        own_code: whether it may import what lies where the command was given, as a recipe's module does.
        pipe: what its standard input and output are.
    """
    package_root = str(Path(beam_rl.__file__).parents[1])
    own = os.getcwd() if own_code else None
    path = os.pathsep.join(filter(None, [package_root, own, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
        env=without_secrets(os.environ) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C is for the run, which then closes its pool
    )


def _is_stopped(pid: int) -> bool:
    """Whether someone has stopped the process, which is then not slow by its own doing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
