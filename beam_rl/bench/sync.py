"""Weight sync: bytes a second over each transport beside a plain copy, the memory it takes, how long an engine pauses.

Sender and receiver are two processes, as trainer and engine are, and both ends are those of a run.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from beam_rl.bench.remote import Remote
from beam_rl.bench.result import AsJson, Result, show

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from beam_rl.rollout.sync.transport import WeightSender

HOST, DEADLINE_S = "127.0.0.1", 120.0
BUCKETS = 8  # sent in a round
ROUNDS, ENOUGH_S = 10, 20.0  # the fastest counts: other work on the machine only ever slows it down


@dataclass(frozen=True)
class Measured:
    """Of one transport. Rates in bytes a second; memory beyond what the process held before."""

    plain: float
    unchecked: float
    checked: float
    sender_peak_bytes: int
    receiver_peak_bytes: int


def sync(
    bucket_bytes: Annotated[int, typer.Option(min=4096, help="The size of each of the two buckets.")] = 256 * 2**20,
    engine: Annotated[
        bool, typer.Option(help="Also start an engine with random weights and measure how long it pauses.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Weights over shared memory and Gloo, on a GPU over CUDA IPC, with two GPUs over NCCL: packed, sent, received.

    The figure is GB/s from the sender's tensors to the receiver's, with checksums as a run has them, over the transport
    that a run would take here; the limit is a plain copy of the same bytes over that transport: into shared memory and
    out of it, or one bare broadcast after the other.
    """
    show(bench(bucket_bytes, with_engine=engine), as_json)


def bench(bucket_bytes: int, with_engine: bool) -> Result:
    """Measures every transport that this machine has, each in processes of its own, then an engine."""
    import torch

    from beam_rl.bench import measure
    from beam_rl.bench.sync_engine import run_engine
    from beam_rl.rollout.sync.bucket import aligned

    bucket_bytes, gpus = aligned(bucket_bytes), torch.cuda.device_count()
    transports = (["nccl"] if gpus > 1 else []) + (["ipc"] if gpus else []) + ["shm", "gloo"]
    typer.echo(f"measuring {', '.join(transports)}{' and an engine' if with_engine else ''}", err=True)
    measured = {name: measure.in_fresh_process(run_transport, name, bucket_bytes) for name in transports}
    first = measured[transports[0]]
    detail: dict[str, Any] = {"transport": transports[0], "bucket_bytes": bucket_bytes, "buckets": BUCKETS}
    detail["bound_peak_bytes"] = 2 * bucket_bytes + _largest_bytes(bucket_bytes)
    for name, found in measured.items():
        detail |= {
            f"{name}_plain_gb_per_second": found.plain / 1e9,
            f"{name}_gb_per_second": found.unchecked / 1e9,
            f"{name}_checked_gb_per_second": found.checked / 1e9,
            f"{name}_share_of_plain": found.unchecked / found.plain,
            f"{name}_checked_share_of_plain": found.checked / found.plain,
            f"{name}_sender_peak_bytes": found.sender_peak_bytes,
            f"{name}_receiver_peak_bytes": found.receiver_peak_bytes,
        }
    if with_engine:
        detail |= {f"engine_{key}": value for key, value in asdict(measure.in_fresh_process(run_engine)).items()}
    return Result(
        name="sync",
        figure=(first.unchecked if transports[0] in ("ipc", "nccl") else first.checked) / 1e9,
        unit="GB/s",
        limit=first.plain / 1e9,
        machine=measure.machine(measure.device()),
        detail=detail,
    )


def run_transport(transport: str, bucket_bytes: int) -> Measured:
    """The sender's process; starts the receiver's."""
    import torch

    gpu = transport in ("ipc", "nccl")
    device, other = (torch.device("cuda", 0), int(transport == "nccl")) if gpu else (torch.device("cpu"), None)
    receiver = Remote(Receiver, other)
    try:
        peaks = _peaks(receiver, transport, bucket_bytes, device)
        checked, unchecked = (_sender(receiver, transport, bucket_bytes, device, on) for on in (True, False))
        pool = _pool(bucket_bytes, device)
        tensors = list(_stream(pool, bucket_bytes))
        work: dict[str, tuple[WeightSender, Callable[[WeightSender], int]]] = {
            "plain": (unchecked, lambda sender: _plain_round(sender, receiver, pool[0])),
            "unchecked": (unchecked, lambda sender: _round(sender, receiver, iter(tensors))),
            "checked": (checked, lambda sender: _round(sender, receiver, iter(tensors))),
        }
        rates: dict[str, float] = {}
        start = time.perf_counter()
        for _ in range(ROUNDS):
            for name, (sender, act) in work.items():
                rates[name] = max(rates.get(name, 0.0), _rate(sender, act))
            if time.perf_counter() - start > ENOUGH_S:
                break
        return Measured(**rates, sender_peak_bytes=peaks[0], receiver_peak_bytes=peaks[1])
    finally:
        receiver.stop()


