"""Every sub-layer's output of the trainer, whole, whatever the layout: looked at from outside, nothing left behind.

Modules are found by name and hooked while a probe runs. What tensor parallelism splits is gathered: heads and vocabulary
over their last dimension, tokens under sequence parallelism over their first; layers keep their global number, so
pipeline stages add up. Knows nothing about the other sides.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from beam_rl.layout import PADDING, Place, context_rows, cut_routes, pad, token_block
from beam_rl.megatron import attention, logprobs
from beam_rl.megatron.model import BeamConfig
from beam_rl.megatron.trainer import Trainer
from beam_rl.parity.record import Recorder, Records
from beam_rl.samples import MicroBatch

Gather = Callable[[Tensor], Tensor]


def probe(trainer: Trainer, sequences: Sequence[MicroBatch]) -> dict[int, Records]:
    """Scores sequences, one a micro-batch, and records every sub-layer; all ranks call it with all sequences.

    A data-parallel replica takes its share. Returns the records by the sequence's index, of this rank's layers; nothing
    but on the first of the ranks that share them, which has the whole. Routes are replayed where a sequence has them. Of
    another model than Beam, log-probabilities are all there is.
    """
    place = trainer.place
    mine = _share(len(sequences), place)
    settings = trainer.settings
    layout = (place.parallel, trainer.config.num_moe_experts or 0, token_block(settings.precision))
    padded = [pad(sequences[i], *layout) for i in mine]
    recorder = Recorder()
    longest = max(len(batch.tokens) for batch in padded)
    trainer.settings = replace(settings, routing_replay=True, chunk_tokens=longest)  # one chunk: one record
    try:
        with ExitStack() as stack:
            for chunk in trainer.chunks if isinstance(trainer.config, BeamConfig) else ():
                stack.enter_context(observed(chunk, recorder))
            if isinstance(trainer.config, BeamConfig):
                stack.enter_context(_cores_observed(trainer.chunks, recorder))
            scores = trainer.score([cut_routes(batch, place) for batch in padded])
    finally:
        trainer.settings = settings
    if place.tp or place.cp:
        return {}
    parts = recorder.parts()
    found: dict[int, Records] = {}
    for n, (i, batch) in enumerate(zip(mine, padded, strict=True)):
        rows = _real_rows(batch, place.parallel.cp)
        found[i] = {at: values[n].numpy()[rows] for at, values in parts.items()}
        if scores:
            real = batch.sample != PADDING
            found[i][None, "log_probabilities"] = scores[n].logp[real][:, None]
    return found


def _share(sequences: int, place: Place) -> list[int]:
    """This replica's sequences. All replicas get as many, for they share experts: the last one may repeat."""
    dp, pp = place.parallel.dp, place.parallel.pp
    count = -(-sequences // (dp * pp)) * pp  # an interleaved pipeline runs them in groups of pp
    return [min(n * dp + place.dp, sequences - 1) for n in range(count)]


def _real_rows(batch: MicroBatch, cp: int) -> NDArray[np.int64]:
    """Where the micro-batch's own tokens are among those that its context-parallel ranks have, one rank after another."""
    gathered = np.arange(len(batch.tokens))
    if cp > 1:
        gathered = np.concatenate([context_rows(batch.cu_tokens, cp, index) for index in range(cp)])
    return gathered.argsort()[batch.sample != PADDING]


@contextmanager
def observed(model: Any, recorder: Recorder) -> Iterator[None]:
    """Records what `model`, a rank's part of a pipeline, computes inside; what a core attention gets is not seen here."""
    tokens = gather_tokens if model.config.sequence_parallel else gather_context
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
        if model.post_process:
            after(model.decoder.final_layernorm, None, "final_norm", _itself, tokens)
            stack.enter_context(_logits_observed(recorder, model.config.vocab_size))
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


def gather_context(x: Tensor) -> Tensor:
    """(tokens of this context-parallel rank, …) → (tokens, …), one rank's after another's."""
    return _gathered(x, 0, parallel_state.get_context_parallel_group())


def gather_tokens(x: Tensor) -> Tensor:
    """(tokens of this sequence- and context-parallel rank, …) → (tokens, …)."""
    return gather_context(_gathered(x, 0, parallel_state.get_tensor_model_parallel_group()))


def gather_last(x: Tensor) -> Tensor:
    """(tokens of this context-parallel rank, …, parts) with the rest split over tensor-parallel ranks → (tokens, all)."""
    flat = x.reshape(len(x), -1)
    return gather_context(_gathered(flat, 1, parallel_state.get_tensor_model_parallel_group()))


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    if size == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


@contextmanager
def _cores_observed(chunks: Sequence[Any], recorder: Recorder) -> Iterator[None]:
    """Q, K and V as the core attention gets them, positions included: the class below `BeamCore` sees them so."""
    core = attention.BeamCore.__bases__[0]
    forward = core.forward
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    layer_of = {layer.self_attention.core_attention: layer.layer_number - 1 for layer in layers}

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
def _logits_observed(recorder: Recorder, vocabulary: int) -> Iterator[None]:
    """Of a part of the vocabulary, or of all of it on every tensor-parallel rank.

    Kernels never have the logits as the softmax sees them: they are computed beside, in plain torch.
    """
    make: Any = logprobs._softmax

    def observed(hidden: Tensor, head: Tensor, options: Any) -> Any:
        softmax, plain = make(hidden, head, options), logprobs._Plain(hidden, head, options)
        sums = softmax.sums

        def recording(hidden: Tensor, head: Tensor, row: Tensor) -> tuple[Tensor, ...]:
            logits = plain._logits(hidden, head, keep_tanh=False)[0]
            whole = logits.shape[-1] == vocabulary
            recorder.add(None, "logits", gather_context(logits) if whole else gather_last(logits))
            return sums(hidden, head, row)

        softmax.sums = recording
        return softmax

    with replaced(logprobs, "_softmax", observed):
        yield
