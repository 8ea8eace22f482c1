"""Ray for one run: starts it or joins it, places the trainer's ranks and the engines, and leaves nothing behind.

Starts every process of a run but the verifier's. Knows nothing about the algorithm.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from beam_rl.engines import Engines
from beam_rl.errors import InputError
from beam_rl.interrupts import Interrupted
from beam_rl.policy import Policy
from beam_rl.recipe.tree import Recipe
from beam_rl.seats import reserved
from beam_rl.step import Display
from beam_rl.sync import WeightSync
from beam_rl.turns import Turns

# Ray reads these when it is imported, so they stand before that.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # or every worker rebuilds the environment of `uv run`
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

SOCKET_PATH_LIMIT = 40  # characters of the folder: Ray puts Unix sockets some 65 below it, and Linux allows 107


class Cluster:
    """The trainer's ranks and the engines of one run, as a context: whatever happens inside, all processes end.

    The two start at the same time, or one after the other where they share GPUs. `policy`, `engines`, the `sync` and the
    `turns` between them are ready when the context is entered.
    """

    def __init__(self, recipe: Recipe, model_path: Path, logs: Path, display: Display) -> None:
        self.recipe, self.model_path, self.logs, self.display = recipe, model_path, logs, display
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            stack.enter_context(ray_session(self.recipe.cluster.address, self.logs, slots_of(self.recipe)))
            with self.display.phase("starting trainer and engines", once=True):
                seats = stack.enter_context(reserved(self.recipe))
                engines = Engines(self.recipe, self.model_path, self.logs, seats)
                self.engines = engines if seats.shared_gpus else stack.enter_context(engines)
                self.policy = stack.enter_context(Policy(self.recipe, self.model_path, self.logs, seats))
                if seats.shared_gpus:  # vLLM takes its memory at its start
                    self._wait_ready(self.policy.starting)
                    self.policy.put_on_gpu("nothing")
                    stack.enter_context(engines)
                self._wait_ready([*self.policy.starting, *self.engines.starting])
            self.turns = Turns(self.policy, self.engines, seats.shared_gpus)
            self.sync = WeightSync(self.policy, self.engines, self.recipe.sync, seats.ranks[0].host)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(None, None, None)

    def _wait_ready(self, starting: list[Any]) -> None:
        """Waits for all; the first one that fails ends the wait with its own error."""
        import ray

        timeout_s = self.recipe.cluster.start_timeout_s
        end = time.monotonic() + timeout_s
        while starting:
            done, starting = ray.wait(starting, timeout=max(0.0, end - time.monotonic()))
            if not done:
                raise InputError(
                    f"cluster.start_timeout_s = {timeout_s:g}: trainer and engines were not ready by then; their logs "
                    f"are in {self.logs}"
                )
            try:
                ray.get(done)
            except ray.exceptions.RayActorError:
                if done[0] in self.policy.starting:
                    self.policy.wait_ready()  # says which rank, and why
                raise


@contextlib.contextmanager
def ray_session(address: str, logs: Path, slots: int = 0) -> Iterator[None]:
    """Ray, started on this machine's loopback for `local`, else joined; shut down at the end.

    A Ray that this process is connected to already is used, and left as it is.

    slots: CPU slots that the run needs at least; they are not cores.
    """
    if address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's name for "listen on the loopback alone"
    import ray

    if ray.is_initialized():
        yield
        return
    if address != "local":
        _join(address)
        try:
            yield
        finally:
            ray.shutdown()
        return
    folder = _short_folder(logs)
    try:
        _init(
            num_cpus=max(16, os.cpu_count() or 1, slots),
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
            object_store_memory=512 * 2**20,
        )
        yield
    finally:
        ray.shutdown()
        _keep_worker_logs(folder, logs / "ray")
        shutil.rmtree(folder, ignore_errors=True)


def slots_of(recipe: Recipe) -> int:
    """One for each rank and each engine's worker."""
    return recipe.trainer.parallel.ranks + recipe.rollout.engines * recipe.rollout.parallel.workers


def _init(**options: Any) -> None:
    """ray.init, quietly, and with SIGTERM handled as before: Ray's own handler ends the process on the spot."""
    import ray

    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit:  # Ray's handler, while it starts
        raise Interrupted(signal.SIGTERM) from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _join(address: str) -> None:
    """Connects to the Ray at `address`; InputError if there is none."""
    try:
        if address.count(":") == 1:  # Ray itself would wait for minutes
            host, port = address.split(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        _init(address=address)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"cluster.address = {address}: no Ray there that can be joined ({reason})") from None


def _short_folder(logs: Path) -> Path:
    """A fresh folder for Ray's sockets: under the run's own folder when its path is short enough."""
    home = logs.resolve()
    home.mkdir(parents=True, exist_ok=True)
    short = len(str(home)) + len("/ray-12345678") <= SOCKET_PATH_LIMIT
    return Path(tempfile.mkdtemp(prefix="ray-", dir=home if short else None))


def _keep_worker_logs(folder: Path, target: Path) -> None:
    """Copies what the actors printed beside the run, so that a failure can be read after Ray has gone."""
    shutil.rmtree(target, ignore_errors=True)
    for source in folder.glob("session_*/logs/worker-*"):
        if source.stat().st_size and not source.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                shutil.copy(source, target / source.name)
