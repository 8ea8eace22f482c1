"""What a vLLM Beam computes while it prefills one sequence: looked at from outside, nothing left behind.

Every sub-layer, or what log-probabilities take: the last hidden states, and the routers where they are told what to choose.
Works on our Beam and on vLLM's own; the latter fuses some sub-layers, which are left out then. Knows nothing about the
other sides.
"""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor

from beam_rl.parity.record import Recorder
from beam_rl.rollout import compat_probe
from beam_rl.rollout.compat_probe import Show, Undo, after, before, gate

HEAD_TOKENS = 256  # whose logits are computed at a time: a vocabulary's in FP32 are 0.6 MB a token


class Probe:
    """Records what the runner's model computes from now until `stop`."""

    def __init__(self, runner: Any, routes: Tensor | None, sublayers: bool = True) -> None:
        """routes: (tokens, MoE layers, top-k) experts to use; None: as the routers choose.

        sublayers: record them, or log-probabilities alone.
        """
        self.model, self.routes, self.sublayers = runner.get_model(), routes, sublayers
        self.recorder = Recorder()
        self._final: list[Tensor] = []
        self._routed: Counter[int] = Counter()  # tokens that each layer's router was asked about
        self._undo: list[Undo] = []
        try:
            self._look(runner)
        except BaseException:
            self.stop()
            raise

    def _look(self, runner: Any) -> None:
        self._undo.append(compat_probe.stop_graphs(runner))
        after(self.model.model, self._keep_final, self._undo)
        if self.sublayers:
            show = compat_probe.show_native if compat_probe.is_native(self.model) else show_own
            show(self.model, self.recorder.add, self._undo)
        if self.sublayers or self.routes is not None:
            compat_probe.observe_routing(self.model, self._router_hook, self._undo)

    def stop(self) -> None:
        """Leaves the model as it was."""
        while self._undo:
            self._undo.pop()()

    def finish(self, targets: Tensor, temperature: float) -> Recorder:
        """Stops, and adds what follows the last hidden states, up to the log-probabilities of `targets` (tokens,).

        Raises RuntimeError where not every token was seen, or no router could be told which experts to use.
        """
        self.stop()
        tokens = len(targets)
        if (seen := sum(map(len, self._final))) != tokens:
            raise RuntimeError(f"the engine ran {seen} tokens of a sequence of {tokens} where they can be looked at")
        if self.routes is not None and (asked := len(self._routed)) != (layers := self.routes.shape[1]):
            raise RuntimeError(
                f"{layers - asked} of {layers} MoE layers can't be told which experts to use: their kernels choose them"
            )
        self.recorder.keep_whole(tokens)
        self._add_end(torch.cat(self._final), targets, temperature)
        return self.recorder

    def _add_end(self, hidden: Tensor, targets: Tensor, temperature: float) -> None:
        if self.sublayers:
            self.recorder.add(None, "final_norm", hidden)
        for rows, wanted in zip(hidden.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True):
            with torch.inference_mode():
                logits = self.model.compute_logits(rows).float() / temperature
            if self.sublayers:
                self.recorder.add(None, "logits", logits)
            logp = logits.log_softmax(-1).gather(1, wanted.to(logits.device)[:, None])
            self.recorder.add(None, "log_probabilities", logp)

    def _keep_final(self, out: Any) -> None:
        self._final.append(out if isinstance(out, Tensor) else out[0])  # beside it: what a draft model reads

    def _router_hook(self, column: int, layer: int) -> compat_probe.Choose:
        """What a MoE layer asks with its router's (tokens, experts) logits and (tokens, top-k) choice."""

        def choose(logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            seen = self._routed[layer]
            self._routed[layer] += len(logits)
            if self.sublayers:
                self.recorder.add(layer, "router_logits", logits)
                own = torch.zeros_like(logits, dtype=torch.float).scatter(1, ids.long(), weights.float())
                self.recorder.add(layer, "experts", own)
            if self.routes is None:
                return weights, ids
            there = self.routes[seen : seen + len(logits), column].to(logits.device)
            picked = logits.float().sigmoid().gather(1, there)
            return (picked / (picked.sum(-1, keepdim=True) + 1e-20)).to(weights.dtype), there.to(ids.dtype)

        return choose


def show_own(model: Any, show: Show, undo: list[Undo]) -> None:
    """Has our Beam (`rollout.model`) show every sub-layer; `undo` gets what ends that."""
    after(model.model.embed_tokens, lambda out: show(None, "embedding", out), undo)
    for i, layer in enumerate(model.model.layers):
        _show_layer(i, layer, show, undo)


def _show_layer(i: int, layer: Any, show: Show, undo: list[Undo]) -> None:
    attention = layer.self_attn

    def show_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
        for name, value in (("q", q), ("k", k), ("v", v)):
            show(i, name, value)

    before(attention.attn, show_heads, undo)
    after(attention.output_gate_proj, lambda out: show(i, "gate", gate(out[0], attention.gate_bias)), undo)
    before(layer.pre_feedforward_layernorm, lambda x: show(i, "residual_attention", x), undo)
    outputs = {
        "input_norm": layer.input_layernorm,
        "attention": attention.attn,
        "attention_out": attention,
        "post_attention_norm": layer.post_attention_layernorm,
        "pre_mlp_norm": layer.pre_feedforward_layernorm,
        "mlp": layer.mlp,
        "post_mlp_norm": layer.post_feedforward_layernorm,
        "residual_mlp": layer,
    }
    for name, module in outputs.items():
        after(module, partial(show, i, name), undo)
