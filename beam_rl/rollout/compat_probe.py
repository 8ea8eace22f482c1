"""The private parts of vLLM that a look into a running model touches, and the versions they were written for.

Steps without CUDA graphs, routers, and what vLLM's own Beam shows of its sub-layers. Imports nothing of vLLM's Beam, which
only a GPU has: knows its modules by their names. Knows nothing about what is done with what it shows.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from beam_rl.rollout.compat import installed

NATIVE_FORWARD = ["positions", "hidden_states", "normalized_states", "next_norm_weight"]  # of a layer, in vLLM 0.33

Undo = Callable[[], None]
Show = Callable[[int | None, str, Tensor], None]  # layer, sub-layer (`beam_rl.parity.record`), (tokens, …) values
Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def stop_graphs(runner: Any) -> Undo:
    """Has every step run the model's Python code instead of replaying CUDA graphs, until what is returned is called.

    The graphs stay as they are: neither of vLLM's model runners (0.32, 0.33) looks for one while its own flag says that
    there is none. Raises RuntimeError for a runner without such a flag.
    """
    for name, flag in (
        ("cudagraph_manager", "_graphs_captured"),
        ("cudagraph_dispatcher", "keys_initialized"),
    ):  # V2, V1
        holder = getattr(runner, name, None)
        if hasattr(holder, flag):
            captured = getattr(holder, flag)
            setattr(holder, flag, False)
            return lambda: setattr(holder, flag, captured)
    raise RuntimeError(
        f"{' '.join(installed())}: can't tell how to stop the CUDA graphs of {type(runner).__name__}, which hide the model"
    )


def observe_routing(model: nn.Module, make_hook: Callable[[int, int], Choose], undo: list[Undo]) -> None:
    """Puts a hook between each MoE layer's router and its experts; `undo` gets what takes them away again.

    `make_hook(column, global layer number)` gives the hook: it gets (tokens, experts) logits and the router's (tokens,
    top_k) weights and logical ids, and returns the weights and ids to use. Kernels that choose experts themselves
    (`is_monolithic`) never ask a router: the hook is not called.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    def observe(router: Any, hook: Choose) -> Undo:
        select = router.select_experts

        def observed(hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return hook(router_logits, *select(hidden_states, router_logits, *args, **kwargs))

        router.select_experts = observed
        return lambda: delattr(router, "select_experts")

    runners = sorted((m for m in model.modules() if isinstance(m, MoERunner)), key=lambda m: m.layer_id)
    for column, r in enumerate(runners):
        undo.append(observe(r.router, make_hook(column, r.layer_id)))


def is_native(model: Any) -> bool:
    """Whether this is vLLM's own Beam, whose layers add, norm and reduce in one kernel."""
    return hasattr(model.model.layers[0], "attention_boundary")


def show_native(model: Any, show: Show, undo: list[Undo]) -> None:
    """Has vLLM's own Beam (0.33) show every sub-layer that a module takes or gives; `undo` gets what ends that.

    Its kernels keep to themselves the norms after attention and MLP, and K where it goes into the KV cache at once; V and
    the gate, too, where they read the projection's weight past its module (the 501B's over 4 or 8 GPUs). Raises
    RuntimeError for layers that are called in another way.
    """
    layers = model.model.layers
    if list(inspect.signature(layers[0].forward).parameters) != NATIVE_FORWARD:
        raise RuntimeError(
            f"{' '.join(installed())}: its Beam is not the one of 0.33 that beam-rl knows how to look into"
        )
    after(model.model.embed_tokens, lambda out: show(None, "embedding", out), undo)
    for i, layer in enumerate(layers):
        _show_attention(i, layer.self_attn, show, undo)
        _show_layer(i, layer, show, undo)


def _show_attention(i: int, attention: Any, show: Show, undo: list[Undo]) -> None:
    q_size, kv_size = attention.q_size, attention.kv_size

    def show_qkv(packed: Tensor) -> None:
        show(i, "v", packed[:, q_size + kv_size : q_size + 2 * kv_size])

    def show_gate(projected: Tensor) -> None:
        show(i, "gate", gate(projected, attention.gate_bias))

    def show_packed(packed: Tensor) -> None:
        show_qkv(packed)
        show_gate(packed[:, -q_size:])

    def show_heads(q: Tensor, k: Tensor | None, v: Tensor | None) -> None:
        show(i, "q", q)
        if k is not None:
            show(i, "k", k)

    before(attention, lambda positions, x: show(i, "input_norm", x), undo)
    if attention.merged_qkv_gate:
        after(attention.qkv_gate_proj, lambda out: show_packed(out[0]), undo)
    else:
        after(attention.qkv_proj, lambda out: show_qkv(out[0]), undo)
        after(attention.output_gate_proj, lambda out: show_gate(out[0]), undo)
    before(attention.attn, show_heads, undo)
    after(attention.attn, lambda out: show(i, "attention", out), undo)
    after(attention, lambda out: show(i, "attention_out", out), undo)


def _show_layer(i: int, layer: Any, show: Show, undo: list[Undo]) -> None:
    boundary = layer.attention_boundary  # norm, residual add, norm

    def shown(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        residual, normalized = boundary(*args, **kwargs)
        show(i, "residual_attention", residual)
        return residual, normalized

    def show_mlp(out: Any) -> None:
        if isinstance(out, Tensor):  # else experts whose sum is left to the next kernel
            show(i, "mlp", out)

    layer.attention_boundary = shown
    undo.append(lambda: setattr(layer, "attention_boundary", boundary))
    before(layer.mlp, lambda x: show(i, "pre_mlp_norm", x), undo)
    after(layer.mlp, show_mlp, undo)
    after(layer, lambda out: show(i, "residual_mlp", out[0]), undo)


def before(module: nn.Module, see: Callable[..., None], undo: list[Undo]) -> None:
    """Hands the module's positional inputs to `see`."""
    undo.append(module.register_forward_pre_hook(lambda m, inputs: see(*inputs)).remove)


def after(module: nn.Module, see: Callable[[Any], None], undo: list[Undo]) -> None:
    """Hands what the module returns to `see`."""
    undo.append(module.register_forward_hook(lambda m, inputs, out: see(out)).remove)


def gate(projected: Tensor, bias: Tensor) -> Tensor:
    """(tokens, heads · dim) sigmoid of the projection with each head's bias."""
    by_head = projected.unflatten(-1, (len(bias), -1))
    return torch.sigmoid(by_head + bias[None, :, None])
