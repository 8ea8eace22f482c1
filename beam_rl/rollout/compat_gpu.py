"""Puts `rollout.kernels` into vLLM's GPU path for LoRA: private parts of vLLM 0.33, and the guard for others.

`install` exchanges two things, for decode steps; prefill and whatever the kernels don't cover run vLLM's own path:

- the expert kernel of a MoE layer with LoRA: `TritonExperts.apply` becomes `LoRAExperts.apply`, which uses the base GEMM's
  own grouping of tokens by expert (vLLM groups them a second time for LoRA) and folds LoRA into the kernels around it;
- the dense layers with LoRA: base GEMM and LoRA become one operator.

In both, what depends on the base GEMM's input alone runs on a second stream beside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.config.lora import LoRAConfig
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand
from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe import (
    _prepare_expert_assignment,
    invoke_fused_moe_triton_kernel,
    try_get_optimal_moe_config,
)
from vllm.model_executor.layers.fused_moe.utils import _resize_cache
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.utils.torch_utils import direct_register_custom_op

from beam_rl.rollout.compat import installed
from beam_rl.rollout.kernels import experts, linear

SUPPORTED = "0.33"
MAX_TOKENS = 128  # of a step that the kernels run; above it the token-by-token sum reads adapters too often
MAX_EXPERT_RANK = 16  # the kernels hold rank · top_k columns in registers

_library = torch.library.Library("beam_rl", "FRAGMENT")
_stock_apply_linear = BaseLinearLayerWithLoRA._apply_sync
_installed = False


def install() -> None:
    """Exchanges vLLM's LoRA kernels for ours, once a process, before the engine is built.

    Raises RuntimeError under another vLLM than the one whose private parts are touched.
    """
    global _installed
    package, found = installed()
    if package != "vllm" or ".".join(found.split(".")[:2]) != SUPPORTED:
        raise RuntimeError(f"{package} {found} is installed; beam-rl's LoRA kernels were written for vllm {SUPPORTED}")
    if _installed:
        return
    _installed = True
    direct_register_custom_op("linear_with_lora", _linear_with_lora, fake_impl=_linear_shape, target_lib=_library)
    BaseLinearLayerWithLoRA._apply_sync = _apply_linear
    set_mapping = FusedMoEWithLoRA.set_mapping

    def set_mapping_and_kernel(self: Any, punica_wrapper: Any) -> None:
        set_mapping(self, punica_wrapper)
        kernel = self._moe_kernel.fused_experts
        if type(kernel) is TritonExperts:
            kernel.__class__ = LoRAExperts

    FusedMoEWithLoRA.set_mapping = set_mapping_and_kernel
    # vLLM keeps compiled models on disk, by the configuration's hash: ours hold another operator.
    compute_hash = LoRAConfig.compute_hash
    LoRAConfig.compute_hash = lambda self: f"{compute_hash(self)}-beam-rl-kernels"


class LoRAExperts(TritonExperts):
    """vLLM's Triton experts with LoRA folded into the activation and the sum over experts."""

    tiles = experts.Tiles()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        tokens, top_k = topk_ids.shape
        slots = self._slots(tokens)
        plain = (
            activation == MoEActivation.SILU
            and expert_map is None
            and not apply_router_weight_on_input
            and self._is_plain(w1, hidden_states)
        )
        if slots is None or not plain:
            super().apply(
                output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
                a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
            )  # fmt: skip
            return
        adapter, tiles = self._adapter(), self.tiles
        config = try_get_optimal_moe_config(w1.shape, w2.shape, top_k, None, tokens)
        pairs, of_block, padded = _prepare_expert_assignment(topk_ids, config, tokens, top_k, w1.shape[0], None)
        blocks = experts.Blocks(of_block, pairs, padded, config["BLOCK_SIZE_M"])

        def gemm(x: Tensor, w: Tensor, y: Tensor, weights: Tensor | None, rows_a_token: int) -> None:
            invoke_fused_moe_triton_kernel(
                x, w, y, None, None, weights, pairs, of_block, padded, weights is not None, rows_a_token, config,
                compute_type=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16, use_fp8_w8a8=False,
                use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False,
            )  # fmt: skip

        gate_up = _resize_cache(workspace2, (tokens, top_k, w1.shape[1]))
        active = _resize_cache(workspace13, (tokens * top_k, w1.shape[1] // 2))
        _side.mark()
        with _side.beside():
            t = experts.shrink(hidden_states, adapter, slots, blocks, top_k, tiles)
        gemm(hidden_states, w1, gate_up, None, top_k)
        _side.join()
        t = experts.activate(gate_up.flatten(0, 1), t, adapter, slots, topk_ids, active, tiles)
        _side.mark()
        with _side.beside():
            delta = experts.expand(t, adapter, slots, topk_weights, topk_ids, tiles)
        down = _resize_cache(workspace2, (tokens, top_k, w2.shape[1]))
        gemm(active, w2, down, topk_weights, 1)
        _side.join()
        experts.combine(down.flatten(0, 1), delta, output, tiles)

    def _slots(self, tokens: int) -> Tensor | None:
        """(tokens,) adapter slot of each token; None where no token has LoRA or the step is not one for our kernels."""
        context = self._lora_context
        if context is None or tokens > MAX_TOKENS or context.local_token_lora_mapping is not None:
            return None
        if context.fully_sharded or context.enable_moe_shared_loras or context.aux_stream is not None:
            return None
        if context.w2_lora_a_stacked[0].shape[2] > MAX_EXPERT_RANK:
            return None
        punica = context.punica_wrapper
        meta = punica.token_mapping_meta.meta_args(tokens, punica.lora_config.specialize_active_lora)
        return None if meta[5].item() else meta[0]

    def _is_plain(self, w1: Tensor, x: Tensor) -> bool:
        """Unquantized weights, no biases, no clamp."""
        return (
            w1.dtype == x.dtype
            and x.dtype in (torch.bfloat16, torch.float16)
            and self.quant_dtype is None
            and self.w1_bias is None
            and self.activation_config.clamp_limit is None
            and self.post_gemm2_hook is None
        )

    def _adapter(self) -> experts.ExpertAdapter:
        context = self._lora_context
        return experts.ExpertAdapter(
            context.w13_lora_a_stacked,
            context.w13_lora_b_stacked,
            context.w2_lora_a_stacked[0],
            context.w2_lora_b_stacked[0],
        )


def _apply_linear(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """In the place of `BaseLinearLayerWithLoRA._apply_sync`; traced by torch.compile."""
    if type(self._get_quant_method()) is not UnquantizedLinearMethod or x.ndim != 2:
        return _stock_apply_linear(self, x, bias)
    punica = self.punica_wrapper
    meta = punica.token_mapping_meta.meta_args(x.size(0), punica.lora_config.specialize_active_lora)
    a, b = list(self.lora_a_stacked), list(self.lora_b_stacked)
    return torch.ops.beam_rl.linear_with_lora(x, self.base_layer.weight, bias, a, b, *meta)


def _linear_with_lora(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: list[Tensor], b: list[Tensor], slots: Tensor, by_slot: Tensor,
    tokens_a_slot: Tensor, slot_starts: Tensor, slot_ids: Tensor, no_lora: Tensor, active_slots: Tensor,
) -> Tensor:  # fmt: skip
    """x Wᵀ + x Aᵀ Bᵀ; the last seven arguments are vLLM's metadata of the step."""
    if no_lora.item():
        return F.linear(x, weight, bias)
    if len(x) <= MAX_TOKENS and linear.supported(a, b) and x.stride(-1) == 1:
        _side.mark()
        y = F.linear(x, weight, bias)
        with _side.beside():
            t = linear.shrink(x, a, slots, LINEAR_TILES)
        _side.join()
        linear.expand(y, t, b, slots, LINEAR_TILES)
        return y
    y = F.linear(x, weight, bias)
    t = torch.empty(len(a), len(x), a[0].shape[-2], dtype=torch.float32, device=x.device)
    meta = (slots, by_slot, tokens_a_slot, slot_starts, slot_ids, no_lora, active_slots)
    _lora_shrink(x, a, t, *meta, 1.0)
    _lora_expand(t, b, y, *meta, add_inputs=True)
    return y


def _linear_shape(x: Tensor, weight: Tensor, *unused: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


class _Side:
    """A second stream. What is launched within `beside` may run beside what the main stream does from `mark` to `join`.

    It has priority: the short kernel takes its place among the long one's waves. A tensor allocated within `beside` is
    safe to free after `join`, since the stream waits for the next mark before it runs anything.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._mark: torch.cuda.Event | None = None

    def mark(self) -> None:
        alone = BreakableCUDAGraphCapture.is_active()  # such a capture holds one stream
        self._mark = None if alone else torch.cuda.current_stream().record_event()

    @contextmanager
    def beside(self) -> Iterator[None]:
        if self._mark is None:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(priority=-1)
        self._stream.wait_event(self._mark)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._mark is not None and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


_side = _Side()
LINEAR_TILES = linear.Tiles()
