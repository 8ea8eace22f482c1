"""Receivers of a weight sync: in threads of the test's process, or in processes of their own that can be killed."""

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from beam_rl.rollout.sync.link import Link, open_receiver, open_sender
from beam_rl.rollout.sync.receiver import BucketReceiver
from beam_rl.rollout.sync.transport import WeightSender

HOST, CPU = "127.0.0.1", torch.device("cpu")
BUCKET_BYTES = 2000


def sender_for(
    transport: str, engines: int, deadline_s: float = 20, checksums: bool = True, bucket_bytes: int = BUCKET_BYTES
) -> WeightSender:
    return open_sender(Link(transport, bucket_bytes, deadline_s, checksums, HOST), [1] * engines, CPU)


def weights(seed: int = 3) -> dict[str, Tensor]:
    """20 tensors, FP32 and BF16 in turn, and one that is larger than a bucket: 18,000 bytes in 10 buckets."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16]
    some = {f"w{i}": torch.randn(50, 4, generator=generator).to(dtypes[i % 2]) for i in range(20)}
    return some | {"large": torch.randn(1500, generator=generator)}


class Peer:
    """One worker. `got` is what has come in the update under way."""

    def __init__(self, join: dict[str, Any]) -> None:
        self.receiver = BucketReceiver(open_receiver(join, 0, HOST, CPU), CPU)
        self.got: dict[str, Tensor] = {}

    def begin(self) -> None:
        self.receiver.begin()
        self.got = {}

    def receive(self, bucket: dict[str, Any]) -> None:
        self.got.update(self.receiver.receive(bucket))


class Peers:
    """Peers in threads, one each, joined to a sender."""

    def __init__(self, sender: WeightSender) -> None:
        self.threads = [ThreadPoolExecutor(1) for _ in sender.workers]
        joining = [t.submit(Peer, join) for t, join in zip(self.threads, sender.join_infos(), strict=True)]
        sender.connect(joining)
        self.peers = [call.result() for call in joining]

    def announce(self, bucket: dict[str, Any]) -> Sequence[Future]:
        return [self.submit(i, self.peers[i].receive, bucket) for i in range(len(self.peers))]

    def submit(self, i: int, work: Callable, *args: Any) -> Future:
        return self.threads[i].submit(work, *args)


class PeerProcess:
    """A peer in its own process. Its calls are futures that fail as soon as the process has gone, as Ray's do."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.calls: list[Future] = []
        self.lock = threading.Lock()
        threading.Thread(target=self._collect, daemon=True).start()

    def call(self, method: str, *args: Any) -> Future:
        call: Future = Future()
        with self.lock:
            self.calls.append(call)
            self.pipe.send((method, args))
        return call

    def _collect(self) -> None:
        while True:
            try:
                answer = self.pipe.recv()
            except (EOFError, OSError):
                answer = RuntimeError("the process has died")
            with self.lock:
                calls, self.calls = self.calls, []
            if isinstance(answer, RuntimeError) and str(answer) == "the process has died":
                for call in calls:
                    call.set_exception(answer)
                return
            call, *rest = calls
            with self.lock:
                self.calls = rest + self.calls
            call.set_exception(answer) if isinstance(answer, Exception) else call.set_result(answer)


def _serve(pipe: Connection) -> None:
    """Answers `join`, `begin`, `receive`, `got`, and `hold`, which takes a bucket and answers nothing for a minute."""
    torch.set_num_threads(1)
    peer: Any = None
    while True:
        method, args = pipe.recv()
        try:
            answer: Any = None
            if method == "join":
                peer = Peer(*args)
            elif method == "got":
                answer = {name: tensor.float().tolist() for name, tensor in peer.got.items()}
            elif method == "hold":
                threading.Event().wait(60)
            else:
                getattr(peer, method)(*args)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(answer)
