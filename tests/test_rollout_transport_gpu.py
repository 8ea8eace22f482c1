"""Buckets over CUDA IPC, pinned shared memory (one GPU) and NCCL (two or three), to processes that die or hang."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from sync_peers import Open, PeerProcess, weights
from torch import Tensor

from beam_rl.rollout.sync.transport import SyncError, WeightSender

pytest_plugins = ["sync_peers"]
pytestmark = pytest.mark.gpu

Start = Callable[..., list[PeerProcess]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a receiver's process for each GPU index."""
    started: list[PeerProcess] = []

    def start(*gpus: int) -> list[PeerProcess]:
        if max(gpus) >= torch.cuda.device_count():
            pytest.skip(f"needs {max(gpus) + 1} GPUs")
        new = [PeerProcess(gpu) for gpu in gpus]
        started.extend(new)
        return new

    yield start
    for process in started:
        process.stop()


def join(sender: WeightSender, processes: list[PeerProcess]) -> None:
    sender.connect([p.call("join", info) for p, info in zip(processes, sender.join_infos(), strict=True)])


def on_gpu(seed: int) -> dict[str, Tensor]:
    return {name: tensor.cuda(0) for name, tensor in weights(seed).items()}


def assert_takes(sender: WeightSender, processes: list[PeerProcess], seed: int) -> None:
    """A whole sync with receivers that have just joined."""
    sender.send(on_gpu(seed).items(), lambda bucket: [p.call("receive", bucket) for p in processes])
    wanted = {name: tensor.float().tolist() for name, tensor in weights(seed).items()}
    assert all(p.call("got").result(30) == wanted for p in processes)


@pytest.mark.parametrize(("transport", "gpus"), [("ipc", (0, 0)), ("shm", (0,)), ("nccl", (1,)), ("nccl", (1, 2))])
@pytest.mark.parametrize("checksums", [False, True])
def test_every_receiver_gets_every_tensor_bit_for_bit(
    open_for: Open, start: Start, transport: str, gpus: tuple[int, ...], checksums: bool
) -> None:
    processes = start(*gpus)
    sender = open_for(transport, len(gpus), checksums=checksums, deadline_s=60, device=torch.device("cuda", 0))
    join(sender, processes)
    assert_takes(sender, processes, seed=3)


@pytest.mark.parametrize(("transport", "gpus"), [("ipc", (0, 0)), ("nccl", (1,)), ("nccl", (1, 2))])
@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_lost_receiver_is_named_in_time_and_the_others_take_the_next_sync(
    open_for: Open, start: Start, transport: str, gpus: tuple[int, ...], fate: str
) -> None:
    processes, last = start(*gpus), len(gpus) - 1
    device = torch.device("cuda", 0)
    sender = open_for(transport, len(gpus), deadline_s=60 if fate == "dies" else 15, device=device)
    join(sender, processes)

    def announce(bucket: dict[str, Any]) -> list[Future]:
        now = bucket["number"] == 3
        calls = [p.call("hold" if now and i == last else "receive", bucket) for i, p in enumerate(processes)]
        if now and fate == "dies":
            os.kill(processes[last].process.pid or 0, signal.SIGKILL)
        return calls

    begin = time.monotonic()
    with pytest.raises(SyncError, match=f"engine {last} ") as failed:
        sender.send(on_gpu(4).items(), announce)
    assert failed.value.engines == (last,) and time.monotonic() - begin < 25
    sender.close()
    processes[last].stop()
    survivors = [*processes[:last], *start(gpus[last])]
    again = open_for(transport, len(survivors), deadline_s=60, device=device)
    join(again, survivors)
    assert_takes(again, survivors, seed=5)


def test_nccl_receiver_whose_sender_gives_up_lets_go_at_once(open_for: Open, start: Start) -> None:
    (process,) = start(1)
    sender = open_for("nccl", 1, deadline_s=60, device=torch.device("cuda", 0))
    join(sender, [process])
    about = {"number": 0, "nbytes": 16, "last": True, "entries": [], "slot": 0, "deadline_s": 60.0}
    waiting = process.call("receive", about)
    time.sleep(1)
    begin = time.monotonic()
    sender.end.abandon()
    with pytest.raises(SyncError, match="the transfer broke off: the trainer gave it up"):
        waiting.result(30)
    assert time.monotonic() - begin < 10
