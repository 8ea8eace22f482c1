"""Ways to bring a bucket of weights over CUDA IPC, beside a plain copy in the same run: `python benchmarks/ipc_ways.py`.

Each is what `beam-rl bench sync` measures with one thing changed, so that it shows which part of the way costs what.
"""

import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from beam_rl.bench import measure
from beam_rl.bench.remote import Remote
from beam_rl.rollout.sync import bucket, device_copy, ipc

sync: Any = importlib.import_module("beam_rl.bench.sync")  # the package has a command of that name
BUCKET_BYTES = 256 * 2**20
ROUNDS = 12


def sender_waits() -> None:
    """A bucket is announced when its copies are done, so that no GPU waits for an event of another process."""

    def start(self: ipc.IpcSender, slot: int, nbytes: int) -> None:
        self.filled[slot].record(torch.cuda.current_stream(self.device))
        torch.cuda.current_stream(self.device).synchronize()

    ipc.IpcSender.start = start  # type: ignore[method-assign]


def streams(*chosen: str) -> Callable[[], None]:
    """Copies go over these in turn: "current", or another's name."""

    def change() -> None:
        made = {name: torch.cuda.Stream() for name in set(chosen) - {"current"}}
        device_copy._streams = (
            lambda device: tuple(  # type: ignore[assignment]
                made.get(name) or torch.cuda.current_stream(device) for name in (chosen * 2)[:2]
            )
        )

    return change


def unordered() -> None:
    """Copies do not wait for what the current stream was given before: right for tensors that nobody is writing."""

    def copy(self: Any, tensor: torch.Tensor, start: int, at: int, nbytes: int) -> None:
        stream, self._turn = self._streams[self._turn], 1 - self._turn
        self._copy(self._start + at, tensor.data_ptr() + start, nbytes, device_copy.WITHIN_DEVICE, stream.cuda_stream)

    device_copy.DeviceCopies.copy = copy  # type: ignore[method-assign]


WAYS: dict[str, tuple[Callable[[], None], ...]] = {
    "as it is": (),
    "one stream": (streams("side"),),
    "current stream alone": (streams("current"),),
    "current and another": (streams("current", "side"),),
    "current and another, unordered": (streams("current", "side"), unordered),
    "unordered": (unordered,),
    "sender waits": (sender_waits,),
}


def run(way: str) -> tuple[float, float]:
    """(plain, this way) in bytes a second: the fastest of some rounds, taken in turns."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    for change in WAYS[way]:
        change()
    receiver = Remote(sync.Receiver, 0)
    try:
        sender = sync._sender(receiver, "ipc", BUCKET_BYTES, device, checksums=False)
        pool = sync._pool(BUCKET_BYTES, device)
        tensors = list(sync._stream(pool, BUCKET_BYTES))
        plain = best = 0.0
        for _ in range(ROUNDS):
            best = max(best, sync._rate(sender, lambda s: sync._round(s, receiver, iter(tensors))))
            if way == "as it is":
                plain = max(plain, sync._rate(sender, lambda s: sync._plain_round(s, receiver, pool[0])))
        return plain, best
    finally:
        receiver.stop()


def alone() -> Iterator[tuple[str, float]]:
    """Seconds of a bucket's parts with nothing else on the GPU."""
    device = torch.device("cuda", 0)
    pool = sync._pool(BUCKET_BYTES, device)
    tensors, buffers = list(sync._stream(pool, BUCKET_BYTES)), [torch.empty_like(pool[0]) for _ in range(2)]

    def pack() -> None:
        for _ in bucket.pack(iter(tensors[:12]), iter(buffers)):
            pass

    for name, work in {"pack": pack, "copy": lambda: buffers[0].copy_(pool[0])}.items():
        for part in ("CPU", "both"):
            found = []
            for _ in range(20):
                torch.cuda.synchronize()
                start = time.perf_counter()
                work()
                if part == "both":
                    torch.cuda.synchronize()
                found.append(time.perf_counter() - start)
            yield f"{name}, {part}", min(found)


def main() -> None:
    for name, seconds in measure.in_fresh_process(list_of, "alone"):
        print(f"{name}: {seconds * 1e3:.3f} ms")
    plain = 0.0
    for way in WAYS:
        found, rate = measure.in_fresh_process(run, way)
        plain = plain or found
        print(f"{way}: {rate / 1e9:.1f} GB/s, {rate / plain:.3f} of a plain copy's {plain / 1e9:.1f}", flush=True)


def list_of(name: str) -> list[tuple[str, float]]:
    return list(globals()[name]())


if __name__ == "__main__":
    main()
