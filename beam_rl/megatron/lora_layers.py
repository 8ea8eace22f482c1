"""Megatron-Bridge's LoRA on one of Megatron's linear layers: W·x + alpha/rank · B·(A·x), on a rank's part of W.

Over the ranks that share W, A is cut along the rank (column-parallel W) or the inputs (row-parallel W), and B along the
outputs. Where Bridge's classes don't fit a Beam, or are wrong, they are amended here. Knows nothing about which layers
have an adapter, or about HF names.
"""

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from megatron.bridge.peft.lora_layers import LoRALinear as AdaptedLinear
from megatron.bridge.peft.utils import (
    GroupedExpertLinearAdapter,
    ParallelLinearAdapter,
    get_adapter_attributes_from_linear,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


class _WholeHidden(nn.Module):
    """A·x of an expert that several ranks share, between Bridge's two projections (in the place of an activation).

    Megatron leaves it to the token dispatcher to sum an expert's outputs and input gradients over those ranks, so its
    expert linears sum nothing. Bridge 0.6 counts on them to: the hidden values of a down projection would stay a part
    of the sum, and the gradient of A would miss the other ranks' outputs.
    """

    def __init__(self, group: dist.ProcessGroup, partial: bool) -> None:
        super().__init__()
        self.group, self.partial = group, partial

    def forward(self, hidden: Tensor) -> Tensor:
        if self.group.size() == 1:
            return hidden
        if self.partial:
            hidden = reduce_from_tensor_model_parallel_region(hidden, self.group)
        return copy_to_tensor_model_parallel_region(hidden, self.group)


def _own_columns(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A rank's part of the outputs among zeros: the dispatcher's sum over the ranks puts the parts together."""
    if group.size() == 1:
        return part
    before, after = group.rank(), group.size() - 1 - group.rank()
    return F.pad(part, (before * part.size(-1), after * part.size(-1)))


class ExpertAdapter(ParallelLinearAdapter):
    """Bridge's adapter of one expert, right also where several ranks share the expert."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, is_expert=True, **kwargs)
        self.activation = _WholeHidden(self.tp_group, self.input_is_parallel)
        self.linear_out.gather_output = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = super().forward(x, *args, **kwargs)
        return _own_columns(out, self.tp_group) if self.input_is_parallel else out


class GroupedExpertAdapter(GroupedExpertLinearAdapter):
    """The same for the experts that Transformer Engine computes together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = _WholeHidden(self.expert_tp_group, self.input_is_parallel)

    def _is_te_fp8_enabled(self) -> bool:
        return False  # the adapter of an MXFP8 base is BF16

    def _gather_along_last_dim(self, tensor: Tensor) -> Tensor:
        if self.input_is_parallel:
            return _own_columns(tensor, self.expert_tp_group)
        return gather_from_tensor_model_parallel_region(tensor, self.expert_tp_group)  # Bridge's has no gradient

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Each expert's matrices by themselves, under the names that experts one by one have.

        Bridge's own cuts gate from up across all experts: views with gaps, which the optimizer's flat state has not.
        """
        first = self.ep_group.rank() * self.num_local_experts
        groups = {"tp_group": self.expert_tp_group, "dp_cp_group": self.expert_dp_group}
        state: dict[str, list[Any]] = {}
        for name, axis in (("linear_in", 1 if self.input_is_parallel else 0), ("linear_out", 0)):
            weight = getattr(self, name).weight
            state[f"{prefix}{name}.weight"] = shards = []
            for expert, matrix in enumerate(weight, start=first):
                found = make_sharded_tensors_for_checkpoint(
                    {"weight": matrix}, f"{expert}.{prefix}{name}.", {"weight": axis}, sharded_offsets, **groups
                )
                shards.extend(found.values())
        if not self.input_is_parallel:
            outputs = state[f"{prefix}linear_out.weight"]
            outputs[:] = [apply_swiglu_sharded_factory(shard, sharded_offsets) for shard in outputs]
        return state


def adapted(linear: Any, name: str, rank: int, alpha: float) -> AdaptedLinear:
    """A Megatron linear layer with an adapter on top, A and B zero.

    `name` tells its kind: "mlp.linear_fc1", "mlp.experts.local_experts.3.linear_fc1" an expert's, "mlp.experts.linear_fc1"
    that of all experts together.

    We choose rank and alpha here: Bridge's `LoRA` would keep alpha for experts of rank / top-k, whose scale would then be
    top-k times that of the dense modules, and would round an expert's rank up to a multiple of the ranks that share it.
    """
    expert = "mlp.experts" in name
    about = get_adapter_attributes_from_linear(linear, is_expert=expert)
    options: dict[str, Any] = dict(
        base_linear_name=name,
        activation="identity",
        column_init_method="zero",
        row_init_method="zero",
        input_is_parallel=about.input_is_parallel,
        model_parallel_config=linear.config,
        alpha=alpha,
        base_linear_is_parallel=about.base_linear_is_parallel,
    )
    sizes = (about.in_features, about.out_features, rank)
    initialized = linear.config.perform_initialization
    if expert and "local_experts" not in name:
        first = next(linear.parameters())
        adapter: nn.Module = GroupedExpertAdapter(
            *sizes, num_local_experts=linear.num_gemms, params_device=first.device, params_dtype=first.dtype, **options
        )
    else:
        adapter = (ExpertAdapter if expert else ParallelLinearAdapter)(
            *sizes,
            disable_tensor_parallel_comm=about.disable_tensor_parallel_comm,
            disable_sequence_parallel_comm=about.disable_sequence_parallel_comm,
            **options,
        )
    linear.config.perform_initialization = initialized  # Bridge turns it on for good
    return AdaptedLinear(linear, adapter)
