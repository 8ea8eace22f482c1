"""Receivers of a weight sync: in threads of the test's process, or in processes of their own that can be killed."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from beam_rl.bench.remote import Remote
from beam_rl.rollout.sync.link import Link, open_receiver, open_sender
from beam_rl.rollout.sync.receiver import BucketReceiver
from beam_rl.rollout.sync.transport import WeightSender

HOST, CPU = "127.0.0.1", torch.device("cpu")
BUCKET_BYTES = 2000


Open = Callable[..., WeightSender]


@pytest.fixture
def open_for() -> Iterator[Open]:
    """Opens senders for engines of so many workers each, and closes them after the test."""
    opened = []

    def open_for(
        transport: str,
        engines: int,
        deadline_s: float = 20,
        checksums: bool = True,
        device: torch.device = CPU,
        workers: int = 1,
    ) -> WeightSender:
        link = Link(transport, BUCKET_BYTES, deadline_s, checksums, HOST)
        opened.append(open_sender(link, [workers] * engines, device))
        return opened[-1]

    yield open_for
    for sender in opened:
        sender.close()


def weights(seed: int = 3) -> dict[str, Tensor]:
    """20 tensors, FP32 and BF16 in turn, and one that is larger than a bucket: 18,000 bytes in 10 buckets."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16]
    some = {f"w{i}": torch.randn(50, 4, generator=generator).to(dtypes[i % 2]) for i in range(20)}
    return some | {"large": torch.randn(1500, generator=generator)}


class Peer:
    """One worker. `got` is what has come in the update under way."""

    def __init__(self, join: dict[str, Any], device: torch.device = CPU, worker: int = 0) -> None:
        self.device = device
        self.receiver = BucketReceiver(open_receiver(join, worker, HOST, device))
        self.begin()

    def begin(self) -> None:
        self.receiver.begin(self.device)
        self.got: dict[str, Tensor] = {}

    def receive(self, bucket: dict[str, Any]) -> None:
        self.got.update(self.receiver.receive(bucket))


class Peers:
    """Peers in threads, one each, joined to a sender."""

    def __init__(self, sender: WeightSender) -> None:
        self.sender = sender
        self.threads = [ThreadPoolExecutor(1) for _ in sender.workers]
        joining = [t.submit(Peer, join) for t, join in zip(self.threads, sender.join_infos(), strict=True)]
        sender.connect(joining)
        self.peers = [call.result() for call in joining]

    def announce(self, bucket: dict[str, Any]) -> Sequence[Future]:
        return [self.submit(i, self.peers[i].receive, bucket) for i in range(len(self.peers))]

    def submit(self, i: int, work: Callable, *args: Any) -> Future:
        return self.threads[i].submit(work, *args)


class PeerProcess(Remote):
    """A peer in its own process, that can be killed; on a GPU by its index."""

    def __init__(self, gpu: int | None = None) -> None:
        super().__init__(RemotePeer, gpu)


class RemotePeer:
    """What a `PeerProcess` is called for."""

    def __init__(self, gpu: int | None) -> None:
        torch.set_num_threads(1)
        self.device = CPU if gpu is None else torch.device("cuda", gpu)
        if gpu is not None:
            torch.cuda.set_device(self.device)

    def join(self, join: dict[str, Any]) -> None:
        self.peer = Peer(join, self.device)

    def receive(self, bucket: dict[str, Any]) -> None:
        self.peer.receive(bucket)

    def hold(self, bucket: dict[str, Any]) -> None:
        """Takes a bucket and is silent for a minute."""
        time.sleep(60)

    def got(self) -> dict[str, Any]:
        return {name: tensor.float().tolist() for name, tensor in self.peer.got.items()}


class RemoteSender:
    """A sender for one engine, to be killed in its process."""

    def __init__(self, transport: str) -> None:
        self.sender = open_sender(Link(transport, BUCKET_BYTES, 30, True, HOST), [1], CPU)

    def join_info(self) -> dict[str, Any]:
        return self.sender.join_infos()[0]

    def connect(self) -> None:
        self.sender.connect()
