"""Adam's state streamed from files: seconds an update beside what the disk alone needs for the same bytes.

The store, the pipeline and the arithmetic are those of a run. Weights and gradients are not: one small tensor of each
stands for all, so that the memory measured is what streaming takes.
"""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from beam_rl.bench.result import AsJson, Result, show

if TYPE_CHECKING:
    import torch

    from beam_rl.megatron.nvme.adam import BlockAdam
    from beam_rl.megatron.nvme.layout import Layout
    from beam_rl.megatron.nvme.store import FileStore, Sections

SHARD = 2**22  # elements of the tensor that stands for all
MIB = 2**20
BYTES = 12  # of state for a BF16 weight: FP32 main copy and moments
# Plain I/O: requests under way, MiB of each, how many of one direction before as many of the other.
TRIES = ((4, 1, 1), (8, 1, 1), (16, 1, 1), (16, 1, 16), (16, 1, 64), (32, 1, 1), (32, 1, 64), (8, 4, 1), (8, 4, 16))
ROUNDS = 4  # the fastest of each counts: other work on the machine only ever slows it down


@dataclass(frozen=True)
class Case:
    folder: Path
    state_bytes: int
    block_bytes: int
    threads: int


@dataclass(frozen=True)
class Measured:
    """Of one update, or of moving its bytes."""

    read_bytes: int
    write_bytes: int
    direct: bool
    seconds: list[float]
    serial_seconds: list[float]
    plain_seconds: list[float]
    cached_seconds: list[float]  # plain I/O through buffers so small that they stay in the CPU's caches
    plain_way: tuple[int, int, int]  # as in TRIES
    update_seconds: float  # the arithmetic alone, from memory
    peak_bytes: int  # of host memory, beyond what was held before
    staging_bytes: int


def nvme(
    folder: Annotated[Path, typer.Option(help="On the disk to measure; twice the state goes there and is removed.")],
    gigabytes: Annotated[float, typer.Option(min=0.05, help="Of optimizer state: 12 bytes a BF16 parameter.")] = 4.0,
    block_bytes: Annotated[int, typer.Option(min=65536, help="As trainer.optimizer.nvme.block_bytes.")] = 64 * 2**20,
    as_json: AsJson = False,
) -> None:
    """Optimizer state on NVMe: reading, updating and writing all of it, block by block and all at once.

    The figure is seconds an update; the limit is its bytes over the disk's own best rate, reading and writing at once
    with nothing else to do, through as much memory. The serial order (read, update, write each block in turn) is timed
    beside it.
    """
    show(bench(folder, int(gigabytes * 1e9), block_bytes), as_json)


