"""Opens both ends of a transport by its name. Knows nothing about Ray or vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from beam_rl.rollout.sync.bucket import aligned
from beam_rl.rollout.sync.receiver import ReceiverEnd
from beam_rl.rollout.sync.transport import SenderEnd, WeightSender


@dataclass(frozen=True)
class Link:
    """How weights go from one sender to its engines."""

    transport: str  # shm, gloo, ipc or nccl
    bucket_bytes: int
    deadline_s: float  # of every operation
    checksums: bool
    host: str  # the sender's address, that the engines reach it at


def open_sender(link: Link, workers: Sequence[int], device: torch.device) -> WeightSender:
    """The sending end, for engines of `workers[i]` workers each; `device` is the trainer's."""
    return WeightSender(_sender_end(link, sum(workers), device), workers, link.deadline_s, link.checksums)


def _sender_end(link: Link, workers: int, device: torch.device) -> SenderEnd:
    size = aligned(link.bucket_bytes)
    match link.transport:
        case "shm":
            from beam_rl.rollout.sync.shm import ShmSender

            return ShmSender(size, device)
        case "gloo":
            from beam_rl.rollout.sync.gloo import GlooSender

            return GlooSender(size, link.host, workers, link.deadline_s)
        case "ipc":
            from beam_rl.rollout.sync.ipc import IpcSender

            return IpcSender(size, workers, device)
        case "nccl":
            from beam_rl.rollout.sync.nccl import NcclSender

            return NcclSender(size, link.host, workers, link.deadline_s, device)
    raise ValueError(f"no transport {link.transport}")


def open_receiver(join: dict[str, Any], worker: int, local_host: str, device: torch.device) -> ReceiverEnd:
    """The end of one worker. join: what the sender says of its engine; worker: its place among the engine's workers."""
    rank = join["rank"] + worker
    match join["transport"]:
        case "shm":
            from beam_rl.rollout.sync.shm import ShmReceiver

            return ShmReceiver(join, device)
        case "gloo":
            from beam_rl.rollout.sync.gloo import GlooReceiver

            return GlooReceiver(join, rank, local_host)
        case "ipc":
            from beam_rl.rollout.sync.ipc import IpcReceiver

            return IpcReceiver(join, rank, device)
        case "nccl":
            from beam_rl.rollout.sync.nccl import NcclReceiver

            return NcclReceiver(join, rank, local_host, device)
    raise ValueError(f"no transport {join['transport']}")
