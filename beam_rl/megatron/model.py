"""Beam as a Megatron-core model: its configuration, norms, experts, residuals and layers.

Every rounding is Beam's (transformers' `models/beam` is the reference); parallelism, schedules and checkpoints are
Megatron's. Linear layers are Megatron's own on a CPU and Transformer Engine's where that is installed with a GPU.
Knows nothing about tensors' names on disk, losses or optimizers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from beam_rl.layout import stage_layers
from beam_rl.megatron import compat, mxfp8
from beam_rl.megatron.attention import BeamCore, BeamSelfAttention
from beam_rl.megatron.kernels import norm_residual, qk_norm, swiglu
from beam_rl.megatron.packing import Agreement, Pack
from beam_rl.megatron.router import BeamRouter
from beam_rl.mxfp8.scheme import Scheme
from beam_rl.recipe.tree import Parallel

compat.require_installed()


# --- configuration ----------------------------------------------------------------------------------------


@dataclass
class BeamConfig(TransformerConfig):
    """Megatron's configuration and what only Beam has."""

    vocab_size: int = 0
    max_position_embeddings: int = 0
    rope_theta: float = 0.0
    final_logit_softcapping: float = 0.0
    routed_scaling_factor: float = 0.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    routed_columns: tuple[int, ...] | None = None  # of the model's MoE layers, those that a pack has routes for
    mxfp8: Scheme | None = None  # the weights that multiply in MXFP8; None: none does

    @property
    def moe_layers(self) -> list[int]:
        """Global numbers, from 0, of the layers that have a router."""
        return [i for i, sparse in enumerate(self.moe_layer_freq) if sparse]


def config_from_hf(
    hf: Any, dtype: torch.dtype, device: torch.device, scheme: Scheme | None = None, **parallel: Any
) -> BeamConfig:
    """Beam's configuration from its `config.json`.

    Args:
        hf: transformers' BeamConfig. dtype: of the activations and of every weight but the router's.
        scheme: the weights that multiply in MXFP8.
        parallel: Megatron's parallel sizes and recomputation settings, by Megatron's names.
    """
    full = [int(kind == "full_attention") for kind in hf.layer_types]
    return BeamConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        window_size=(hf.sliding_window - 1, 0),
        window_attn_skip_freq=[1 - f for f in full],
        no_rope_freq=full,
        qk_layernorm=True,
        attention_output_gate=True,
        final_logit_softcapping=hf.final_logit_softcapping,
        rope_theta=hf.rope_parameters["sliding_attention"]["rope_theta"],
        vocab_size=hf.vocab_size,
        max_position_embeddings=hf.max_position_embeddings,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        device=device,
        mxfp8=scheme,
        **(mxfp8.native_fields(scheme) if scheme and mxfp8.is_native(scheme) else {}),
        **_moe_fields(hf),
        **runtime_fields(dtype),
        **parallel,
    )


