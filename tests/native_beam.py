"""vLLM's own Beam (0.33) in plain torch: its modules, their names and what they are called with; kernels are functions.

Has the weights of transformers' model, and runs a whole sequence at once. On a GPU, tests/test_rollout_native.py looks into
the real one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BeamForCausalLM
from transformers.models.beam.modeling_beam import apply_rotary_pos_emb, depth_scaled_residual_add
from vllm.model_executor.layers.fused_moe.layer import MoERunner


class Linear(nn.Module):
    """vLLM's linear layers return (output, bias); a router's weight is FP32."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat(weights))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x.to(self.weight.dtype), self.weight), None


class RMSNorm(nn.Module):
    """Holds a weight alone."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.weight, self.theirs = theirs.weight, [theirs]  # in a list: no module of this one

    def kernel(self, x: Tensor) -> Tensor:
        return self.theirs[0](x)


class Attention(nn.Module):
    """Over a whole sequence; keys and values come as arguments, or lie in the cache already."""

    def __init__(self, window: int | None, head_dim: int) -> None:
        super().__init__()
        self.window, self.head_dim = window, head_dim
        self.kv_cache: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is None or v is None:
            assert self.kv_cache is not None
            k, v = self.kv_cache
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for x in (q, k, v))
        back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        mask = (back >= 0) & (back < (self.window or len(back)))
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


class BeamAttention(nn.Module):
    def __init__(self, theirs: Any, config: Any, rope: Any, merged: bool, fuse_kv_insert: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_size, self.kv_size = self.num_heads * config.head_dim, self.num_kv_heads * config.head_dim
        qkv = [theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]
        self.merged_qkv_gate, self.fuse_kv_insert = merged, fuse_kv_insert
        if merged:
            self.qkv_gate_proj = Linear(*qkv, theirs.gate_proj.weight)
        else:
            self.qkv_proj, self.output_gate_proj = Linear(*qkv), Linear(theirs.gate_proj.weight)
        self.o_proj = Linear(theirs.o_proj.weight)
        self.q_norm, self.k_norm = RMSNorm(theirs.q_norm), RMSNorm(theirs.k_norm)
        self.gate_bias = theirs.gate_bias
        self.attn = Attention(theirs.sliding_window, config.head_dim)
        self.rope = [rope]

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        if self.merged_qkv_gate:
            packed, _ = self.qkv_gate_proj(hidden_states)
            qkv, gate = packed.split([self.q_size + 2 * self.kv_size, self.q_size], dim=-1)
        else:
            qkv, _ = self.qkv_proj(hidden_states)
            gate, _ = self.output_gate_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.qk_norm_rope(q, k, positions)
        if self.fuse_kv_insert:
            self.attn.kv_cache = k, v
            out = self.attn(q, None, None)
        else:
            out = self.attn(q, k, v)
        by_head = gate.unflatten(-1, (self.num_heads, -1)) + self.gate_bias[:, None]
        output, _ = self.o_proj(out * torch.sigmoid(by_head).flatten(1))
        return output

    def qk_norm_rope(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q_norm.kernel(q.unflatten(-1, (self.num_heads, -1)))
        k = self.k_norm.kernel(k.unflatten(-1, (self.num_kv_heads, -1)))
        if self.attn.window is None:
            q = (q.float() * (1 + (positions + 1) / 2048)[:, None, None] ** 0.1).to(q.dtype)
        else:
            cos, sin = self.rope[0](q, positions[None], "sliding_attention")
            q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
            q, k = q[0], k[0]
        return q.flatten(1), k.flatten(1)


class BeamMLP(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.gate_up_proj = Linear(theirs.gate_proj.weight, theirs.up_proj.weight)
        self.down_proj = Linear(theirs.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj((F.silu(gate.float()) * up.float()).to(x.dtype))[0]


class Router:
    """Chooses as transformers' router does."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def select_experts(
        self, hidden_states: Tensor, router_logits: Tensor, topk_indices_dtype: torch.dtype | None = None,
        *, input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        _, weights, ids = self.theirs(hidden_states)
        return weights, ids.to(topk_indices_dtype)


class Experts(MoERunner):
    """Of vLLM's class, which holds the gate and asks the router, unless its kernel chooses experts itself."""

    def __init__(self, layer: int, gate: Linear, theirs: Any, monolithic: bool) -> None:
        nn.Module.__init__(self)
        self.layer_name, self.router, self.gate = f"model.layers.{layer}.mlp.experts", Router(theirs.gate), gate
        self.theirs, self.monolithic = [theirs], monolithic

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        router_logits, _ = self.gate(hidden_states)
        if self.monolithic:
            return self.theirs[0](hidden_states[None])[0]
        weights, ids = self.router.select_experts(
            hidden_states=hidden_states, router_logits=router_logits, topk_indices_dtype=torch.int32, input_ids=None
        )
        return self.theirs[0].experts(hidden_states, ids.long(), weights) * self.theirs[0].routed_scaling_factor


