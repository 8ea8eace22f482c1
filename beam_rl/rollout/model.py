"""Beam for vLLM, for the builds that do not bring it (vLLM for CPUs).

Promises the engine's numerics sub-layer by sub-layer, in FP32 and BF16: where transformers and vLLM's native Beam round
differently, this model rounds like vLLM's. Knows nothing about Ray, sampling or where weights come from.
"""

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.sequence import IntermediateTensors

from beam_rl.mxfp8.restore import Restored
from beam_rl.rollout import compat, mxfp8
from beam_rl.rollout.experts import Mxfp8Experts, PlainExperts

SSMAX_POSITIONS, SSMAX_EXPONENT = 2048, 0.1  # query scale of the full-attention layers: (1 + position / 2048) ** 0.1


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension: all of it in FP32, the weight included, and one rounding."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over halves. x: (tokens, heads, head_dim); cos, sin: (tokens, 1, head_dim), FP32. One rounding."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return (x * cos + turned * sin).to(x.dtype)


def add_depth_scaled(x: Tensor, residual: Tensor, nth: int) -> Tensor:
    """The model's n-th residual add. Both scaled operands are rounded to the activation dtype before they are added."""
    return x * (1.0 / math.sqrt(nth)) + residual * math.sqrt((nth - 1) / nth)


class Positions:
    """What the layers need to know of the step's positions, computed once a step in FP32."""

    def __init__(self, positions: Tensor, inv_freq: Tensor) -> None:
        p = positions.float()
        angles = p[:, None] * inv_freq
        angles = torch.cat((angles, angles), -1)[:, None, :]
        self.cos, self.sin = angles.cos(), angles.sin()  # (tokens, 1, head_dim)
        self.query_scale = torch.exp(SSMAX_EXPONENT * torch.log1p((p + 1) / SSMAX_POSITIONS))[:, None, None]


class BeamAttention(nn.Module):
    """Grouped-query attention with per-head norms and an output gate; RoPE on sliding layers, SSMax on full ones."""

    def __init__(
        self, config: Any, cache_config: CacheConfig | None, quant_config: Any, prefix: str, rounds_inputs: bool
    ) -> None:
        super().__init__()
        world = get_tensor_model_parallel_world_size()
        self.head_dim = config.head_dim
        self.heads = config.num_attention_heads // world
        self.kv_heads = max(1, config.num_key_value_heads // world)
        width = config.num_attention_heads * config.head_dim
        common = {"bias": False, "quant_config": quant_config}
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            prefix=f"{prefix}.qkv_proj",
            **common,
        )
        # Not `gate_proj`: that name belongs to the MLP, and name-matching code (adapters, quantization) mixes them up.
        self.output_gate_proj = ColumnParallelLinear(
            config.hidden_size, width, prefix=f"{prefix}.output_gate_proj", **common
        )
        self.o_proj = RowParallelLinear(width, config.hidden_size, prefix=f"{prefix}.o_proj", **common)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.gate_bias = nn.Parameter(torch.zeros(self.heads))
        set_weight_attrs(self.gate_bias, {"weight_loader": sharded_weight_loader(0)})
        self.is_sliding = config.layer_types[extract_layer_index(prefix)] == "sliding_attention"
        self.attn = Attention(
            self.heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=self.kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=config.sliding_window if self.is_sliding else None,
            prefix=f"{prefix}.attn",
        )
        keep_plain((self.qkv_proj, self.output_gate_proj, self.o_proj), rounds_inputs)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        tokens, d = x.shape[0], self.head_dim
        qkv, _ = self.qkv_proj(x)
        gate, _ = self.output_gate_proj(x)
        q, k, v = qkv.split([self.heads * d, self.kv_heads * d, self.kv_heads * d], -1)
        q = self.q_norm(q.view(tokens, self.heads, d))
        k = self.k_norm(k.view(tokens, self.kv_heads, d))
        if self.is_sliding:
            q, k = rotate(q, positions.cos, positions.sin), rotate(k, positions.cos, positions.sin)
        else:
            q = (q.float() * positions.query_scale).to(q.dtype)
        out = self.attn(q.reshape(tokens, -1), k.reshape(tokens, -1), v.contiguous())
        gate = gate.view(tokens, self.heads, d) + self.gate_bias[None, :, None]
        out = out.view(tokens, self.heads, d) * torch.sigmoid(gate)
        return self.o_proj(out.reshape(tokens, -1))[0]


class BeamMLP(nn.Module):
    """Dense SwiGLU; SiLU and the product in FP32, one rounding."""

    def __init__(self, config: Any, quant_config: Any, prefix: str, rounds_inputs: bool) -> None:
        super().__init__()
        common = {"bias": False, "quant_config": quant_config}
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.intermediate_size] * 2, prefix=f"{prefix}.gate_up_proj", **common
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, prefix=f"{prefix}.down_proj", **common
        )
        keep_plain((self.gate_up_proj, self.down_proj), rounds_inputs)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj((F.silu(gate.float()) * up.float()).to(x.dtype))[0]


class BeamRouter(nn.Module):
    """The router's logits. Its weight and correction bias are FP32 whatever the model's dtype."""

    def __init__(self, hidden_size: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden_size, dtype=torch.float32), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight)


