"""Every sub-layer's output of the trainer, whole, whatever the layout: looked at from outside, nothing left behind.

Modules are found by name and hooked while a probe runs. What tensor parallelism splits is gathered: heads and vocabulary
over their last dimension, tokens under sequence parallelism over their first; layers keep their global number, so
pipeline stages add up. Knows nothing about the other sides.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.layout import cut_routes, pad
from beam_rl.megatron import attention, logprobs
from beam_rl.megatron.trainer import Trainer
from beam_rl.parity.record import Recorder, Records
from beam_rl.samples import MicroBatch

Gather = Callable[[Tensor], Tensor]


def probe(trainer: Trainer, sequences: Sequence[MicroBatch]) -> dict[int, Records]:
    """Scores sequences, one a micro-batch, and records every sub-layer; all ranks call it with all sequences.

    A data-parallel rank takes its share. Returns the records by the sequence's index, of this rank's layers; nothing but
    on the first tensor-parallel rank, which has the whole. Routes are replayed where a sequence has them.
    """
    parallel, num_experts = trainer.settings.parallel, trainer.config.num_moe_experts
    for key, size in (("cp", parallel.cp), ("vpp", parallel.vpp)):
        if size > 1:
            raise InputError(f"trainer.parallel.{key} = {size}: parity can't look inside such a layout; use 1")
    mine = _share(len(sequences))
    batches = [cut_routes(pad(sequences[i], parallel, num_experts), trainer.place) for i in mine]
    recorder = Recorder()
    settings = trainer.settings
    trainer.settings = replace(settings, routing_replay=True, chunk_tokens=max(len(b.tokens) for b in batches))
    try:
        with observed(trainer.model, recorder, settings.temperature):
            scores = trainer.score(batches)
    finally:
        trainer.settings = settings
    for score in scores:
        recorder.add(None, "log_probabilities", torch.from_numpy(score.logp))
    if parallel_state.get_tensor_model_parallel_rank():
        return {}
    parts = recorder.parts()
    return {
        i: {place: rows[n][: len(sequences[i].tokens)].numpy() for place, rows in parts.items()}
        for n, i in enumerate(mine)
    }


def _share(sequences: int) -> list[int]:
    """This data-parallel rank's sequences. All ranks get as many, for experts are shared: the last one may repeat."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return [min(i, sequences - 1) for i in range(rank, rank + -(-sequences // size) * size, size)]


@contextmanager
def observed(model: Any, recorder: Recorder, temperature: float) -> Iterator[None]:
    """Records what `model` computes inside."""
    tokens = gather_tokens if model.config.sequence_parallel else unchanged
    with ExitStack() as stack:

        def after(module: Any, layer: int | None, name: str, value: Callable[[Any], Tensor], gather: Gather) -> None:
            hook = module.register_forward_hook(lambda m, i, out: recorder.add(layer, name, gather(value(out))))
            stack.callback(hook.remove)

        if model.pre_process:
            after(model.embedding, None, "embedding", _itself, tokens)
        for layer in model.decoder.layers:
            i = layer.layer_number - 1
            after(layer.input_layernorm, i, "input_norm", _itself, tokens)
            after(layer.self_attention.core_attention, i, "attention", _itself, gather_last)
            after(layer.self_attention, i, "attention_out", _first, tokens)
            after(layer.self_attn_bda.norm, i, "post_attention_norm", _itself, tokens)
            hook = layer.pre_mlp_layernorm.register_forward_pre_hook(
                lambda m, args, i=i: recorder.add(i, "residual_attention", tokens(args[0]))
            )
            stack.callback(hook.remove)
            after(layer.pre_mlp_layernorm, i, "pre_mlp_norm", _itself, tokens)
            after(layer.mlp, i, "mlp", _first, tokens)
            after(layer.mlp_bda.norm, i, "post_mlp_norm", _itself, tokens)
            after(layer, i, "residual_mlp", _first, tokens)
            stack.enter_context(_gate_observed(layer.self_attention, recorder, i))
            if layer.is_moe_layer:
                stack.enter_context(_router_observed(layer.mlp.router, recorder, i, tokens))
        stack.enter_context(_cores_observed(model, recorder))
        if model.post_process:
            after(model.decoder.final_layernorm, None, "final_norm", _itself, tokens)
            stack.enter_context(_logits_observed(recorder))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, `owner.name` is `value`; afterwards what it was: an attribute of its own, or its class's."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _itself(out: Any) -> Tensor:
    return out


def _first(out: Any) -> Tensor:
    return out[0]


def unchanged(x: Tensor) -> Tensor:
    return x


def gather_last(x: Tensor) -> Tensor:
    """(tokens, …, parts) with the last dimension split over tensor-parallel ranks → (tokens, all)."""
    return _gathered(x.reshape(len(x), -1), dim=-1)


def gather_tokens(x: Tensor) -> Tensor:
    """(tokens of this rank, …) → (tokens, …)."""
    return _gathered(x, dim=0)


def _gathered(x: Tensor, dim: int) -> Tensor:
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=dim)


@contextmanager
def _cores_observed(model: Any, recorder: Recorder) -> Iterator[None]:
    """Q, K and V as the core attention gets them, positions included: the class below `BeamCore` sees them so."""
    core = attention.BeamCore.__bases__[0]
    forward = core.forward
    layer_of = {layer.self_attention.core_attention: layer.layer_number - 1 for layer in model.decoder.layers}

    def recording(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        for name, part in (("q", query), ("k", key), ("v", value)):
            recorder.add(layer_of[self], name, gather_last(part))
        return forward(self, query, key, value, *args, **kwargs)

    with replaced(core, "forward", recording):
        yield


@contextmanager
def _gate_observed(module: Any, recorder: Recorder, layer: int) -> Iterator[None]:
    """The gate as the attention applies it: what it makes of ones."""
    apply = module._apply_output_gate

    def recording(x: Tensor, gate: Tensor) -> Tensor:
        recorder.add(layer, "gate", gather_last(apply(torch.ones_like(x), gate)))
        return apply(x, gate)

    with replaced(module, "_apply_output_gate", recording):
        yield


@contextmanager
def _router_observed(router: Any, recorder: Recorder, layer: int, tokens: Gather) -> Iterator[None]:
    """The logits, and the weights that the router would give the experts of its own choice."""
    routing = router.routing

    def recording(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder.add(layer, "router_logits", tokens(logits))
        recorder.add(layer, "experts", tokens(routing(logits)[0]))
        return routing(logits, *args, **kwargs)

    with replaced(router, "routing", recording):
        yield


@contextmanager
def _logits_observed(recorder: Recorder) -> Iterator[None]:
    scaled = logprobs.scaled_logits

    def recording(*args: Any, **kwargs: Any) -> Tensor:
        logits = scaled(*args, **kwargs)
        recorder.add(None, "logits", gather_last(logits))
        return logits

    with replaced(logprobs, "scaled_logits", recording):
        yield
