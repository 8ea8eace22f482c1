"""Buckets over NCCL, between GPUs: one broadcast to all workers, through vLLM's communicator.

The workers meet by an id that comes with the engines' own calls: nothing pickled is read from the network. A store beside
it carries who has arrived, and that a transfer was given up. Knows nothing about Ray.
"""

import os
import socket
import struct
import threading
import time
from concurrent.futures import Future
from fcntl import ioctl
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.rollout.sync.gloo import is_set, join_store, open_store
from beam_rl.rollout.sync.transport import BROKE_OFF, SyncError

SPIN_S = 0.02  # a bucket's own time, in which a look at the transfer follows the other: a sleep would be a tenth of it
YIELD_S = 0.0  # lets this process's other threads run between two looks
POLL_S = 2e-4  # between looks at a transfer that takes longer
WATCH_S = 0.05  # between looks at the store, whether it was given up
SIOCGIFADDR = 0x8915  # Linux: an interface's address


class NcclSender:
    """Rank 0 of a communicator with all workers; `host` is the address that they reach this process at."""

    shared_fate = True
    begins_early = True

    def __init__(self, bucket_bytes: int, host: str, workers: int, deadline_s: float, device: torch.device) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        listen_at(host)
        self.host, self.workers, self.deadline_s, self.device = host, workers, deadline_s, device
        self.buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.store: Any = open_store(host, deadline_s)
        self.id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self.stream = torch.cuda.Stream(device)
        self.ends: list[Any] = [None, None]  # of the transfers, as CUDA events
        self.comm: Any = None

    def join_info(self) -> dict[str, Any]:
        size = self.workers + 1
        return {"transport": "nccl", "host": self.host, "port": self.store.port, "id": self.id, "size": size}

    def has_arrived(self, rank: int, timeout_s: float) -> bool:
        return is_set(self.store, f"joined/{rank}", timeout_s)

    def connect(self) -> None:
        self.comm = communicator(self.id, 0, self.workers + 1, self.device, self.deadline_s)

    def start(self, slot: int, nbytes: int) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.comm.broadcast(self.buffers[slot][:nbytes], 0, stream=self.stream)
        self.ends[slot] = self.stream.record_event()

    def finish(self, slot: int) -> None:
        start = time.monotonic()
        while not self.ends[slot].query():
            waited = time.monotonic() - start
            if waited > self.deadline_s:
                raise SyncError("NCCL did not end a transfer that every engine has begun to receive")
            time.sleep(YIELD_S if waited < SPIN_S else POLL_S)

    def abandon(self) -> None:
        self.store.set("abandoned", "")
        self.comm.destroy()  # also ends what waits on the GPU

    def close(self) -> None:
        if self.comm is not None:
            self.comm.destroy()
        self.comm, self.buffers, self.store = None, [], None


class NcclReceiver:
    """A worker's end; `local_host` is this machine's address towards the sender."""

    own_buffers = True

    def __init__(self, join: dict[str, Any], worker: int, local_host: str, device: torch.device) -> None:
        listen_at(local_host)
        self.store: Any = join_store(join)
        self.store.set(f"joined/{worker}", "")
        self.buffers = [torch.empty(join["bucket_bytes"], dtype=torch.uint8, device=device) for _ in range(2)]
        self.stream = torch.cuda.Stream(device)
        self.flights: list[Any] = [None, None]  # each slot's bytes and the end of their transfer, as a CUDA event
        self.comm: Any = communicator(join["id"], worker + 1, join["size"], device, join["deadline_s"])

    def start(self, slot: int, nbytes: int) -> None:
        if self.comm.disabled:  # it would say that all has come
            raise SyncError(f"the transfer {BROKE_OFF} before this bucket")
        data = self.buffers[slot][:nbytes]
        self.comm.broadcast(data, 0, stream=self.stream)
        self.flights[slot] = data, self.stream.record_event()

    def wait(self, slot: int, deadline_s: float) -> Tensor:
        data, done = self.flights[slot]
        start = watched = time.monotonic()
        while not done.query():
            now = time.monotonic()
            if now - start > deadline_s:
                raise self._broken(f"nothing came within {deadline_s:g} s")
            if now - watched > WATCH_S:
                watched = now
                self._watch()
            time.sleep(YIELD_S if now - start < SPIN_S else POLL_S)
        return data

    def close(self) -> None:
        if self.comm is not None:
            self.comm.destroy()
        self.comm = self.store = None

    def _watch(self) -> None:
        try:
            given_up = self.store.check(["abandoned"])
        except dist.DistError as error:
            raise self._broken(f"the trainer has gone ({error})") from error
        if given_up:
            raise self._broken("the trainer gave it up")

    def _broken(self, why: str) -> SyncError:
        self.comm.destroy()
        return SyncError(f"the transfer {BROKE_OFF}: {why}")


def communicator(unique_id: bytes, rank: int, size: int, device: torch.device, deadline_s: float) -> Any:
    """vLLM's `PyNcclCommunicator`; every rank calls this at the same time. SyncError after `deadline_s`.

    A call into NCCL that waits for peers can't be ended from outside: then a thread that waits is left behind.
    """
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    made: Future = Future()

    def make() -> None:
        try:
            made.set_result(PyNcclCommunicator.from_unique_id_bytes(unique_id, rank, size, device))
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=make, daemon=True).start()
    try:
        return made.result(deadline_s)
    except TimeoutError:
        raise SyncError(f"the NCCL group of {size} processes did not form within {deadline_s:g} s") from None


def listen_at(host: str) -> None:
    """Makes NCCL use the interface of this address alone, unless the environment names one or NCCL has started."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")


def interface_of(host: str) -> str:
    """The name of this machine's network interface with the address `host`, such as "lo". InputError if none has it."""
    address = socket.inet_aton(socket.gethostbyname(host))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            if reply[20:24] == address:
                return name
    raise InputError(f"{host}: no network interface of this machine has that address")
