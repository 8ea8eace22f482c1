"""Transformers' Beam as the reference: log-probabilities of given tokens and every sub-layer on the way.

Alone in its process, so that nothing of Megatron or vLLM can reach it. It follows the recipe where that departs from
transformers on purpose: the same experts where routes are replayed, the logits rounded where the engine's are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, BeamForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from beam_rl.parity.record import MARGIN, Recorder, Records

ATTENTION = "beam_rl_parity"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Reference:
    """A checkpoint in transformers, with an adapter added to its weights by PEFT where there is one."""

    def __init__(
        self,
        model_path: str,
        precision: str,
        rounded_logits: bool,
        temperature: float,
        adapter: str | None = None,
        fp32_head: bool = False,
    ) -> None:
        """rounded_logits: round them to `precision` after the softcap, as the engine does. adapter: its HF folder.
        fp32_head: multiply with the head in FP32."""
        self.recorder: Recorder | None = None
        AttentionInterface.register(ATTENTION, self._attend)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = BeamForCausalLM.from_pretrained(model_path, dtype=DTYPES[precision], attn_implementation=ATTENTION)
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        self.model = model.to(device).eval()
        self.rounded_logits, self.temperature, self.fp32_head = rounded_logits, temperature, fp32_head

    @torch.no_grad()
    def probe(self, token_ids: NDArray[np.integer], routes: NDArray[np.integer] | None) -> Records:
        """One sequence. Of every token but the last: all sub-layers, and the log-probability of the next token.

        routes: (tokens − 1, MoE layers, top-k) experts to use; None: as the router chooses.
        """
        ids = torch.tensor(np.asarray(token_ids, np.int64), device=self.model.device)
        self.recorder = Recorder()
        with self._observed(self.recorder, routes):
            logits = self._logits(ids[None, :-1]).float() / self.temperature
        self.recorder.add(None, "logits", logits)
        self.recorder.add(None, "log_probabilities", logits.log_softmax(-1).gather(1, ids[1:, None]))
        return self.recorder.records()

    def _logits(self, ids: Tensor) -> Tensor:
        """(tokens, vocabulary) after the softcap."""
        if self.fp32_head:
            hidden = self.model.model(ids, use_cache=False).last_hidden_state[0]
            cap = self.model.config.final_logit_softcapping
            return torch.tanh(hidden.float() @ self.model.lm_head.weight.float().T / cap) * cap
        logits = self.model(ids, use_cache=False).logits[0]
        return logits.to(self.model.dtype) if self.rounded_logits else logits

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Transformers' attention over torch's kernel; what goes in and comes out is recorded."""
        out, weights = sdpa_attention_forward(module, query, key, value, *args, **kwargs)
        if self.recorder is not None:
            for name, part in (("q", query), ("k", key), ("v", value)):
                self.recorder.add(module.layer_idx, name, part[0].transpose(0, 1))
            self.recorder.add(module.layer_idx, "attention", out[0])
        return out, weights

    @contextmanager
    def _observed(self, recorder: Recorder, routes: NDArray[np.integer] | None) -> Iterator[None]:
        inner, hooks = self.model.model, []

        def after(module: Any, layer: int | None, name: str, value: Callable[[Any], Tensor] = _first) -> None:
            hooks.append(module.register_forward_hook(lambda m, i, out: recorder.add(layer, name, value(out))))

        def observe_layer(i: int, layer: Any) -> None:
            attention = layer.self_attn
            after(layer.input_layernorm, i, "input_norm")
            after(attention.gate_proj, i, "gate", lambda out: _gate(out[0], attention))
            after(attention, i, "attention_out", lambda out: out[0][0])
            after(layer.post_attention_layernorm, i, "post_attention_norm")
            norm = layer.pre_feedforward_layernorm
            before = norm.register_forward_pre_hook(lambda m, x: recorder.add(i, "residual_attention", x[0][0]))
            hooks.append(before)
            after(norm, i, "pre_mlp_norm")
            after(layer.mlp, i, "mlp")
            after(layer.post_feedforward_layernorm, i, "post_mlp_norm")
            after(layer, i, "residual_mlp")

        after(inner.embed_tokens, None, "embedding")
        after(inner.norm, None, "final_norm")
        for i, layer in enumerate(inner.layers):
            observe_layer(i, layer)
        sparse = [i for i, layer in enumerate(inner.layers) if hasattr(layer.mlp, "gate")]
        for column, i in enumerate(sparse):
            given = None if routes is None else torch.tensor(routes[:, column].astype(np.int64))
            router: Any = inner.layers[i].mlp.gate
            hooks.append(router.register_forward_hook(_router_hook(recorder, i, given)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _first(out: Tensor) -> Tensor:
    """Of the one sequence in the batch."""
    return out[0]


def _gate(projected: Tensor, attention: Any) -> Tensor:
    """(tokens, heads · dim) sigmoid of the projection with each head's bias."""
    by_head = projected.view(len(projected), -1, attention.head_dim)
    return torch.sigmoid(by_head + attention.gate_bias[None, :, None])


def _router_hook(recorder: Recorder, layer: int, routes: Tensor | None) -> Callable[..., Any]:
    """Records a router's own choice; with `routes`, (tokens, top-k), it hands on those experts instead."""

    def hook(router: Any, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        logits, weights, chosen = out
        scores = logits.sigmoid()
        recorder.add(layer, "router_logits", logits)
        recorder.add(layer, "experts", torch.zeros_like(logits).scatter(1, chosen, weights.float()))
        recorder.add(layer, MARGIN, choice_margin(scores + router.e_score_correction_bias, router))
        if routes is None:
            return None
        there = routes.to(logits.device)
        picked = scores.gather(1, there)
        return logits, picked / (picked.sum(-1, keepdim=True) + 1e-20), there

    return hook


def choice_margin(choice: Tensor, router: Any) -> Tensor:
    """(tokens, 1) how far the choice is from another one: the last expert to the next, the last group to the next.

    choice: (tokens, experts) scores with the correction bias.
    """
    groups = choice.view(len(choice), router.num_group, -1)
    by_group = groups.topk(2, dim=-1).values.sum(-1)
    ranked = by_group.sort(-1, descending=True)
    closed = torch.ones_like(by_group, dtype=torch.bool).scatter(1, ranked.indices[:, : router.topk_group], False)
    inside = groups.masked_fill(closed[..., None], -torch.inf).flatten(1).sort(-1, descending=True).values
    margin = inside[:, router.top_k - 1] - inside[:, router.top_k] if inside.shape[1] > router.top_k else None
    margins = [] if margin is None else [margin]
    if router.topk_group < router.num_group:
        margins.append(ranked.values[:, router.topk_group - 1] - ranked.values[:, router.topk_group])
    return torch.stack(margins).amin(0)[:, None] if margins else torch.full_like(choice[:, :1], torch.inf)
