"""Where the ends of a weight sync are, and which transport that allows.

Knows nothing about Ray or vLLM.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from beam_rl.errors import InputError


class Place(NamedTuple):
    machine: str  # equal for processes that see each other under /proc
    gpu: str  # its UUID; "" on a CPU


def here(device: torch.device) -> Place:
    """Where this process is that computes on `device`."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return Place(machine, str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "")


def choose(asked: str, sender: Place, workers: Sequence[Place]) -> str:
    """The transport for `sync.transport = asked`; InputError if that can't work between these places.

    All on one GPU: CUDA IPC. All on GPUs of their own: NCCL, which refuses two processes on one. Else, and on CPUs: shared
    memory within a machine, Gloo between machines.
    """
    machines = {place.machine for place in workers}
    gpus = [sender.gpu, *(w.gpu for w in workers)]
    on_gpus = all(gpus)
    possible = {
        "ipc": on_gpus and len(set(gpus)) == 1,
        "nccl": on_gpus and len(set(gpus)) == len(gpus),
        "shm": machines == {sender.machine},
        "gloo": True,
    }
    if asked == "auto":
        return next(name for name, works in possible.items() if works)
    if not possible[asked]:
        needs = {
            "ipc": "all engines on the GPU of the first trainer rank",
            "nccl": "the first trainer rank and every engine's worker on a GPU of its own",
            "shm": "trainer and engines on one machine (in one container)",
        }
        raise InputError(f"sync.transport = {asked}: needs {needs[asked]}; use auto")
    return asked