class Receiver:
    """The receiver's process. Holds one end a sender; `gpu` is its GPU's index."""

    def __init__(self, gpu: int | None) -> None:
        import torch

        from beam_rl.bench import measure

        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        if gpu is not None:
            torch.cuda.set_device(self.device)
        self.held = measure.held(self.device)
        self.ends: dict[str, Any] = {}
        self.own: dict[int, Tensor] = {}

    def join(self, key: str, join: dict[str, Any]) -> None:
        from beam_rl.rollout.sync.link import open_receiver
        from beam_rl.rollout.sync.receiver import BucketReceiver

        self.ends[key] = BucketReceiver(open_receiver(join, 0, HOST, self.device))

    def leave(self, key: str) -> None:
        self.ends.pop(key).close()

    def begin(self, key: str) -> None:
        self.ends[key].begin(self.device)

    def receive(self, key: str, bucket: dict[str, Any]) -> None:
        deque(self.ends[key].receive(bucket), maxlen=0)  # each tensor is gone before the next is made

    def receive_plain(self, key: str, slot: int, nbytes: int, copies: bool) -> None:
        import torch

        end = self.ends[key].end
        end.start(slot, nbytes)
        data = end.wait(slot, DEADLINE_S)
        if copies:
            self.own.setdefault(nbytes, torch.empty(nbytes, dtype=torch.uint8, device=self.device)).copy_(data)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak(self) -> int:
        """Bytes held at most since the start beyond what was held then."""
        from beam_rl.bench import measure

        return measure.high_water(self.device) - self.held


def _sender(
    receiver: Remote, transport: str, bucket_bytes: int, device: "torch.device", checksums: bool
) -> "WeightSender":
    """A sender that the receiver has joined; its `id` is the receiver's key for it."""
    from beam_rl.rollout.sync.link import Link, open_sender

    sender = open_sender(Link(transport, bucket_bytes, DEADLINE_S, checksums, HOST), [1], device)
    sender.connect([receiver.call("join", str(id(sender)), sender.join_infos()[0])])
    return sender


def _round(sender: "WeightSender", receiver: Remote, tensors: Iterator[tuple[str, "Tensor"]]) -> int:
    """Sends all of it; the bytes of the tensors."""
    key = str(id(sender))
    receiver.call("begin", key).result(DEADLINE_S)
    return sender.send(tensors, lambda bucket: [receiver.call("receive", key, bucket)]).bytes


def _plain_round(sender: "WeightSender", receiver: Remote, source: "Tensor") -> int:
    """As many bytes through the same two buffers, with nothing but copies and acknowledgements.

    Where the buffers are shared, into them and out of them; where they travel, they are sent as they are.
    """
    end, key, copies = sender.end, str(id(sender)), not hasattr(sender.end, "store")
    nbytes = len(end.buffers[0])
    replies: list[Future] = []
    for number in range(BUCKETS):
        slot = number % 2
        if number >= 2:
            replies[number - 2].result(DEADLINE_S)
            end.finish(slot)
        if copies:
            end.buffers[slot].copy_(source)
        end.start(slot, nbytes)
        replies.append(receiver.call("receive_plain", key, slot, nbytes, copies))
    for number, reply in enumerate(replies):
        reply.result(DEADLINE_S)
        if number >= BUCKETS - 2:
            end.finish(number % 2)
    return BUCKETS * nbytes


def _rate(sender: "WeightSender", act: Callable[["WeightSender"], int]) -> float:
    start = time.perf_counter()
    sent = act(sender)
    return sent / (time.perf_counter() - start)


def _pool(bucket_bytes: int, device: "torch.device") -> list["Tensor"]:
    """Two bucketfuls of source bytes, so that they do not lie in a cache."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    draw = {"dtype": torch.uint8, "device": device, "generator": generator}
    return [torch.randint(256, (bucket_bytes,), **draw) for _ in range(2)]  # type: ignore[call-overload]


def _stream(pool: list["Tensor"], bucket_bytes: int) -> Iterator[tuple[str, "Tensor"]]:
    """BF16 matrices of a twelfth of a bucket each, made of the pool; `BUCKETS` bucketfuls together."""
    import torch

    part = bucket_bytes // 12 // 32 * 32
    for number in range(12 * BUCKETS):
        raw = pool[number // 12 % 2][number % 12 * part :][:part]
        yield f"model.layers.{number}.weight", raw.view(torch.bfloat16).view(16, -1)


def _peaks(receiver: Remote, transport: str, bucket_bytes: int, device: "torch.device") -> tuple[int, int]:
    """What a sync takes at most, sender and receiver: buffers and all, and tensors that exist while they are needed."""
    import torch

    from beam_rl.bench import measure

    def gathered() -> Iterator[tuple[str, "Tensor"]]:
        """As a trainer's source makes them: each anew. One is larger than a bucket."""
        for number in range(12):
            size = _largest_bytes(bucket_bytes) if number == 6 else bucket_bytes // 3
            yield f"model.layers.{number}.weight", torch.full((size,), number, dtype=torch.uint8, device=device)

    receiver.call("peak").result(DEADLINE_S)  # it has started
    before = measure.held(device)
    sender = _sender(receiver, transport, bucket_bytes, device, checksums=True)
    _round(sender, receiver, gathered())
    peaks = measure.high_water(device) - before, receiver.call("peak").result(DEADLINE_S)
    receiver.call("leave", str(id(sender))).result(DEADLINE_S)
    sender.close()
    return peaks


def _largest_bytes(bucket_bytes: int) -> int:
    return bucket_bytes // 2 * 3
