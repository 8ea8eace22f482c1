"""What this machine has, what a recipe would use of it, and how to mend what is missing.

Looks, and changes nothing but a test file on the NVMe that it removes. Starts neither torch on a GPU nor Ray.
"""

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from beam_rl.errors import InputError
from beam_rl.inputs import check_built, check_checkpoint
from beam_rl.limits import FILES, file_limit, needs_of, process_room
from beam_rl.recipe.tree import Recipe

GIB = 2**30
SHM_LEAST, DISK_LEAST = GIB, 20 * GIB
PROBE_BYTES = 256 * 2**20  # written and read where the NVMe is said to be
HUB_TIMEOUT_S = 5.0
Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, what was found, and what to do about it if it isn't right."""

    name: str
    status: Status
    found: str
    mend: str = ""


def examine(recipe: Recipe | None = None) -> list[Check]:
    """Every check that this machine, and the recipe if there is one, give a reason for."""
    gpus = find_gpus()
    checks = [*_python(), *_packages(bool(gpus)), *_gpus(gpus, recipe), *_memory(recipe), *_disk()]
    if recipe is not None:
        checks += [*_limits(recipe), *_model(recipe), *_nvme(recipe), *_ray(recipe), *_hub(recipe)]
    return checks


# --- this machine -----------------------------------------------------------------------------------------


def _python() -> Iterator[Check]:
    found = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    wanted = importlib.metadata.metadata("beam-rl")["Requires-Python"] or ""
    fits = sys.version_info[:2] == (3, 12)
    yield Check("python", "ok" if fits else "fail", found, "" if fits else f"beam-rl wants Python {wanted}")