def runtime_fields(dtype: torch.dtype) -> dict[str, Any]:
    """How any model is run here, by Megatron's names: its precision, no dropout, whose modules, packed samples."""
    te = compat.has_transformer_engine()
    return dict(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        # Its kernel's gradient of the router's weights adds up in an order that is chosen by speed, anew in each process.
        moe_permute_fusion=te and not torch.are_deterministic_algorithms_enabled(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not te,
        perform_initialization=False,
        transformer_impl="transformer_engine" if te else "local",
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
    )


def layout_fields(parallel: Parallel, num_layers: int, recompute: str) -> dict[str, Any]:
    """The layout and the recomputation of activations, by Megatron's names."""
    fields: dict[str, Any] = dict(
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.sp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        cp_comm_type="all_gather",  # the one of Transformer Engine's ways that has packed samples and windows
        deallocate_pipeline_outputs=True,
    )
    if parallel.pp > 1:
        stages = [["decoder"] * len(layers) for layers in stage_layers(num_layers, parallel)]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        fields["pipeline_model_parallel_layout"] = stages
    if parallel.vpp > 1:
        fields["virtual_pipeline_model_parallel_size"] = parallel.vpp
        # Not in one batch: two ranks are each other's next and previous one, and a batch would mix up their messages.
        fields |= dict(overlap_p2p_comm=True, batch_p2p_comm=False)
    if recompute == "full":
        fields |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif recompute == "selective":
        fields |= dict(recompute_granularity="selective", recompute_modules=["mlp", "moe"])
    return fields


def _moe_fields(hf: Any) -> dict[str, Any]:
    return dict(
        num_moe_experts=hf.num_experts,
        moe_ffn_hidden_size=hf.moe_intermediate_size,
        moe_layer_freq=[int(kind == "sparse") for kind in hf.mlp_layer_types],
        moe_router_topk=hf.num_experts_per_tok,
        moe_router_num_groups=hf.n_group,
        moe_router_group_topk=hf.topk_group,
        moe_router_score_function="sigmoid",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=compat.has_transformer_engine(),
        routed_scaling_factor=hf.routed_scaling_factor,
    )


# --- norm and residual ------------------------------------------------------------------------------------


class BeamRMSNorm(nn.Module):
    """RMSNorm in FP32, the weight's product included, rounded once."""

    def __init__(self, config: BeamConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=config.device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return norm_residual.norm(x, self.weight, self.eps)


class HeadNorm(BeamRMSNorm):
    """Of Q or K; where one kernel normalizes heads and gives them positions, it leaves both to `BeamCore`."""

    def forward(self, x: Tensor) -> Tensor:
        return x if qk_norm.fuses(x, self.weight) else super().forward(x)


class SandwichResidual(nn.Module):
    """Megatron's bias-dropout-add slot: norm of the sub-layer's output, then the n-th depth-scaled residual add.

    h ← x/√n + h·√((n−1)/n), both products rounded to the activation dtype before the sum.
    """

    def __init__(self, config: BeamConfig, n: int) -> None:
        super().__init__()
        self.norm = BeamRMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.x_scale, self.residual_scale = 1.0 / math.sqrt(n), math.sqrt((n - 1) / n)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        return self.add

    def add(self, x_with_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        x, norm = x_with_bias[0], self.norm
        if _fuses(x, norm):
            return norm_residual.norm_add(x, norm.weight, norm.eps, residual, self.x_scale, self.residual_scale)
        return norm(x) * self.x_scale + residual * self.residual_scale

    def add_norm(
        self, x_with_bias: tuple[Tensor, None], residual: Tensor, following: BeamRMSNorm
    ) -> tuple[Tensor, Tensor]:
        """`add`'s sum, and its norm for the next sub-layer."""
        x, norm = x_with_bias[0], self.norm
        if not _fuses(x, norm, following):
            h = self.add(x_with_bias, residual, 0.0)
            return h, following(h)
        scales = self.x_scale, self.residual_scale
        return norm_residual.norm_add_norm(x, norm.weight, norm.eps, residual, *scales, following.weight, following.eps)


def _fuses(x: Tensor, *norms: BeamRMSNorm) -> bool:
    """Whether one kernel does these norms and the add: on a GPU, unless a hook wants to see what is between them."""
    return norm_residual.covers(x) and not any(norm._forward_hooks or norm._forward_pre_hooks for norm in norms)


# --- MLP and experts --------------------------------------------------------------------------------------


def _gated(mlp: Any, x: Tensor, *tokens_per_expert: list[int]) -> Tensor:
    """Of one of Megatron's MLPs, or of all experts together: SwiGLU between its two linear layers."""
    gate_up, _ = mlp.linear_fc1(x, *tokens_per_expert)
    return mlp.linear_fc2(swiglu.swiglu(gate_up), *tokens_per_expert)[0]


class BeamMLP(MLP):
    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        return _gated(self, hidden), None


class BeamSequentialMLP(SequentialMLP):
    """Experts one after the other, without the router's weights: `BeamMoELayer` sums by them."""

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, _weights: Tensor) -> tuple[Tensor, None]:
        parts = tokens.split(tokens_per_expert.tolist())
        return torch.cat([_gated(expert, part) for expert, part in zip(self.local_experts, parts, strict=True)]), None


class BeamGroupedMLP(TEGroupedMLP):
    """The same by Transformer Engine, all together; in MXFP8 each expert's tokens are padded to whole blocks."""

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, _weights: Tensor) -> tuple[Tensor, None]:
        counts = tokens_per_expert.tolist()
        if not self.config.fp8:
            return _gated(self, tokens, counts), None
        padded, padded_counts = self.quantization_padding(tokens, counts)
        return self.quantization_unpadding(_gated(self, padded, padded_counts), counts), None


class BeamMoELayer(MoELayer):
    """Megatron's MoE layer with a router that can be told its choice, and Beam's factor after the experts' sum."""

    def forward(
        self, hidden: Tensor, routes: Tensor | None = None, agreement: Agreement | None = None
    ) -> tuple[Tensor, None]:
        if self.moe_layer_recompute and self.training:
            return mxfp8.checkpoint(self.config, self._forward, hidden, routes, agreement), None
        return self._forward(hidden, routes, agreement), None

    def _forward(self, hidden: Tensor, routes: Tensor | None, agreement: Agreement | None) -> Tensor:
        dtype = hidden.dtype
        weights, chosen = self.router(hidden, routes, agreement)
        hidden, sent_weights = self.preprocess(hidden, weights.detach(), chosen)  # Megatron's experts take some
        hidden, sent_weights = self.dispatch(hidden, sent_weights)
        out, _ = self.routed_experts_compute(hidden, sent_weights)
        return self._weighted_sum(self.combine(out), weights).to(dtype) * self.config.routed_scaling_factor

    def _weighted_sum(self, out: Tensor, weights: Tensor) -> Tensor:
        """Of each token's experts, not their activations; products and sum in FP32, on a GPU in one kernel.

        vLLM on a GPU rounds each weighted output to BF16, from a product that it had in FP32 and this has in BF16: either
        way one rounding of each. On a CPU it rounds none, as transformers does, and each output is in BF16 on both sides.
        """
        to, fused = self.token_dispatcher, self.config.moe_permute_fusion
        order, shape = to.reversed_local_input_permutation_mapping, to.hidden_shape_before_permute
        out = out if fused else out.float()
        return unpermute(out, order, shape, probs=weights, routing_map=to.routing_map, fused=fused).view(
            to.hidden_shape
        )


# --- layers -----------------------------------------------------------------------------------------------


class BeamLayer(TransformerLayer):
    def __init__(self, config: BeamConfig, submodules: TransformerLayerSubmodules, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        adds_before = 2 * (self.layer_number - 1)  # layer_number is global and counts from 1
        self.self_attn_bda = SandwichResidual(config, adds_before + 2)
        self.mlp_bda = SandwichResidual(config, adds_before + 3)

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: Pack, **_: Any
    ) -> tuple[Tensor, None]:
        """Megatron's layer without what Beam has not, and with the first sub-layer's end and the second's norm in one."""
        normed = self.input_layernorm(hidden_states)
        out = self.self_attention(normed, attention_mask=attention_mask, packed_seq_params=packed_seq_params)
        hidden, normed = self.self_attn_bda.add_norm(out, hidden_states, self.pre_mlp_layernorm)
        return self.mlp_bda.add(self._mlp(normed, packed_seq_params), hidden, 0.0), None

    def _mlp(self, normed: Tensor, pack: Pack) -> tuple[Tensor, None]:
        if self.is_moe_layer:
            return self.mlp(normed, self._routes(pack), pack.agreement)
        if self.recompute_mlp:
            return mxfp8.checkpoint(self.config, self.mlp, normed)
        return self.mlp(normed)

    def _routes(self, pack: Pack) -> Tensor | None:
        """This layer's column, found by its global number: a pipeline stage's first MoE layer is not column 0."""
        if pack.routes is None:
            return None
        column = self.config.moe_layers.index(self.layer_number - 1)
        if self.config.routed_columns is not None:
            column = self.config.routed_columns.index(column)
        return pack.routes[:, column].long()


@dataclass
class Linears:
    """The linear layers of a model's layer: Megatron's own, Transformer Engine's, or emulated MXFP8 ones."""

    column: type
    row: type
    experts: Callable[..., Any]


def linears(emulated: bool = False) -> Linears:
    """emulated: in MXFP8. Transformer Engine's layers have MXFP8 of their own (`mxfp8.native_fields`)."""
    if emulated:
        return _megatrons(mxfp8.Mxfp8ColumnParallelLinear, mxfp8.Mxfp8RowParallelLinear)
    if not compat.has_transformer_engine():
        return _megatrons(ColumnParallelLinear, RowParallelLinear)
    from megatron.core.extensions import transformer_engine as te

    grouped = GroupedMLPSubmodules(te.TEColumnParallelGroupedLinear, te.TERowParallelGroupedLinear)
    experts = partial(BeamGroupedMLP, submodules=grouped)
    return Linears(te.TEColumnParallelLinear, te.TERowParallelLinear, experts)


def _megatrons(column: type, row: type) -> Linears:
    return Linears(column, row, partial(BeamSequentialMLP, submodules=MLPSubmodules(column, row)))


def layer_spec(config: BeamConfig, layer: int) -> ModuleSpec:
    """Of a layer by its global number, from 0."""
    emulated = config.mxfp8 is not None and config.mxfp8.has_layer(layer) and not mxfp8.is_native(config.mxfp8)
    kind, sparse = linears(emulated), config.moe_layer_freq[layer]
    attention = ModuleSpec(
        module=BeamSelfAttention,
        params={"attn_mask_type": AttnMaskType.padding_causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=kind.column,
            core_attention=BeamCore,
            linear_proj=kind.row,
            q_layernorm=HeadNorm,
            k_layernorm=HeadNorm,
        ),
    )
    if sparse:
        mlp = partial(BeamMoELayer, submodules=MoESubmodules(router=BeamRouter, experts=kind.experts))
    else:
        mlp = partial(BeamMLP.as_mlp_submodule, submodules=MLPSubmodules(kind.column, kind.row))
    return ModuleSpec(
        module=BeamLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=BeamRMSNorm, self_attention=attention, pre_mlp_layernorm=BeamRMSNorm, mlp=mlp
        ),
    )


class BeamModel(GPTModel):
    """One pipeline stage of Beam. Called with (1, tokens) ids and `packed_seq_params` a `Pack`."""

    config: BeamConfig


def build_model(config: BeamConfig, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> BeamModel:
    """The layers of this process's pipeline stage, weights not initialized."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    here = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [layer_spec(config, i) for i in here]
    return BeamModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=BeamRMSNorm),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type="none",
        vp_stage=vp_stage,
    )


def build_chunks(config: BeamConfig) -> list[BeamModel]:
    """This rank's part of the model: one chunk, or one for each of its virtual pipeline stages."""
    return [build_model(config, first, last, stage) for stage, first, last in pipeline_ends(config)]


def pipeline_ends(config: Any) -> list[tuple[int | None, bool, bool]]:
    """For each chunk of this rank's: its virtual stage (None: there are none), and whether it is the model's first or last.

    config: Megatron's.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    return [
        (
            stage,
            parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        )
        for stage in ([None] if virtual is None else range(virtual))
    ]
