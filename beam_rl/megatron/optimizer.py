"""Adam over a Megatron model: FP32 main parameters, moments and gradient buffers, one learning rate per update.

Norms, gate biases and other 1-D parameters have no weight decay. Knows nothing about losses, schedules or files.
"""

from collections.abc import Iterator

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from beam_rl.megatron.model import BeamModel
from beam_rl.recipe.tree import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def with_gradient_buffers(model: BeamModel) -> DistributedDataParallel:
    """Wraps the model: gradients accumulate in FP32 buffers, the router's apart, and are summed over DP ranks."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config=model.config, ddp_config=settings, module=model)


def make_optimizer(model: DistributedDataParallel, recipe: Optimizer) -> MegatronOptimizer:
    """AdamW with the recipe's settings and gradient clipping by global norm."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=recipe.lr,
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        adam_eps=recipe.eps,
        weight_decay=recipe.weight_decay,
        clip_grad=recipe.clip_grad,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
    )
    optimizer = get_megatron_optimizer(config, [model])
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


def _adams(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts]


def set_lr(optimizer: MegatronOptimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def main_parameter(parameter: nn.Parameter) -> Tensor:
    """The FP32 tensor that Adam updates: a copy for a BF16 weight, the weight itself for an FP32 one."""
    return getattr(parameter, "main_param", parameter)


def parameter_state(model: nn.Module, optimizer: MegatronOptimizer) -> Iterator[tuple[str, str, Tensor]]:
    """What a checkpoint must hold besides the weights: (kind, parameter's name, FP32 tensor of its shape).

    The kinds are Adam's two moments and, for weights that are not FP32 themselves, `main`.
    """
    states = {id(main): state for adam in _adams(optimizer) for main, state in adam.state.items()}
    for name, parameter in model.named_parameters():
        main = main_parameter(parameter)
        if main is not parameter:
            yield "main", name, main
        for moment in MOMENTS:
            yield moment, name, states[id(main)][moment]


def get_step(optimizer: MegatronOptimizer) -> int:
    """Updates that Adam has made."""
    adam = _adams(optimizer)[0]
    if _counts_per_parameter(adam):
        return int(next(iter(adam.state.values()))["step"])
    return int(adam.param_groups[0].get("step", 0))


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    for adam in _adams(optimizer):
        counters = adam.state.values() if _counts_per_parameter(adam) else adam.param_groups
        for counter in counters:
            counter["step"] = torch.tensor(float(step)) if _counts_per_parameter(adam) else step


def _counts_per_parameter(adam: torch.optim.Optimizer) -> bool:
    """torch's Adam does; Transformer Engine's fused one has a step for each group."""
    return isinstance(adam, torch.optim.Adam | torch.optim.AdamW)
