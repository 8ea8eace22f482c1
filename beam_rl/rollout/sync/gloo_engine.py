"""vLLM's weight-transfer interface over Gloo: the engine's end of a weight sync, run inside vLLM's worker.

An update is whole or it fails: `finish` refuses when a tensor of the checkpoint did not come, since the model would then be
a mixture of two versions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from beam_rl.rollout.names import checkpoint_names
from beam_rl.rollout.sync.bucket import from_metadata, unpack
from beam_rl.rollout.sync.transport import BucketReceiver


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """`rank` is the rank of the engine's first worker in the sync group; further workers follow."""

    host: str
    port: int
    local_host: str
    rank: int
    size: int
    deadline_s: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket, as `sync.bucket.to_metadata` describes it."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    nbytes: int
    round: int
    deadline_s: float


class GlooWeightReceiver(WeightTransferEngine[JoinInfo, BucketInfo]):
    """Receives buckets and loads them through the model's own checkpoint loader, layer by layer."""

    init_info_cls = JoinInfo
    update_info_cls = BucketInfo
    model: Any
    receiver: BucketReceiver | None = None
    received: set[str]

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        i = init_info
        rank = i.rank + self.parallel_config.rank
        self.receiver = BucketReceiver(i.host, i.port, i.local_host, rank, i.size, i.deadline_s)

    def start_weight_update(self) -> None:
        self.received = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        self.received.update(update_info.names)
        self.model.load_weights((name, self._own(tensor)) for name, tensor in self._receive(update_info))

    def receive_tensors(self, bucket: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """One bucket's tensors, valid until the next is received; for what isn't the model's own weights."""
        return self._receive(self.parse_update_info(bucket))

    def _receive(self, u: BucketInfo) -> Iterator[tuple[str, Tensor]]:
        if self.receiver is None:
            raise RuntimeError("a weight bucket before the engine joined the sync group")
        data = self.receiver.receive(u.nbytes, u.round, u.deadline_s)
        return unpack(from_metadata(u.names, u.dtypes, u.shapes, u.offsets), data)

    def _own(self, tensor: Tensor) -> Tensor:
        # vLLM's loader keeps references until a layer is complete, longer than the receive buffer lasts.
        return tensor.to(self.device, copy=True, memory_format=torch.contiguous_format)

    def finish_weight_update(self) -> None:
        missing = sorted(checkpoint_names(self.model_config.hf_config) - self.received)
        if missing:
            raise ValueError(f"weight sync left out {len(missing)} tensors, the first is {missing[0]}")
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.receiver = None
