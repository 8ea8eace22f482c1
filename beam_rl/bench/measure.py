"""Seconds and peak memory of a piece of torch code, on a GPU or a CPU, and a short name for the machine."""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

RUNS, ENOUGH_S = 4, 20.0


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
    return torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else _proc_bytes("meminfo", "MemAvailable")


def peak_and_seconds(work: Callable[[], Any], where: torch.device) -> tuple[int, float]:
    """What `work` holds at most beyond what was held before, and the fastest of up to four runs, begun within 20 s.

    On a CPU the peak is the process's own high-water mark, and what the allocator kept from earlier work would hide a
    part: call it in a fresh process.
    """
    before = held(where)
    times = [seconds(work, where)]
    peak = high_water(where) - before
    while len(times) < RUNS and sum(times) < ENOUGH_S:
        times.append(seconds(work, where))
    return peak, min(times)


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


def seconds(work: Callable[[], Any], where: torch.device) -> float:
    """That one run takes, what it has put on the GPU included."""
    start = time.perf_counter()
    work()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter() - start


def held(where: torch.device) -> int:
    """Bytes held now, from which the high-water mark starts again."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        torch.cuda.reset_peak_memory_stats(where)
        return torch.cuda.memory_allocated(where)
    Path("/proc/self/clear_refs").write_text("5")
    return _proc_bytes("self/status", "VmRSS")


def high_water(where: torch.device) -> int:
    """Bytes held at most since the last `held`."""
    return torch.cuda.max_memory_allocated(where) if where.type == "cuda" else _proc_bytes("self/status", "VmHWM")


def _proc_bytes(file: str, field: str) -> int:
    for line in Path("/proc", file).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{file} has no {field}: memory can't be measured here")
