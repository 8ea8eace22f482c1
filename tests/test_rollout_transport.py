"""Buckets over Gloo: a sender here, receivers in threads, all over real sockets."""

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from beam_rl.rollout.sync.bucket import from_metadata, unpack
from beam_rl.rollout.sync.transport import BucketReceiver, SyncError, WeightSender

HOST = "127.0.0.1"


class Peers:
    """Receivers, each with a thread of its own and the tensors it got."""

    def __init__(self, sender: WeightSender, count: int) -> None:
        self.pool = ThreadPoolExecutor(count)
        self.got: list[dict[str, Tensor]] = [{} for _ in range(count)]
        args = (HOST, sender.port, HOST)
        joining = [
            self.pool.submit(BucketReceiver, *args, rank, count + 1, sender.deadline_s) for rank in range(1, count + 1)
        ]
        sender.connect(joining)
        self.receivers = [future.result() for future in joining]

    def announce(self, bucket: dict[str, Any]) -> Sequence[Future]:
        return [self.pool.submit(self.receive, i, bucket) for i in range(len(self.receivers))]

    def receive(self, i: int, bucket: dict[str, Any]) -> None:
        data = self.receivers[i].receive(bucket["nbytes"], bucket["round"], bucket["deadline_s"])
        entries = from_metadata(bucket["names"], bucket["dtypes"], bucket["shapes"], bucket["offsets"])
        self.got[i].update((name, tensor.clone()) for name, tensor in unpack(entries, data))


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    dtypes = [torch.float32, torch.bfloat16]
    return {f"w{i}": torch.randn(50, 4, generator=generator).to(dtypes[i % 2]) for i in range(20)}


def test_every_receiver_gets_every_tensor_bit_for_bit_twice() -> None:
    sender = WeightSender(HOST, 0, engine_ranks=2, deadline_s=10)
    peers = Peers(sender, 2)
    for _ in range(2):
        stats = sender.send(weights().items(), 2000, peers.announce)
        assert stats.buckets == 7 and stats.bytes == sum(t.nbytes for t in weights().values())
        for got in peers.got:
            assert all(torch.equal(got.pop(name), tensor) for name, tensor in weights().items()) and not got


def test_receiver_that_does_not_come_is_named_within_the_deadline() -> None:
    sender = WeightSender(HOST, 0, engine_ranks=2, deadline_s=1)
    peers = Peers(sender, 2)
    only_first: Callable = lambda bucket: [peers.pool.submit(peers.receive, 0, bucket)]  # noqa: E731
    start = time.monotonic()
    with pytest.raises(SyncError, match=r"bucket 0 \(w0 …\): engine rank 2 did not arrive within 1 s"):
        sender.send(weights().items(), 2000, only_first)
    assert time.monotonic() - start < 3


def test_engine_that_fails_ends_the_wait_with_its_own_error() -> None:
    sender = WeightSender(HOST, 0, engine_ranks=1, deadline_s=30)
    peers = Peers(sender, 1)

    def fail() -> None:
        raise RuntimeError("out of memory on the engine")

    start = time.monotonic()
    with pytest.raises(SyncError, match="bucket 0 .*: an engine failed: out of memory on the engine"):
        sender.send(weights().items(), 2000, lambda bucket: [peers.pool.submit(fail)])
    assert time.monotonic() - start < 5


def test_engine_that_never_joins_is_named() -> None:
    sender = WeightSender(HOST, 0, engine_ranks=3, deadline_s=0.5)
    with pytest.raises(SyncError, match=r"joining the weight-sync group: engine rank 1 did not arrive within 0.5 s"):
        sender.connect()


def test_receiver_whose_sender_is_gone_ends_within_its_deadline() -> None:
    sender = WeightSender(HOST, 0, engine_ranks=1, deadline_s=5)
    peers = Peers(sender, 1)
    start = time.monotonic()
    with pytest.raises(SyncError, match="engine rank 1: weight bucket 7 from the trainer failed"):
        peers.receivers[0].receive(100, 7, 1.0)
    assert time.monotonic() - start < 5


def test_sender_listens_on_its_own_address_only() -> None:
    sender = WeightSender(HOST, 0, engine_ranks=1, deadline_s=1)
    socket.create_connection((HOST, sender.port), timeout=1).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", sender.port), timeout=1)