class BeamSparseMoeBlock(nn.Module):
    def __init__(self, layer: int, theirs: Any, monolithic: bool) -> None:
        super().__init__()
        self.gate = Linear(theirs.gate.weight)
        self.experts = Experts(layer, self.gate, theirs, monolithic)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.experts(hidden_states=hidden_states, router_logits=hidden_states)


class BeamDecoderLayer(nn.Module):
    def __init__(self, i: int, theirs: Any, config: Any, rope: Any, monolithic: bool, **attention: bool) -> None:
        super().__init__()
        self.self_attn = BeamAttention(theirs.self_attn, config, rope, **attention)
        sparse = config.mlp_layer_types[i] == "sparse"
        self.mlp = BeamSparseMoeBlock(i, theirs.mlp, monolithic) if sparse else BeamMLP(theirs.mlp)
        self.attention_boundary = self.mlp_boundary = norm_residual_norm
        self.input_layernorm = RMSNorm(theirs.input_layernorm)
        self.pre_feedforward_layernorm = RMSNorm(theirs.pre_feedforward_layernorm)
        self.post_attention_layernorm = RMSNorm(theirs.post_attention_layernorm)
        self.post_feedforward_layernorm = RMSNorm(theirs.post_feedforward_layernorm)
        self.adds = 2 * (i + 1), 2 * (i + 1) + 1

    def forward(
        self,
        positions: Tensor,
        hidden_states: Tensor,
        normalized_states: Tensor | None = None,
        next_norm_weight: RMSNorm | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        x = self.input_layernorm.kernel(hidden_states) if normalized_states is None else normalized_states
        x = self.self_attn(positions, x)
        norms = self.post_attention_layernorm, self.pre_feedforward_layernorm
        hidden_states, x = self.attention_boundary(x, hidden_states, *norms, self.adds[0])
        x = self.mlp(x)
        norms = self.post_feedforward_layernorm, next_norm_weight
        return self.mlp_boundary(x, hidden_states, *norms, self.adds[1])


def norm_residual_norm(x: Tensor, residual: Tensor, post: RMSNorm, following: Any, add: int) -> tuple[Tensor, Any]:
    hidden = depth_scaled_residual_add(post.kernel(x), residual, add)
    return hidden, following and following.kernel(hidden)


class BeamModel(nn.Module):
    def __init__(self, theirs: Any, monolithic: bool, **attention: bool) -> None:
        super().__init__()
        config, rope = theirs.config, theirs.rotary_emb
        layers = [BeamDecoderLayer(i, t, config, rope, monolithic, **attention) for i, t in enumerate(theirs.layers)]
        self.embed_tokens, self.layers, self.norm = theirs.embed_tokens, nn.ModuleList(layers), RMSNorm(theirs.norm)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden, normalized = self.embed_tokens(input_ids), None
        for layer, following in zip(
            self.layers, [*(i.input_layernorm for i in self.layers[1:]), self.norm], strict=True
        ):
            hidden, normalized = layer(positions, hidden, normalized, following)
        return normalized


class NativeBeam(nn.Module):
    def __init__(
        self, theirs: BeamForCausalLM, merged: bool = True, fuse_kv_insert: bool = True, monolithic: bool = False
    ) -> None:
        super().__init__()
        self.model = BeamModel(theirs.model, monolithic, merged=merged, fuse_kv_insert=fuse_kv_insert)
        self.lm_head, self.final_logit_softcapping = theirs.lm_head, theirs.config.final_logit_softcapping

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """The cap goes into the product's buffer."""
        logits, cap = self.lm_head(hidden_states), self.final_logit_softcapping
        return logits.copy_(torch.tanh(logits / cap) * cap) if cap else logits


class Runner:
    """vLLM's V2 model runner: replays a graph where it has one, in which no Python runs."""

    def __init__(self, model: NativeBeam) -> None:
        self.model, self.cudagraph_manager = model, self
        self._graphs_captured = True

    def get_model(self) -> NativeBeam:
        return self.model

    @torch.inference_mode()
    def run(self, tokens: Tensor) -> None:
        if not self._graphs_captured:
            self.model(tokens, torch.arange(len(tokens)))