def bench(folder: Path, state_bytes: int, block_bytes: int) -> Result:
    """Measures the size asked for, and the memory of a quarter of it, each in a process of its own."""
    import torch

    from beam_rl.bench import measure

    typer.echo(f"measuring {state_bytes / 1e9:g} GB of state in {folder}", err=True)
    small, whole = (
        measure.in_fresh_process(run, Case(folder, size, block_bytes, torch.get_num_threads()))
        for size in (state_bytes // 4, state_bytes)
    )
    seconds, plain, serial = min(whole.seconds), min(whole.plain_seconds), min(whole.serial_seconds)
    moved = whole.read_bytes + whole.write_bytes
    detail: dict[str, Any] = {
        "state_gb": whole.read_bytes / 1e9,
        "read_bytes": whole.read_bytes,
        "write_bytes": whole.write_bytes,
        "block_bytes": block_bytes,
        "direct_io": whole.direct,
        "gb_per_second": moved / seconds / 1e9,
        "disk_gb_per_second": moved / plain / 1e9,
        "disk_requests_under_way": whole.plain_way[0],
        "disk_request_bytes": whole.plain_way[1] * MIB,
        "disk_requests_of_one_direction": whole.plain_way[2],
        "update_over_disk": seconds / plain,
        "serial_seconds": serial,
        "serial_over_pipelined": serial / seconds,
        "arithmetic_seconds": whole.update_seconds,
        "all_pipelined_seconds": whole.seconds,
        "all_serial_seconds": whole.serial_seconds,
        "all_disk_seconds": whole.plain_seconds,
        "all_disk_through_caches_seconds": whole.cached_seconds,
        "staging_bytes": whole.staging_bytes,
        "quarter_peak_bytes": small.peak_bytes,
        "whole_peak_bytes": whole.peak_bytes,
    }
    return Result("nvme", seconds, "s", plain, measure.machine(measure.device()), detail)


def run(case: Case) -> Measured:
    """In a process of its own."""
    import torch

    from beam_rl.bench import measure
    from beam_rl.megatron.nvme.disk import aligned
    from beam_rl.megatron.nvme.pipeline import Pipeline
    from beam_rl.megatron.nvme.store import FileStore

    torch.set_num_threads(case.threads)
    folder, device = case.folder / "beam-rl-bench", measure.device()
    layout, adam = _state(case, device)
    update = _update(layout, adam)
    arithmetic = _arithmetic(layout, update, device)
    store = FileStore.create(folder, layout, lambda index, sections: None)
    try:
        measure.held(torch.device("cpu"))
        before = measure.high_water(torch.device("cpu"))
        pipeline = Pipeline(store, device)
        _step(store, pipeline, update)  # both generations have been written once
        peak = measure.high_water(torch.device("cpu")) - before
        done = store.read_bytes, store.write_bytes
        serial = Pipeline(store, device, slots=1)
        memory = memoryview(aligned(max(pipeline.staging_bytes, 32 * 4 * MIB)).numpy())
        way = min(TRIES, key=lambda way: _plain(store, min(layout.nbytes, 2**30), memory, *way))
        rounds: dict[str, list[float]] = {"pipelined": [], "plain": [], "serial": [], "cached": []}
        cached = memory[: way[0] * way[1] * MIB]
        work: dict[str, Callable[[], float]] = {
            "plain": lambda: _plain(store, layout.nbytes, memory, *way),
            "pipelined": lambda: _step(store, pipeline, update),
            "cached": lambda: _plain(store, layout.nbytes, cached, *way),
            "serial": lambda: _step(store, serial, update),
        }
        for number in range(ROUNDS):
            # A disk that saves up for bursts is fastest after the serial order, where it rests: each comes there in turn.
            for name in ("plain", "pipelined")[:: 1 - 2 * (number % 2)] + ("cached", "serial"):
                rounds[name].append(work[name]())
        moved = store.read_bytes - done[0], store.write_bytes - done[1]
        return Measured(
            read_bytes=moved[0] // (2 * ROUNDS),
            write_bytes=moved[1] // (2 * ROUNDS),
            direct=store.direct,
            seconds=rounds["pipelined"],
            serial_seconds=rounds["serial"],
            plain_seconds=rounds["plain"],
            cached_seconds=rounds["cached"],
            plain_way=way,
            update_seconds=arithmetic,
            peak_bytes=peak,
            staging_bytes=pipeline.staging_bytes,
        )
    finally:
        store.close(discard=True)
        shutil.rmtree(folder, ignore_errors=True)


def _state(case: Case, device: "torch.device") -> "tuple[Layout, BlockAdam]":
    """As many parameters as the size wants, which all are the same tensor."""
    import torch

    from beam_rl.megatron.nvme.adam import BlockAdam, Target
    from beam_rl.megatron.nvme.layout import Shard, plan

    count = max(1, case.state_bytes // BYTES // SHARD)
    numel = min(SHARD, case.state_bytes // BYTES)
    shards = [Shard(f"parameter {i}", (numel,), 0, numel, 0, has_main=True) for i in range(count)]
    layout = plan(shards, case.block_bytes, torch.float32)
    weight, key = torch.zeros(numel, dtype=torch.bfloat16, device=device), torch.zeros(numel, device=device)
    key.grad = torch.randn(numel, generator=torch.Generator(device).manual_seed(0), device=device)
    return layout, BlockAdam(_adam(device), [Target(weight, key)] * count)


def _adam(device: "torch.device") -> "torch.optim.Optimizer":
    """Of the class that Megatron takes on this machine."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1, device=device))
    settings: dict[str, Any] = {"lr": 1e-6, "betas": (0.9, 0.95), "weight_decay": 0.1}
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError:
        return torch.optim.AdamW([parameter], **settings)
    return FusedAdam([parameter], **settings)


def _update(layout: "Layout", adam: "BlockAdam") -> "Callable[[int, Sections], None]":
    group = {name: value for name, value in adam.adam.param_groups[0].items() if name != "params"}

    def update(index: int, sections: "Sections") -> None:
        adam.update(layout.blocks[index], sections, group, updates=1)

    return update


def _arithmetic(layout: "Layout", update: "Callable[[int, Sections], None]", device: "torch.device") -> float:
    """Seconds for all blocks, as if each were in memory already."""
    import torch

    block = layout.blocks[0]
    sections = {kind: torch.zeros(block.numel, dtype=layout.dtype(kind), device=device) for kind in layout.kinds(True)}
    update(0, sections)  # what the first one imports does not count
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        update(0, sections)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best * layout.elements / block.numel


def _step(store: "FileStore", pipeline: Any, update: "Callable[[int, Sections], None]") -> float:
    start = time.perf_counter()
    pipeline.run(update)
    store.commit(store.updates + 1)
    return time.perf_counter() - start


def _plain(store: "FileStore", nbytes: int, memory: memoryview, depth: int, request_mib: int, burst: int) -> float:
    """Seconds to read so many bytes of one generation and write as many of the other, which nobody needs, at once.

    memory: what they pass through, all of it in turn. A virtual disk copies, and is faster where that stays in a cache.
    """
    request = request_mib * MIB
    ends = [(start, min(request, nbytes - start)) for start in range(0, nbytes, request)]
    handles = [os.open(store.path(g), os.O_RDWR | os.O_DIRECT) for g in (store.generation, 1 - store.generation)]
    places = len(memory) // request
    ways = tuple(zip((os.preadv, os.pwritev), handles, strict=True))
    bursts = [ends[i : i + burst] for i in range(0, len(ends), burst)]
    # Whoever is free takes the next one.
    calls = iter(list(enumerate((*way, end) for some in bursts for way in ways for end in some)))

    def work() -> None:
        for number, (call, handle, (start, size)) in calls:
            place = number % places * request
            moved = call(handle, [memory[place : place + size]], start)
            assert moved == size

    try:
        with ThreadPoolExecutor(depth) as pool:
            start = time.perf_counter()
            for done in [pool.submit(work) for _ in range(depth)]:
                done.result()
            os.fdatasync(handles[1])
            return time.perf_counter() - start
    finally:
        for handle in handles:
            os.close(handle)
