"""Buckets over Gloo, between machines: the sender and each worker are a group of two, so a death disturbs no other.

Everything listens at the address that was given, nothing elsewhere. Knows nothing about Ray or vLLM.
"""

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from beam_rl.rollout.sync.transport import SyncError

CLOSING_S = 0.5  # between looks at a transfer that nobody takes


def open_store(host: str, deadline_s: float) -> dist.TCPStore:
    """torch's key-value store, listening at `host` on a free port; alone it would listen on every interface."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline_s),
        master_listen_fd=listener.detach(),
    )


def join_store(join: dict[str, Any]) -> dist.TCPStore:
    """The sender's store, seen from a worker."""
    timeout = timedelta(seconds=join["deadline_s"])
    return dist.TCPStore(join["host"], join["port"], is_master=False, wait_for_workers=False, timeout=timeout)


def is_set(store: dist.Store, key: str, timeout_s: float) -> bool:
    """Whether somebody sets `key` within the time."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return False
    return True


def pair(store: dist.Store, host: str, worker: int, side: int, deadline_s: float) -> Any:
    """The Gloo group of the sender (side 0) and one worker (side 1); connections use this machine's address `host`."""
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs leave out what it has
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=deadline_s)
    return gloo(dist.PrefixStore(f"pair/{worker}", store), side, 2, options)


def broadcast(group: Any, data: Tensor, deadline_s: float) -> Any:
    """Starts a broadcast from side 0; `wait` of what it returns raises RuntimeError `deadline_s` from now at most."""
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timedelta(seconds=deadline_s)
    return group.broadcast([data], options)


class GlooSender:
    """`host` is the address that the workers reach this process at."""

    shared_fate = False
    begins_early = True

    def __init__(self, bucket_bytes: int, host: str, workers: int, deadline_s: float) -> None:
        self.host, self.workers, self.deadline_s = host, workers, deadline_s
        self.buffers = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(2)]
        self.store: Any = open_store(host, deadline_s)
        self.pairs: list[Any] = []
        self.works: list[list[Any]] = [[], []]

    def join_info(self) -> dict[str, Any]:
        return {"transport": "gloo", "host": self.host, "port": self.store.port}

    def has_arrived(self, rank: int, timeout_s: float) -> bool:
        return is_set(self.store, f"joined/{rank}", timeout_s)

    def connect(self) -> None:
        self.pairs = [pair(self.store, self.host, i, 0, self.deadline_s) for i in range(self.workers)]

    def start(self, slot: int, nbytes: int) -> None:
        data = self.buffers[slot][:nbytes]
        # One whose worker has died fails later, where it is waited for; the worker's own reply says why.
        self.works[slot] = [broadcast(group, data, self.deadline_s) for group in self.pairs]

    def finish(self, slot: int) -> None:
        for work in self.works[slot]:
            work.wait()
        self.works[slot] = []

    def abandon(self) -> None: ...  # a worker that lives receives what is on its way

    def close(self) -> None:
        if any(not work.is_completed() for works in self.works for work in works):
            threading.Thread(target=_outlive, args=(self.pairs, self.works), daemon=True).start()
        # Whoever waits at the store, or in a pair where nothing is on its way, sees the connection end.
        self.works, self.pairs, self.buffers, self.store = [[], []], [], [], None


def _outlive(pairs: list[Any], works: list[list[Any]]) -> None:
    """Keeps pairs until what they are sending has ended by its own deadline: to let go of one earlier waits for that."""
    while any(not work.is_completed() for each in works for work in each):
        time.sleep(CLOSING_S)


class GlooReceiver:
    """A worker's end; `local_host` is this machine's address towards the sender."""

    own_buffers = True

    def __init__(self, join: dict[str, Any], worker: int, local_host: str) -> None:
        self.store: Any = join_store(join)
        self.store.set(f"joined/{worker}", "")
        self.group: Any = pair(self.store, local_host, worker, 1, join["deadline_s"])
        self.deadline_s = join["deadline_s"]
        self.buffers = [torch.empty(join["bucket_bytes"], dtype=torch.uint8) for _ in range(2)]
        self.flights: list[Any] = [None, None]  # each slot's bytes and their transfer

    def start(self, slot: int, nbytes: int) -> None:
        data = self.buffers[slot][:nbytes]
        try:
            self.flights[slot] = data, broadcast(self.group, data, self.deadline_s)
        except RuntimeError as error:
            raise SyncError(f"nothing can come from the trainer: {error}") from error

    def wait(self, slot: int, deadline_s: float) -> Tensor:
        data, work = self.flights[slot]
        try:
            work.wait()
        except RuntimeError as error:
            raise SyncError(f"nothing came from the trainer: {error}") from error
        return data

    def close(self) -> None:
        self.group = self.store = None