def _packages(has_gpu: bool) -> Iterator[Check]:
    """The versions this package was tested with: those that its own metadata pins."""
    extra = "gpu" if _version("vllm") else "cpu"
    for requirement in importlib.metadata.requires("beam-rl") or []:
        pinned = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?==([\w.+-]+)\s*(?:;.*extra == ['\"](\w+)['\"])?", requirement)
        if not pinned or pinned[3] not in (None, extra):
            continue
        name, wanted, found = pinned[1], pinned[2], _version(pinned[1])
        same = found is not None and found.split("+")[0] == wanted
        status: Status = "ok" if same else "fail" if found is None else "warn"
        mend = "" if same else f"tested with {wanted}: uv sync --extra {extra}"
        yield Check(name, status, found or "not installed", mend)
    if has_gpu and extra == "cpu":
        yield Check("vllm", "fail", "the build for CPUs, on a machine with a GPU", "uv sync --extra gpu")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str
    total_mib: int
    used_mib: int
    capability: float


def find_gpus() -> list[Gpu]:
    """As the driver's own tool lists them; [] where there is none."""
    fields = "name,driver_version,memory.total,memory.used,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in listed.splitlines() if line.strip()]
    return [Gpu(name, driver, int(total), int(used), float(cap)) for name, driver, total, used, cap in rows]


def _gpus(gpus: list[Gpu], recipe: Recipe | None) -> Iterator[Check]:
    if not gpus:
        yield Check("gpu", "ok", "none: everything runs on the CPU")
        return
    first = gpus[0]
    yield Check("gpu", "ok", f"{len(gpus)} × {first.name}, {first.total_mib // 1024} GiB, driver {first.driver}")
    busy = [i for i, gpu in enumerate(gpus) if gpu.used_mib > 0.05 * gpu.total_mib]
    if busy:
        mend = "end what runs there, or set CUDA_VISIBLE_DEVICES"
        yield Check("gpu memory", "warn", f"in use on GPU {', '.join(map(str, busy))}", mend)
    if recipe and recipe.trainer.precision == "mxfp8" and first.capability < 10 and recipe.trainer.mxfp8.activations:
        mend = "trainer.mxfp8.activations=false, as vLLM multiplies there"
        yield Check("mxfp8", "warn", f"compute capability {first.capability}: MXFP8 is emulated", mend)


def _memory(recipe: Recipe | None) -> Iterator[Check]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Check("host memory", "ok" if total >= 8 * GIB else "warn", f"{total / GIB:.0f} GiB, {os.cpu_count()} cores")
    free = shutil.disk_usage("/dev/shm").free
    least = max(SHM_LEAST, 2 * recipe.sync.bucket_bytes if recipe else 0)
    mend = "" if free >= least else f"weight syncs and Ray want {least / GIB:.1f} GiB: mount it larger (--shm-size)"
    yield Check("/dev/shm", "warn" if mend else "ok", f"{free / GIB:.1f} GiB free", mend)


def _disk() -> Iterator[Check]:
    free = shutil.disk_usage(".").free
    mend = "" if free >= DISK_LEAST else "checkpoints need room: start in a folder of another disk, or use --out"
    yield Check("disk", "warn" if mend else "ok", f"{free / GIB:.0f} GiB free here", mend)


# --- what a recipe wants ----------------------------------------------------------------------------------


def _limits(recipe: Recipe) -> Iterator[Check]:
    """What a run has at once; without environments' processes it can start, and their responses fail one by one."""
    needs, files = needs_of(recipe), file_limit()
    yield _limit("processes", needs.processes, needs.threads, process_room(), " more", needs.episodes)
    limit = None if files is None else (files, "ulimit -Hn")
    yield _limit("open files", needs.files, FILES, limit, "", needs.episodes)


def _limit(name: str, needed: int, least: int, limit: tuple[int, str] | None, more: str, episodes: int) -> Check:
    """needed, least: with the environments of so many episodes, and without; limit: None, or how many, and what says so."""
    found = f"up to {needed}{f', {episodes} of them environments' if episodes else ''}; there may be "
    if limit is None:
        return Check(name, "ok", found + "any number", "")
    there, which = limit
    found += f"{there}{more} ({which})"
    if there >= needed:
        return Check(name, "ok", found, "")
    fewer = ", or fewer rollout.prompts_per_step · samples_per_prompt" if episodes else ""
    return Check(name, "warn" if there >= least else "fail", found, f"raise {which}{fewer}")


def _model(recipe: Recipe) -> Iterator[Check]:
    from beam_rl.tiny.sizes import SIZES

    name = recipe.model.path
    if name in SIZES or not Path(name).is_dir():
        where = "made on first use" if name in SIZES else "not a folder here: the hub is asked for it"
        yield Check("model.path", "ok", f"{name}: {where}")
        return
    try:
        check_built(recipe, Path(name).resolve(), check_checkpoint(Path(name)))
        missing = missing_weights(Path(name))
    except InputError as error:
        yield Check("model.path", "fail", str(error), "name the folder of a checkpoint that can be trained")
        return
    if missing:
        yield Check(
            "model.path", "fail", f"{len(missing)} of its files are not there, such as {missing[0]}", "fetch them"
        )
    else:
        size = sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
        yield Check("model.path", "ok", f"{name}: {size / 1e9:.3g} GB of weights, every file there")


def missing_weights(folder: Path) -> list[str]:
    """Files that the checkpoint's index names and the folder lacks."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        raise InputError(f"{index}: can't be read as a checkpoint's index") from None
    return sorted(name for name in named if not (folder / name).is_file())


def _nvme(recipe: Recipe) -> Iterator[Check]:
    path, key = recipe.trainer.optimizer.nvme.path, "trainer.optimizer.nvme.path"
    if path is None:
        return
    folder = Path(path)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Check(key, "fail", f"{path}: no folder that can be written to", "make it, on a local NVMe")
        return
    try:
        written, read, direct = disk_rates(folder)
    except OSError as error:
        yield Check(key, "fail", f"{path}: {error.strerror}", "make room there, or name another disk")
        return
    free = shutil.disk_usage(folder).free
    found = f"writes {written / 1e9:.1f}, reads {read / 1e9:.1f} GB/s, {free / 1e9:,.0f} GB free"
    mend = "" if direct else "it refuses direct I/O: a local disk's file system would be faster"
    yield Check(key, "ok" if direct else "warn", found, mend)


def disk_rates(folder: Path) -> tuple[float, float, bool]:
    """Bytes a second written and read back in one stream, and whether past the page cache. OSError if it can't be done."""
    from beam_rl.megatron.nvme.disk import DiskError, File, Threads, aligned

    threads, memory = Threads(), aligned(PROBE_BYTES)

    def rate(act: Callable[..., list[Any]]) -> float:
        start = time.perf_counter()
        for request in act(threads, 0, memory):
            request.result()
        return PROBE_BYTES / (time.perf_counter() - start)

    with tempfile.TemporaryDirectory(prefix=".beam-rl-doctor-", dir=folder) as scratch:
        try:
            file = File(Path(scratch, "probe"), PROBE_BYTES, create=True)
            written, read = rate(file.write), rate(file.read)
            file.close()
        except DiskError as error:
            raise error.__cause__ or error from None
        finally:
            threads.close()
    return written, read, file.direct


def _ray(recipe: Recipe) -> Iterator[Check]:
    address = recipe.cluster.address
    if address.count(":") != 1:
        yield Check(
            "cluster.address", "ok", f"{address}: " + ("Ray starts with the run" if address == "local" else "joined")
        )
        return
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=HUB_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        yield Check(
            "cluster.address", "fail", f"{address}: nobody answers ({error})", "ray start --head, or use `local`"
        )
        return
    yield Check("cluster.address", "ok", f"{address} answers")


def _hub(recipe: Recipe) -> Iterator[Check]:
    """Only where the recipe names something that is not on this machine."""
    from beam_rl.tiny.sizes import SIZES

    sources = [recipe.model.path, recipe.data.train.path, *([recipe.data.eval.path] if recipe.data.eval else [])]
    wanted = [name for name in sources if name not in SIZES and not Path(name).exists()]
    if not wanted:
        return
    from urllib.parse import urlparse

    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    what, endpoint = f"for {wanted[0]}", urlparse(ENDPOINT)
    mend = "download it where there is a network, and name the folder or file"
    if HF_HUB_OFFLINE:
        yield Check("hub", "warn", f"{what}: HF_HUB_OFFLINE is set, so only its cache is asked", mend)
        return
    try:
        port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
        socket.create_connection((endpoint.hostname or "", port), timeout=HUB_TIMEOUT_S).close()
    except OSError as error:
        yield Check("hub", "fail", f"{what}: {ENDPOINT} can't be reached ({error})", mend)
        return
    yield Check("hub", "ok", f"{what}: reachable")
