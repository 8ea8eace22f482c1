"""vLLM's weight-transfer interface over this project's transports: the engine's end of a sync, inside vLLM's worker.

An update is whole or it fails: `finish` refuses when a tensor of the checkpoint did not come, since the model would then be
a mixture of two versions. One that was left half way is forgotten when the next begins.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from beam_rl.checkpoint_shapes import checkpoint_shapes, stored_names
from beam_rl.model_config import is_beam
from beam_rl.rollout.expert_stacks import ExpertStacks
from beam_rl.rollout.mxfp8 import of_config
from beam_rl.rollout.sync.link import open_receiver
from beam_rl.rollout.sync.receiver import BucketReceiver


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """`join` is what `sync.transport.WeightSender.join_infos` says."""

    join: dict[str, Any]
    local_host: str


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """`bucket` is what the sender announces."""

    bucket: dict[str, Any]


class WeightReceiver(WeightTransferEngine[JoinInfo, BucketInfo]):
    """Receives buckets and loads them through the model's own checkpoint loader, layer by layer."""

    init_info_cls = JoinInfo
    update_info_cls = BucketInfo
    model: Any
    receiver: BucketReceiver | None = None
    received: set[str]
    stacks: ExpertStacks | None = None  # from the first update of all weights on

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank  # of those of this engine
        end = open_receiver(init_info.join, worker, init_info.local_host, self.device)
        self.receiver = BucketReceiver(end)

    def start_weight_update(self) -> None:
        self.begin(self.device)
        initialize_layerwise_reload(self.model)
        if self.stacks is None:
            self.stacks = ExpertStacks(self.model)
        self.stacks.begin()

    def receive_weights(self, update_info: BucketInfo) -> None:
        assert self.stacks is not None
        self.model.load_weights(self.stacks.others(self.receive_tensors(update_info.bucket)))

    def begin(self, device: torch.device) -> None:
        """Starts with the first bucket of an update, whose tensors will be on `device`."""
        self._joined().begin(device)
        self.received = set()

    def receive_tensors(self, bucket: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a bucket completes, each with its own memory."""
        for name, tensor in self._joined().receive(bucket):
            self.received.add(name)
            yield name, tensor
            del tensor

    def forget(self) -> None:
        """Lets go of what has come of an update that was left half way."""
        if self.stacks is not None:
            self.stacks.begin()

    def finish_weight_update(self) -> None:
        config, scheme = self.model_config.hf_config.to_dict(), of_config(self.vllm_config)
        names = checkpoint_shapes(config) if is_beam(config) else stored_names(Path(self.model_config.model), config)
        missing = sorted({*(scheme.names(names) if scheme else names)} - self.received)
        if missing:
            raise ValueError(f"weight sync left out {len(missing)} tensors, the first is {missing[0]}")
        assert self.stacks is not None
        self.stacks.check_whole()
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = None

    def _joined(self) -> BucketReceiver:
        if self.receiver is None:
            raise RuntimeError("a weight update before the engine joined a sender")
        return self.receiver
