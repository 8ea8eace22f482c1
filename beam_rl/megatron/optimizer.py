"""Adam over a Megatron model: FP32 main parameters, moments and gradient buffers, one learning rate per update.

Norms, gate biases and other 1-D parameters have no weight decay. With Megatron's distributed optimizer each
data-parallel rank has a part of the main parameters and moments, and of the summed gradients. Knows nothing about
losses, schedules or files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from beam_rl.megatron import compat
from beam_rl.megatron.model import BeamModel
from beam_rl.recipe.tree import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def with_gradient_buffers(model: BeamModel, distributed: bool) -> DistributedDataParallel:
    """Wraps the model: gradients accumulate in FP32 buffers, the router's apart, and are summed over DP ranks.

    A frozen parameter has none of all that is here: no gradient buffer, main parameter or moments.

    distributed: as the optimizer; each rank then gets its own part of the sum only.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed
    )
    parts: dict[str, Any] = {}
    if distributed:
        parts["full_param_layout"] = DistributedOptimizer.compute_full_param_layout(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            None,
            parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            settings,
            expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
        )
    return DistributedDataParallel(config=model.config, ddp_config=settings, module=model, **parts)


def make_optimizer(model: Sequence[DistributedDataParallel], recipe: Optimizer) -> MegatronOptimizer:
    """AdamW with the recipe's settings and gradient clipping by global norm; `model`: the chunks of this rank."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=recipe.lr,
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        adam_eps=recipe.eps,
        weight_decay=recipe.weight_decay,
        clip_grad=recipe.clip_grad,
        bf16=model[0].config.bf16,
        params_dtype=model[0].config.params_dtype,
        use_distributed_optimizer=recipe.distributed,
    )
    optimizer = get_megatron_optimizer(config, list(model), use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Megatron applies this factor in its own schedule of learning rate and decay, which we don't use.
        group["weight_decay"] = recipe.weight_decay * group["wd_mult"]
    _create_moments(optimizer)
    return optimizer


def _create_moments(optimizer: MegatronOptimizer) -> None:
    """Adam's state exists from the start, so that every checkpoint has the same tensors."""
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            for main in group["params"]:
                adam.state[main] = {name: torch.zeros_like(main) for name in MOMENTS}
                if _counts_per_parameter(adam):
                    adam.state[main]["step"] = torch.tensor(0.0)


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Dense and expert parameters have optimizers of their own."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _adams(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in _parts(optimizer) if part.optimizer is not None]


def set_lr(optimizer: MegatronOptimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@dataclass(frozen=True)
class Owned:
    """What this rank's optimizer updates of a parameter: `main`, flat and FP32, are its values from `start` on.

    `main` is a copy for a BF16 weight and the weight itself for an FP32 one. Adam keeps its state under `key`.
    """

    key: Tensor
    start: int

    @property
    def main(self) -> Tensor:
        return self.key.detach().view(-1)


def is_distributed(optimizer: MegatronOptimizer) -> bool:
    """Whether data-parallel ranks hold different parts of its state, not copies."""
    return any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer))


def owned(model: nn.Module, optimizer: MegatronOptimizer) -> dict[nn.Parameter, Owned]:
    """This rank's part of each parameter; of some it has none."""
    parts = [part for part in _parts(optimizer) if isinstance(part, DistributedOptimizer)]
    if parts:
        mine = {p: Owned(main, start) for part in parts for p, main, start in compat.optimizer_shards(part)}
        return {p: mine[p] for p in model.parameters() if p in mine}
    return {p: Owned(getattr(p, "main_param", p), 0) for p in model.parameters() if p.requires_grad}


def parameter_state(model: nn.Module, optimizer: MegatronOptimizer) -> Iterator[tuple[str, str, Tensor, int]]:
    """What a checkpoint must hold besides the weights: (kind, parameter's name, flat FP32 tensor, where it begins).

    The kinds are Adam's two moments and, for weights that are not FP32 themselves, `main`.
    """
    states = {id(main): state for adam in _adams(optimizer) for main, state in adam.state.items()}
    mine = owned(model, optimizer)
    for name, parameter in model.named_parameters():
        if (part := mine.get(parameter)) is None:
            continue
        if parameter.dtype != torch.float32:
            yield "main", name, part.main, part.start
        for moment in MOMENTS:
            yield moment, name, states[id(part.key)][moment].view(-1), part.start


def state_tensors(optimizer: MegatronOptimizer, device: torch.device) -> list[Tensor]:
    """Main parameters and Adam's state on the device, some of them views of weights; step counters may be on the host."""
    found: list[Tensor] = []
    for adam in _adams(optimizer):
        found += [main for group in adam.param_groups for main in group["params"]]
        found += [value for state in adam.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [tensor for tensor in found if tensor.device == device]


def router_gradient_norm(models: Sequence[BeamModel], optimizer: MegatronOptimizer) -> float:
    """Of all routers of the model together, after the gradients' sum over ranks; the same on every rank."""
    total = torch.zeros((), device=models[0].config.device)
    for model in models:
        mine = owned(model, optimizer)
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight") and parameter in mine:
                part = mine[parameter]
                gradient: Tensor = parameter.main_grad
                total += gradient.view(-1)[part.start : part.start + part.main.numel()].square().sum()
    if is_distributed(optimizer):
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return float(total.sqrt())


def get_step(optimizer: MegatronOptimizer) -> int:
    """Updates that Adam has made; 0 on a rank that trains nothing."""
    steps = [0]
    for adam in _adams(optimizer):
        counters = list(adam.state.values())[:1] if _counts_per_parameter(adam) else adam.param_groups
        steps += [int(counter.get("step", 0)) for counter in counters]
    return max(steps)


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    for adam in _adams(optimizer):
        counters = adam.state.values() if _counts_per_parameter(adam) else adam.param_groups
        for counter in counters:
            counter["step"] = torch.tensor(float(step)) if _counts_per_parameter(adam) else step


def _counts_per_parameter(adam: torch.optim.Optimizer) -> bool:
    """torch's Adam does; Transformer Engine's fused one has a step for each group."""
    return isinstance(adam, torch.optim.Adam | torch.optim.AdamW)
