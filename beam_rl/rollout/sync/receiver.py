"""A worker's part of a weight sync, whatever the transport: receives buckets in their order and checks them.

What it hands out owns its memory: when a bucket has been read, its buffer may change. Knows nothing about Ray or vLLM.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from beam_rl.rollout.sync.bucket import Assembler, from_metadata
from beam_rl.rollout.sync.transport import SyncError


class ReceiverEnd(Protocol):
    def receive(self, slot: int, nbytes: int, deadline_s: float) -> Tensor:
        """(nbytes,) uint8 of a bucket, valid until it is acknowledged. SyncError if it doesn't come."""

    def close(self) -> None:
        """Gives back what this end holds."""


class BucketReceiver:
    """`begin` comes before each update."""

    def __init__(self, end: ReceiverEnd) -> None:
        self.end = end

    def begin(self, device: torch.device) -> None:
        """Forgets what is left of an update before. The tensors of this one come out on `device`."""
        self.expected, self.device = 0, device
        self.assembler = Assembler(device)

    def receive(self, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a bucket completes. `metadata` is what the sender announced."""
        bucket = from_metadata(metadata)
        if bucket.number != self.expected:
            raise SyncError(f"weight bucket {bucket.number} came in the place of {self.expected}")
        data = self.end.receive(metadata["slot"], bucket.nbytes, metadata["deadline_s"])
        yield from self.assembler.tensors(bucket, data)
        for device in (data.device, self.device):
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # the copies out of the buffer
        self.expected += 1

    def close(self) -> None:
        self.end.close()
