"""Adam over a Megatron model: FP32 main parameters, moments and gradient buffers, one learning rate per update.

Norms, gate biases and other 1-D parameters have no weight decay. With Megatron's distributed optimizer each
data-parallel rank has a part of the main parameters and moments, and of the summed gradients. They may live in host
memory or in files (`beam_rl.megatron.nvme`). Knows nothing about losses and schedules.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from beam_rl.megatron import compat
from beam_rl.megatron.model import BeamModel
from beam_rl.megatron.nvme.adam import counts_per_parameter
from beam_rl.megatron.nvme.layout import Kind
from beam_rl.megatron.nvme.optimizer import Part, StreamedAdam, StreamedState
from beam_rl.recipe.tree import Optimizer

MOMENTS: tuple[Literal["exp_avg", "exp_avg_sq"], ...] = ("exp_avg", "exp_avg_sq")
MOMENT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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


def make_optimizer(
    model: Sequence[DistributedDataParallel], recipe: Optimizer, folder: Path | None = None
) -> MegatronOptimizer:
    """AdamW with the recipe's settings and gradient clipping by global norm.

    Args:
        model: the chunks of this rank. folder: this rank's own, for `offload: nvme`.
    Raises:
        InputError, DiskError: the folder can't be used, or has no room for the state.
    """
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
    if recipe.offload == "none":
        _create_moments(optimizer)
    else:
        assert (folder is not None) == (recipe.offload == "nvme")
        _stream(optimizer, model, recipe, folder)
    return optimizer


def _stream(optimizer: MegatronOptimizer, model: Sequence[nn.Module], recipe: Optimizer, folder: Path | None) -> None:
    """Moves main parameters and moments into a store; Megatron's optimizers get them from there in every step."""
    adams = _adams(optimizer)
    groups = [(adam, group) for adam in adams for group in adam.param_groups]
    group_of = {id(main): i for i, (_, group) in enumerate(groups) for main in group["params"]}
    parts = []
    for i, chunk in enumerate(model):
        mine = owned(chunk, optimizer)
        for name, parameter in chunk.named_parameters():
            if part := mine.get(parameter):
                parts.append(Part(f"{i}.{name}", parameter, part.key, part.start, group_of[id(part.key)]))
    if parts:
        nvme = recipe.nvme
        state = StreamedState(parts, groups, folder, nvme.block_bytes, MOMENT_TYPES[nvme.moments])
        wrapped = [StreamedAdam(adam, state, first=adam is adams[0]) for adam in adams]
        for megatrons, adam in zip([p for p in _parts(optimizer) if p.optimizer is not None], wrapped, strict=True):
            compat.replace_adam(megatrons, adam)


def streamed_state(optimizer: MegatronOptimizer) -> StreamedState | None:
    """What this rank keeps in host memory or in files; None where it keeps it with the weights, or trains nothing."""
    return next((adam.streamed for adam in _adams(optimizer) if isinstance(adam, StreamedAdam)), None)


def prefetch(optimizer: MegatronOptimizer) -> None:
    """Begins to read the state from files that the next update will need."""
    if state := streamed_state(optimizer):
        state.prefetch()


@contextlib.contextmanager
def rewriting(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Inside, what `parameter_state` yields may be written to, and `set_step` called."""
    state = streamed_state(optimizer)
    with state.rewriting() if state else contextlib.nullcontext():
        yield


def _create_moments(optimizer: MegatronOptimizer) -> None:
    """Adam's state exists from the start, so that every checkpoint has the same tensors."""
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            for main in group["params"]:
                adam.state[main] = {name: torch.zeros_like(main) for name in MOMENTS}
                if counts_per_parameter(adam):
                    adam.state[main]["step"] = torch.tensor(0.0)


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Dense and expert parameters have optimizers of their own."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _adams(optimizer: MegatronOptimizer) -> list[Any]:
    """torch's or Transformer Engine's, or what took their place."""
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


def parameter_state(model: nn.Module, optimizer: MegatronOptimizer) -> Iterator[tuple[Kind, str, Tensor, int]]:
    """What a checkpoint must hold besides the weights: (kind, parameter's name, flat live tensor, where it begins).

    The kinds are Adam's two moments (FP32, or as `nvme.moments` says) and, for weights that are not FP32 themselves,
    `main`. Of a state in files the tensors are views of the files, which take no memory.
    """
    streamed = streamed_state(optimizer)
    states = {id(main): state for adam in _adams(optimizer) for main, state in adam.state.items()}
    mine = owned(model, optimizer)
    for name, parameter in model.named_parameters():
        if (part := mine.get(parameter)) is None:
            continue
        if parameter.dtype != torch.float32:
            yield "main", name, streamed.view("main", part.key) if streamed else part.main, part.start
        for moment in MOMENTS:
            flat = streamed.view(moment, part.key) if streamed else states[id(part.key)][moment].view(-1)
            yield moment, name, flat, part.start


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
    if state := streamed_state(optimizer):
        return state.updates
    steps = [0]
    for adam in _adams(optimizer):
        counters = list(adam.state.values())[:1] if counts_per_parameter(adam) else adam.param_groups
        steps += [int(counter.get("step", 0)) for counter in counters]
    return max(steps)


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Call it inside `rewriting`."""
    if state := streamed_state(optimizer):
        return state.set_updates(step)
    for adam in _adams(optimizer):
        counters = adam.state.values() if counts_per_parameter(adam) else adam.param_groups
        for counter in counters:
            counter["step"] = torch.tensor(float(step)) if counts_per_parameter(adam) else step
