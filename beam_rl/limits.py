"""How many processes, threads and open files a recipe's run needs at once, and how many this user may have here.

An estimate from above for the machine where the run is started: of several nodes it has its share of ranks and engines.
"""

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from beam_rl.recipe.tree import Cluster, Recipe

# Measured in runs of the tiny recipes on two cores, and rounded up. Linux counts a thread as a process.
RAY_THREADS = 300  # its own processes, and the driver
THREADS = 130  # of a trainer's rank, an engine, or a worker of one
FILES = 512  # of the process that has most, without environments
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Needs:
    """Of a run."""

    threads: int  # without environments
    episodes: int  # under way at once in training: each is a process, and an open file of the driver's

    @property
    def processes(self) -> int:
        return self.threads + self.episodes

    @property
    def files(self) -> int:
        return FILES + self.episodes


def needs_of(recipe: Recipe) -> Needs:
    r = recipe.rollout
    crew = recipe.trainer.parallel.ranks + r.engines * (1 + r.parallel.workers)
    threads = RAY_THREADS + THREADS * _here(crew, recipe.cluster) + recipe.verifier.workers
    groups = math.ceil(r.prompts_per_step * r.over_sampling)
    if r.pace == "asynchronous":
        groups = r.prompts_per_step * (recipe.algorithm.staleness + 1)
    return Needs(threads, groups * r.samples_per_prompt if recipe.environment else 0)


def _here(crew: int, cluster: Cluster) -> int:
    """How many of them are on this machine; none where nobody knows: a Ray that was there before, of any number of nodes."""
    if cluster.address != "local" and cluster.nodes is None:
        return 0
    return -(-crew // (cluster.nodes or 1))


def process_room() -> tuple[int, str] | None:
    """How many more processes and threads this user may have, and which limit says so. None: there is none."""
    return min(_process_limits(), default=None)


def _process_limits() -> Iterator[tuple[int, str]]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid():  # root is not held to it
        yield soft - _own_threads(), "ulimit -u"
    with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
        held, most = (int((CGROUP / name).read_text()) for name in ("pids.current", "pids.max"))
        yield most - held, "the container's limit on processes"


def _own_threads() -> int:
    """Of all processes of this user."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):  # it has ended
            count += len(os.listdir(folder)) if folder.stat().st_uid == os.geteuid() else 0
    return count


def file_limit() -> int | None:
    """Open files that the driver may have, which raises its soft limit itself. None: any number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard
