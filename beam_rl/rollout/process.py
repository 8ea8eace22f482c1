"""An engine's processes: none outlives its owner, and what they print lands in one file.

Linux only. Knows nothing about vLLM.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

OWNER = "BEAM_RL_ENGINE_OWNER"  # environment variable: pid of the process whose children must die with it
PR_SET_PDEATHSIG = 1
KILLED_S = 5.0  # for a killed process to be gone: a busy machine takes its time


def own_children() -> None:
    """Names this process as the owner; what it forks, and children that call `follow_owner`, die with it if it is killed."""
    os.environ[OWNER] = str(os.getpid())
    os.register_at_fork(after_in_child=follow_owner)  # also in what its children fork


def follow_owner() -> None:
    """In a process that an owner started, or one of its children did: dies with its parent. Elsewhere: nothing."""
    owner = int(os.environ.get(OWNER, 0))
    if owner in (0, os.getpid()):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not psutil.pid_exists(owner):  # it went before we asked
        os._exit(1)


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Sends stdout and stderr of this process, and for good those of children started meanwhile, to the end of `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        kept = [os.dup(1), os.dup(2)]
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, old in enumerate(kept, start=1):
                os.dup2(old, fd)
                os.close(old)


def last_lines(path: Path, count: int) -> str:
    """The last `count` lines of a text file, or "" if there is none."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


def ended(pids: Iterable[int]) -> bool:
    """Whether one of these processes has ended, waited for or not."""
    for pid in pids:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
    return False


def end(pids: list[int], grace_s: float) -> None:
    """Waits `grace_s` seconds for processes to end, then kills those that are left, and their children."""
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(alive, timeout=grace_s)
    for proc in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in (*proc.children(recursive=True), proc):
                child.kill()
    psutil.wait_procs(left, timeout=max(grace_s, KILLED_S))
