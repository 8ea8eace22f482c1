"""Seconds and peak memory of a piece of torch code, on a GPU or a CPU, and a short name for the machine."""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch

REPEATS, ENOUGH_S = 3, 20.0


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def machine(where: torch.device) -> str:
    """Such as "one NVIDIA H200", or "AMD EPYC, 1 thread"."""
    if where.type == "cuda":
        return f"one {torch.cuda.get_device_name(where)}"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    return f"{names[0] if names else 'CPU'}, {threads} thread{'s' if threads > 1 else ''}"


def free_bytes(where: torch.device) -> int:
    """Memory that a new allocation could take."""
    return torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else psutil.virtual_memory().available


def seconds(work: Callable[[], Any], where: torch.device) -> float:
    """The fastest of up to three runs, as many as begin within 20 s; whoever calls has warmed up."""
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < ENOUGH_S:
        _finish(where)
        start = time.perf_counter()
        work()
        _finish(where)
        times.append(time.perf_counter() - start)
    return min(times)


def peak_bytes(work: Callable[[], Any], where: torch.device) -> int:
    """What `work` holds at most beyond what was held before.

    On a CPU it is the process's own high-water mark, and what the allocator kept from earlier work would hide a part:
    call it in a fresh process.
    """
    if where.type == "cuda":
        _finish(where)
        torch.cuda.reset_peak_memory_stats(where)
        before = torch.cuda.memory_allocated(where)
        work()
        _finish(where)
        return torch.cuda.max_memory_allocated(where) - before
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from what is held now
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def in_fresh_process(work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)` in a process of its own, which ends with it.

    Raises:
        MemoryError: the process was killed.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(work, *args).result()
        except BrokenProcessPool:
            raise MemoryError(f"{work.__name__}: its process was killed, most likely for want of memory") from None


def _finish(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: memory can't be measured here")