class BeamMoE(nn.Module):
    """Sigmoid, group-limited top-k routing over experts; the experts' sum is scaled after it was summed."""

    def __init__(self, config: Any, quant_config: Any, prefix: str, rounds_inputs: bool) -> None:
        super().__init__()
        self.gate = BeamRouter(config.hidden_size, config.num_experts)
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            quant_config=quant_config,
            use_grouped_topk=True,
            num_expert_group=config.n_group,
            topk_group=config.topk_group,
            scoring_func="sigmoid",
            e_score_correction_bias=self.gate.e_score_correction_bias,
            routed_scaling_factor=config.routed_scaling_factor,
            apply_routed_scale_to_output=True,
            router_logits_dtype=torch.float32,
            routed_experts_cls=Mxfp8Experts if rounds_inputs else PlainExperts,
            prefix=f"{prefix}.experts",
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(hidden_states=x, router_logits=self.gate(x))


class BeamLayer(nn.Module):
    """Attention and MLP, each between two norms, each added to the depth-scaled residual stream."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        index, scheme = extract_layer_index(prefix), mxfp8.of_config(vllm_config)
        rounds = scheme is not None and scheme.activations and scheme.has_layer(index)
        mlp = BeamMoE if config.mlp_layer_types[index] == "sparse" else BeamMLP
        self.self_attn = BeamAttention(config, vllm_config.cache_config, quant_config, f"{prefix}.self_attn", rounds)
        self.mlp = mlp(config, quant_config, f"{prefix}.mlp", rounds)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_add, self.mlp_add = 2 * (index + 1), 2 * (index + 1) + 1

    def forward(self, h: Tensor, positions: Positions) -> Tensor:
        x = self.self_attn(self.input_layernorm(h), positions)
        h = add_depth_scaled(self.post_attention_layernorm(x), h, self.attention_add)
        x = self.mlp(self.pre_feedforward_layernorm(h))
        return add_depth_scaled(self.post_feedforward_layernorm(x), h, self.mlp_add)


class BeamModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers, lambda prefix: BeamLayer(vllm_config, prefix), prefix=f"{prefix}.layers"
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope_theta, self.head_dim = config.rope_parameters["sliding_attention"]["rope_theta"], config.head_dim
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )

    def forward(self, input_ids: Tensor | None, positions: Tensor, h: Tensor | None) -> Tensor:
        if h is None:
            h = self.embed_tokens(input_ids)
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=h.device) / self.head_dim
        step = Positions(positions, 1.0 / self.rope_theta**exponents)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            h = layer(h, step)
        return self.norm(h) if get_pp_group().is_last_rank else h


class BeamForCausalLM(nn.Module, SupportsLoRA, SupportsPP):
    """vLLM's entry to the model; checkpoint names as transformers writes them (docs of `load_weights`)."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={".self_attn.gate_proj": ".self_attn.output_gate_proj"},
        orig_to_new_stacked={
            ".self_attn.q_proj": (".self_attn.qkv_proj", "q"),
            ".self_attn.k_proj": (".self_attn.qkv_proj", "k"),
            ".self_attn.v_proj": (".self_attn.qkv_proj", "v"),
            ".mlp.gate_proj": (".mlp.gate_up_proj", 0),
            ".mlp.up_proj": (".mlp.gate_up_proj", 1),
        },
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        check_supported(config)
        scheme = mxfp8.of_config(vllm_config)
        self.restored = Restored(scheme) if scheme else None
        self.model = BeamModel(vllm_config, maybe_prefix(prefix, "model"))
        self.lm_head: nn.Module = (
            ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
            if get_pp_group().is_last_rank
            else PPMissingLayer()
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        h = inputs_embeds if intermediate_tensors is None else intermediate_tensors["hidden_states"]
        h = self.model(input_ids, positions, h)
        return h if get_pp_group().is_last_rank else IntermediateTensors({"hidden_states": h})

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """(tokens, vocabulary) logits after the softcap, in the dtype of the head's product.

        That is the activations' dtype, unless vLLM is told `head_dtype`. vLLM's native Beam writes the capped logits back
        into the product's buffer, transformers keeps FP32; what the engine samples from is the rounded value, so the
        trainer has to see that one.
        """
        logits = self.logits_processor(self.lm_head, hidden_states)
        cap = self.config.final_logit_softcapping
        if logits is None or cap is None:
            return logits
        return (torch.tanh(logits.float() / cap) * cap).to(logits.dtype)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads (checkpoint name, tensor) pairs, any part of the model in any order; returns the parameters touched."""
        weights = self.restored.tensors(weights) if self.restored else weights
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def keep_plain(linears: tuple[Any, ...], rounds_inputs: bool) -> None:
    """Of a layer's linear modules."""
    compat.keep_plain_weights(*linears)
    if rounds_inputs:
        mxfp8.round_inputs(*linears)


def check_supported(config: Any) -> None:
    """Refuses the variants of Beam's config that no published Beam uses and this model would get wrong."""
    rope = config.rope_parameters["sliding_attention"]
    if rope["rope_type"] != "default":
        raise ValueError(
            f"rope_parameters.sliding_attention.rope_type = {rope['rope_type']}: only `default` is supported"
        )
    if getattr(config, "attention_bias", False):
        raise ValueError("attention_bias = true: Beam's attention has no bias")
    if config.tie_word_embeddings:
        raise ValueError("tie_word_embeddings = true: Beam's embeddings are untied")
