"""Buckets from one sender to every engine rank over Gloo, each operation within a deadline.

The sender is rank 0 of a group of its own (not torch's default group), the engines' workers are ranks 1, 2, …. Before each
broadcast every receiver says that it is there: a receiver that is missing is named, instead of a hang or a Gloo error
about a socket. Knows nothing about Ray or vLLM: who tells the engines that a bucket comes is the caller's business.
"""

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from beam_rl.rollout.sync import bucket

POLL_S = 1.0  # how often a wait looks whether an engine has failed meanwhile
Announce = Callable[[dict[str, Any]], Sequence[Future]]


class SyncError(RuntimeError):
    """A weight sync failed; the message names the operation and the peer."""


@dataclass(frozen=True)
class SyncStats:
    bytes: int
    buckets: int


def gloo_group(store: dist.Store, host: str, rank: int, size: int, deadline_s: float) -> Any:
    """A Gloo process group of `size` ranks whose connections use this machine's address `host`."""
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs leave out what it has
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=deadline_s)
    return gloo(store, rank, size, options)


def broadcast(group: Any, data: Tensor, deadline_s: float) -> None:
    """Broadcasts `data` from rank 0 in place. Raises RuntimeError after `deadline_s` seconds."""
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timedelta(seconds=deadline_s)
    group.broadcast([data], options).wait(timedelta(seconds=deadline_s))


class WeightSender:
    """The trainer's end. `host` is the address that the engines reach this process at; `port` 0 picks a free one."""

    def __init__(self, host: str, port: int, engine_ranks: int, deadline_s: float) -> None:
        if engine_ranks < 1:
            raise ValueError(f"engine_ranks = {engine_ranks}: a sync needs at least one engine")
        self.host, self.engine_ranks, self.deadline_s = host, engine_ranks, deadline_s
        listener = socket.create_server((host, port))  # TCPStore alone would listen on every interface
        self.port: int = listener.getsockname()[1]
        self.store = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_s),
            master_listen_fd=listener.detach(),
        )
        self.group: Any = None
        self.round = 0

    def connect(self, joining: Sequence[Future] = ()) -> None:
        """Waits until every engine rank has joined; `joining` are the engines' own calls, whose errors end the wait."""
        self._wait_for("joined", joining, "joining the weight-sync group")
        self.group = gloo_group(self.store, self.host, 0, self.engine_ranks + 1, self.deadline_s)
        self._collect(joining, "joining the weight-sync group")

    def send(self, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, announce: Announce) -> SyncStats:
        """Sends every tensor to every engine rank.

        Args:
            tensors: (checkpoint name, tensor), produced one by one.
            announce: starts the engines' update call for one bucket and returns a future for each engine; called before
                the bucket is broadcast, and the futures are awaited after it.
        Raises:
            SyncError: a peer did not arrive or the broadcast did not end within the deadline, or an engine failed.
        """
        if self.group is None:
            raise SyncError("send before connect")
        sent = buckets = 0
        for packed in bucket.pack(tensors, bucket_bytes):
            what = f"weight-sync bucket {buckets} ({packed.entries[0].name} …)"
            self.round += 1
            # A receiver waits for the slowest of its peers and then for the broadcast; here each has a deadline.
            timing = {"round": self.round, "deadline_s": 2 * self.deadline_s}
            replies = announce(bucket.to_metadata(packed) | timing)
            self._wait_for(f"ready/{self.round}", replies, what)
            try:
                broadcast(self.group, packed.data, self.deadline_s)
            except RuntimeError as error:
                self._collect(replies, what)
                raise SyncError(f"{what}: broadcast to {self.engine_ranks} engine ranks failed: {error}") from error
            self._collect(replies, what)
            sent, buckets = sent + packed.payload_bytes, buckets + 1
        return SyncStats(sent, buckets)

    def close(self) -> None:
        self.group = None

    def _wait_for(self, key: str, replies: Sequence[Future], what: str) -> None:
        """Waits for `key/<rank>` of every engine rank; raises what a failed reply holds."""
        end = time.monotonic() + self.deadline_s
        for rank in range(1, self.engine_ranks + 1):
            while not self._is_set(f"{key}/{rank}", min(POLL_S, max(0.01, end - time.monotonic()))):
                for reply in replies:
                    if reply.done() and (error := reply.exception()) is not None:
                        raise SyncError(f"{what}: an engine failed: {error}") from error
                if time.monotonic() >= end:
                    raise SyncError(f"{what}: engine rank {rank} did not arrive within {self.deadline_s:g} s")

    def _is_set(self, key: str, timeout_s: float) -> bool:
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            return False
        return True

    def _collect(self, replies: Sequence[Future], what: str) -> None:
        end = time.monotonic() + self.deadline_s
        for i, reply in enumerate(replies):
            try:
                reply.result(max(0.01, end - time.monotonic()))
            except TimeoutError as error:
                raise SyncError(f"{what}: engine {i} did not answer within {self.deadline_s:g} s") from error
            except Exception as error:
                raise SyncError(f"{what}: engine {i} failed: {error}") from error


class BucketReceiver:
    """An engine rank's end. `local_host` is this machine's address towards the other ranks."""

    def __init__(self, host: str, port: int, local_host: str, rank: int, size: int, deadline_s: float) -> None:
        self.rank = rank
        timeout = timedelta(seconds=deadline_s)
        self.store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self.store.set(f"joined/{rank}", "")
        self.group = gloo_group(self.store, local_host, rank, size, deadline_s)
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def receive(self, nbytes: int, round_: int, deadline_s: float) -> Tensor:
        """(nbytes,) uint8 of one bucket, valid until the next call."""
        if nbytes > len(self.buffer):
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        data = self.buffer[:nbytes]
        self.store.set(f"ready/{round_}/{self.rank}", "")
        try:
            broadcast(self.group, data, deadline_s)
        except RuntimeError as error:
            raise SyncError(
                f"engine rank {self.rank}: weight bucket {round_} from the trainer failed: {error}"
            ) from error
        return data
