"""Every sub-layer's output of a vLLM Beam while it prefills one sequence: looked at from outside, nothing left behind.

Works on modules with a checkpoint's names, run eagerly (on a CPU they are). Knows nothing about the other sides.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from beam_rl.parity.record import Recorder
from beam_rl.rollout import compat


class Probe:
    """Records what `model` computes from now until `stop`."""

    def __init__(self, model: Any, routes: Tensor | None) -> None:
        """routes: (tokens, MoE layers, top-k) experts to use; None: as the routers choose."""
        self.model, self.routes = model, routes
        self.recorder = Recorder()
        self.final: list[Tensor] = []
        self._undo: list[Callable[[], None]] = []
        inner = model.model
        self._after(inner.embed_tokens, None, "embedding", lambda out: out)
        self._after(inner.norm, None, "final_norm", self._keep_final)
        for i, layer in enumerate(inner.layers):
            self._observe_layer(i, layer)
        self._undo += compat.observe_routing(model, self._router_hook)

    def stop(self) -> None:
        """Leaves the model as it was."""
        while self._undo:
            self._undo.pop()()

    def finish(self, targets: Tensor, temperature: float) -> Recorder:
        """Stops, and adds the logits and the log-probabilities of `targets` (tokens,)."""
        self.stop()
        hidden = torch.cat(self.final)
        if len(hidden) != len(targets):
            raise RuntimeError(f"the engine ran {len(hidden)} tokens of a sequence of {len(targets)}")
        with torch.inference_mode():
            logits = self.model.compute_logits(hidden).float() / temperature
        self.recorder.add(None, "logits", logits)
        logp = logits.log_softmax(-1).gather(1, targets.to(logits.device)[:, None])
        self.recorder.add(None, "log_probabilities", logp)
        return self.recorder

    def _observe_layer(self, i: int, layer: Any) -> None:
        attention = layer.self_attn
        self._after(layer.input_layernorm, i, "input_norm", lambda out: out)
        self._before(attention.attn, i, ("q", "k", "v"))
        self._after(attention.attn, i, "attention", lambda out: out)
        self._after(attention.output_gate_proj, i, "gate", lambda out: gate(out[0], attention.gate_bias))
        self._after(attention, i, "attention_out", lambda out: out)
        self._after(layer.post_attention_layernorm, i, "post_attention_norm", lambda out: out)
        self._before(layer.pre_feedforward_layernorm, i, ("residual_attention",))
        self._after(layer.pre_feedforward_layernorm, i, "pre_mlp_norm", lambda out: out)
        self._after(layer.mlp, i, "mlp", lambda out: out)
        self._after(layer.post_feedforward_layernorm, i, "post_mlp_norm", lambda out: out)
        self._after(layer, i, "residual_mlp", lambda out: out)

    def _before(self, module: Any, layer: int, names: Sequence[str]) -> None:
        """Records the module's inputs under `names`."""

        def hook(m: Any, inputs: tuple[Tensor, ...]) -> None:
            for name, value in zip(names, inputs, strict=True):
                self.recorder.add(layer, name, value)

        self._undo.append(module.register_forward_pre_hook(hook).remove)

    def _after(self, module: Any, layer: int | None, name: str, value: Callable[[Any], Tensor]) -> None:
        hook = module.register_forward_hook(lambda m, i, out: self.recorder.add(layer, name, value(out)))
        self._undo.append(hook.remove)

    def _keep_final(self, out: Tensor) -> Tensor:
        self.final.append(out)
        return out

    def _router_hook(self, column: int, layer: int) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """What a MoE layer asks with its router's (tokens, experts) logits and (tokens, top-k) choice."""

        def choose(logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            seen = self.recorder.rows(layer, "router_logits")
            self.recorder.add(layer, "router_logits", logits)
            own = torch.zeros_like(logits, dtype=torch.float).scatter(1, ids.long(), weights.float())
            self.recorder.add(layer, "experts", own)
            if self.routes is None:
                return weights, ids
            there = self.routes[seen : seen + len(logits), column].to(logits.device)
            picked = logits.float().sigmoid().gather(1, there)
            return (picked / (picked.sum(-1, keepdim=True) + 1e-20)).to(weights.dtype), there.to(ids.dtype)

        return choose


def gate(projected: Tensor, bias: Tensor) -> Tensor:
    """(tokens, heads · dim) sigmoid of the projection with each head's bias."""
    by_head = projected.view(len(projected), len(bias), -1)
    return torch.sigmoid(by_head + bias[None, :, None])
