"""`beam-rl` with an assassin: strikes one of the run's real processes at a chosen moment.

    python tests/killer.py PLAN train RECIPE …

PLAN is a `Strike` as JSON. The program under test is the product as it is; only the entry of one of its functions is
watched, so that a strike falls into the phase that it is meant for.
"""

import importlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

LOG = "BEAM_RL_STRIKES"  # environment variable: a file that gets a line for each strike


@dataclass(frozen=True)
class Strike:
    at: str  # "beam_rl.policy:Policy.update"
    nth: int  # call of it
    victim: str  # "driver", "rank 1", "engine 0", "verifier 0"
    delay_s: float = 0.0  # after the call has begun
    signal: str = "SIGKILL"

    def plan(self) -> str:
        return json.dumps(asdict(self))


def find(victim: str) -> psutil.Process:
    kind, _, index = victim.partition(" ")
    here = psutil.Process()
    if kind == "driver":
        return here
    children = here.children(recursive=True)
    if kind == "rank":  # it prints to its own log
        return next(p for p in children if any(f.path.endswith(f"trainer-{index}.log") for f in files(p)))
    mark = {"engine": "ray::Engine", "verifier": "beam_rl.verifiers.worker"}[kind]
    return sorted((p for p in children if mark in title(p)), key=lambda p: p.pid)[int(index)]


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def files(process: psutil.Process) -> list:
    try:
        return process.open_files()
    except psutil.Error:
        return []


def arm(strike: Strike) -> None:
    module, _, path = strike.at.partition(":")
    owner, _, name = path.rpartition(".")
    holder = importlib.import_module(module)
    holder = getattr(holder, owner) if owner else holder
    original, calls = getattr(holder, name), iter(range(1, 1_000_000))

    def watched(*args, **kwargs):
        if next(calls) == strike.nth:
            victim = find(strike.victim)  # before the call: what it takes must not shift the moment
            threading.Timer(strike.delay_s, hit, [strike, victim.pid]).start()
        return original(*args, **kwargs)

    setattr(holder, name, watched)


def hit(strike: Strike, pid: int) -> None:
    with Path(os.environ[LOG]).open("a") as file:
        file.write(json.dumps({"time": time.time(), "pid": pid} | asdict(strike)) + "\n")
    os.kill(pid, signal.Signals[strike.signal])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import beam_rl.cluster  # noqa: F401 (Ray reads what it sets)
    from beam_rl.cli import main

    arm(Strike(**json.loads(sys.argv.pop(1))))
    main()
