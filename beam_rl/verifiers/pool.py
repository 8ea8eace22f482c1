"""Grades mathematical answers in processes that can be killed.

Promises one verdict per item, in order, within the time limit of each, whatever the model wrote: no exception, no
second reward, no alarm signal in this process, from any thread. Knows nothing about mathematics.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import beam_rl
from beam_rl.verifiers.extract import extract_answer
from beam_rl.verifiers.types import Verdict, VerifyItem

START_LIMIT_S = 120.0  # to import SymPy, on a machine that is busy with other things
MEMORY_BYTES = 2 * 2**30  # address space of one worker; an idle one takes about 0.3 GiB
MAX_ANSWER_CHARACTERS = 4000  # a longer "answer" is not one


@dataclass
class _Worker:
    """A grading process and what it is doing."""

    process: subprocess.Popen[str]
    deadline: float  # of the start, or of the item at hand
    ready: bool = False
    item: int | None = None  # index of the item at hand


class VerifierPool:
    """Workers that live as long as the pool, or until an answer has to be cut short.

    Attributes:
    """

    def __init__(self, workers: int = 2, timeout_s: float = 5.0, memory_bytes: int = MEMORY_BYTES) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()  # one scoring at a time; callers may be threads
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._start()

    def score(self, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One verdict per item, in order: score 1.0 where the response's final answer equals the gold one."""
        verdicts: list[Verdict | None] = [None] * len(items)
        waiting: deque[tuple[int, str]] = deque()
        for i, item in enumerate(items):
            answer = extract_answer(item.response, finished=item.finish_reason != "length")
            if len(item.gold) > MAX_ANSWER_CHARACTERS:
                verdicts[i] = Verdict(0.0, error=f"the gold answer has {len(item.gold)} characters")
            elif answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
                verdicts[i] = Verdict(0.0)
            else:
                waiting.append((i, json.dumps({"gold": item.gold, "answer": answer})))
        with self._lock:
            while waiting or any(worker.item is not None for worker in self._workers):
                self._hand_out(waiting)
                for i, verdict in self._collect():
                    verdicts[i] = verdict
        return [verdict or Verdict(0.0, error="not graded") for verdict in verdicts]

    def close(self) -> None:
        """Ends the workers; the pool can't score after that."""
        with self._lock:
            for worker in list(self._workers):
                self._stop(worker)
            self._selector.close()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        package_root = str(Path(beam_rl.__file__).parents[1])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "beam_rl.verifiers.worker",
                str(self._memory_bytes),
                str(self._timeout_s),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the run, which then closes its pool
        )
        worker = _Worker(process, time.monotonic() + START_LIMIT_S)
        self._workers.append(worker)
        assert process.stdout
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)

    def _stop(self, worker: _Worker) -> int:
        """Kills one worker and returns its exit status."""
        assert worker.process.stdin and worker.process.stdout
        self._selector.unregister(worker.process.stdout)
        self._workers.remove(worker)
        worker.process.kill()
        status = worker.process.wait()
        worker.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # it died with a line unread
            worker.process.stdin.close()
        return status

    def _hand_out(self, waiting: deque[tuple[int, str]]) -> None:
        """Gives each idle worker an item. A line is far shorter than a pipe's buffer, so writing can't block."""
        for worker in list(self._workers):
            if not waiting or not worker.ready or worker.item is not None:
                continue
            index, line = waiting[0]
            assert worker.process.stdin
            try:
                worker.process.stdin.write(line + "\n")
            except BrokenPipeError:  # it died while idle
                self._stop(worker)
                self._start()
                continue
            waiting.popleft()
            worker.item, worker.deadline = index, time.monotonic() + self._timeout_s

    def _collect(self) -> list[tuple[int, Verdict]]:
        """Waits for a reply, a start or a deadline; returns the verdicts that have come to be."""
        busy = [worker for worker in self._workers if worker.item is not None or not worker.ready]
        patience = min((worker.deadline for worker in busy), default=time.monotonic()) - time.monotonic()
        verdicts = []
        for key, _ in self._selector.select(max(0.0, patience)):
            verdicts += self._hear(key.data)
        for worker in [w for w in self._workers if w in busy and time.monotonic() >= w.deadline]:
            if not worker.ready:
                raise RuntimeError(f"verifier.workers: a grading process did not start in {START_LIMIT_S:.0f} s")
            if worker.item is None:
                continue
            verdicts.append((worker.item, Verdict(0.0, timed_out=True)))
            self._stop(worker)
            self._start()
        return verdicts

    def _hear(self, worker: _Worker) -> list[tuple[int, Verdict]]:
        """Takes a worker's line: that it has started, or its verdict. No line: it died."""
        assert worker.process.stdout
        line = worker.process.stdout.readline()
        index, worker.item = worker.item, None
        if not line.endswith("\n"):
            status = self._stop(worker)
            if not worker.ready:
                raise RuntimeError(f"verifier.workers: a grading process ended at its start (exit status {status})")
            self._start()
            return [] if index is None else [(index, Verdict(0.0, error=f"the grading process died ({status})"))]
        if index is None:
            worker.ready = True
            return []
        reply = json.loads(line)
        if reply["error"] and reply["error"].startswith("MemoryError"):  # what it left half done is not to be trusted
            self._stop(worker)
            self._start()
        return [(index, Verdict(float(reply["right"]), error=reply["error"]))]
