"""Any model that Megatron-Bridge knows, trained as Megatron builds it: its configuration, its layers, its HF names.

Bridge translates the checkpoint's configuration and tensors; this module sets the layout, gives the model an attention
that keeps packed samples apart where Transformer Engine is missing, and routers that replay. What is only for another
way of training is switched off: balancing losses, token dropping, dropout. Knows nothing about losses or optimizers.
"""

import importlib
import json
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.gpt_provider import default_layer_spec
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from transformers import AutoConfig

from beam_rl.checkpoint_shapes import stored_names
from beam_rl.errors import InputError
from beam_rl.layout import Place
from beam_rl.megatron import compat
from beam_rl.megatron.attention import SdpaCore
from beam_rl.megatron.family import base_tensors
from beam_rl.megatron.model import pipeline_ends, runtime_fields
from beam_rl.megatron.replay import ForeignLayer, ReplayLayer, replaying
from beam_rl.model_config import architectures, layer_kinds
from beam_rl.mxfp8.scheme import Scheme

type Spec = ModuleSpec | TransformerBlockSubmodules

# The weights are the checkpoint's and the loss is the recipe's alone.
UNBALANCED: dict[str, Any] = dict(
    moe_router_load_balancing_type="none",
    moe_aux_loss_coeff=0.0,
    moe_z_loss_coeff=None,
    moe_expert_capacity_factor=None,
    moe_token_dispatcher_type="alltoall",
    moe_router_fusion=False,
    moe_shared_expert_overlap=False,
    mtp_num_layers=None,
    apply_rope_fusion=False,
    cross_entropy_loss_fusion=False,
)


LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # Megatron's


class UnlikeOnGpu(InputError):
    """Of the model as it is built without Transformer Engine: with it, on a GPU, it may do."""


class RMSNorm(nn.Module):
    """RMSNorm that rounds as vLLM and transformers do: after the division, and after the weight's product.

    Megatron's own for a CPU refuses sequence parallelism.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


AutoMapping.register_module_type("RMSNorm", "replicated")
AutoMapping.register_module_type("ReplayRouter", "replicated")


class BridgedCheckpoint:
    """A checkpoint in HF format of a model that Megatron-Bridge knows, and the model itself in Megatron."""

    def __init__(self, path: str) -> None:
        """Raises InputError, in one line, if `path` is no folder with such a checkpoint."""
        self.folder = Path(path)
        named = architectures(json.loads((self.folder / "config.json").read_text()))
        self.architecture = named[0] if named else "a model without a name"
        module = compat.bridge_module(self.architecture)
        if module is None:
            raise InputError(f"model.path = {path}: Megatron-Bridge does not build {self.architecture}")
        self.config = AutoConfig.from_pretrained(path)
        importlib.import_module(module)
        self._bridge = AutoBridge.from_hf_pretrained(path)
        compat.amend(self._bridge)

    @property
    def softcap(self) -> float | None:
        return getattr(self.config, "final_logit_softcapping", None)

    def megatron_config(
        self, dtype: torch.dtype, device: torch.device, place: Place, scheme: Scheme | None, **layout: Any
    ) -> Any:
        """Bridge's configuration of the model, laid out. InputError on a CPU for layers that need a GPU."""
        assert scheme is None, "MXFP8 is of Beam's weights"
        provider: Any = self._bridge.to_megatron_provider(load_weights=False)
        for name, value in (runtime_fields(dtype) | UNBALANCED | layout).items():
            setattr(provider, name, value)
        provider.moe_grouped_gemm = bool(provider.num_moe_experts) and compat.has_transformer_engine()
        provider.should_pad_vocab = False
        self._set_rope(provider)
        provider.device = device
        provider.transformer_layer_spec = partial(_spec, self._original_spec(provider))
        provider.finalize()
        self._check_kinds(provider)
        return provider

    def _original_spec(self, provider: Any) -> Any:
        """What makes the model's layers: Bridge's, or on a CPU Megatron's without Transformer Engine."""
        made_by = provider.transformer_layer_spec
        plain = made_by is default_layer_spec or getattr(made_by, "func", None) is get_gpt_decoder_block_spec
        if compat.has_transformer_engine():
            return made_by
        own = provider.multi_latent_attention or provider.layernorm_zero_centered_gamma
        if not plain or own or provider.normalization != "RMSNorm":
            raise UnlikeOnGpu(
                f"model.path = {self.folder}: {self.architecture} has layers in Megatron-Bridge that need Transformer "
                "Engine and so a GPU"
            )
        return partial(get_gpt_decoder_block_spec, use_transformer_engine=False, normalization="RMSNorm")

    def _set_rope(self, provider: Any) -> None:
        """Bridge 0.6 reads the older names of RoPE's parameters. InputError for a kind that Megatron would get wrong."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        if any(isinstance(value, dict) for value in rope.values()):
            return  # by kind of layer, for families that have a model of their own in Bridge
        provider.rotary_percent = rope.get("partial_rotary_factor", provider.rotary_percent)
        kind = rope.get("rope_type", "default")
        fixed = {name: rope.get(name) for name in LLAMA3_ROPE} == LLAMA3_ROPE and provider.rope_scaling
        if kind != "default" and not (kind == "llama3" and fixed):
            raise InputError(
                f"model.path = {self.folder}: its RoPE is {kind} with parameters that Megatron does not take; it takes "
                f"default, and llama3 with {LLAMA3_ROPE}"
            )

    def _check_kinds(self, provider: Any) -> None:
        """Bridge and `beam_rl.model_config` read the same layers as those with experts."""
        frequency = provider.moe_layer_freq
        if isinstance(frequency, int):
            frequency = [int(i % frequency == 0) for i in range(provider.num_layers)]
        built = ["sparse" if provider.num_moe_experts and sparse else "dense" for sparse in frequency]
        if built != layer_kinds(self.config.to_dict()):
            raise InputError(
                f"model.path = {self.folder}: Megatron-Bridge would build other layers of {self.architecture} with experts "
                "than its config.json names"
            )

    def build(self, config: Any, place: Place) -> list[GPTModel]:
        """This rank's part of the model, weights not initialized: one chunk, or one for each virtual stage."""
        compat.use_groups(config)
        try:
            chunks = [config.provide(*ends, vp_stage=stage) for stage, *ends in pipeline_ends(config)]
        except ForeignLayer as error:
            raise InputError(
                f"model.path = {self.folder}: {self.architecture} has in Megatron-Bridge {error}, whose choice of experts "
                "can't be replayed here"
            ) from None
        sparse = [i for i, kind in enumerate(layer_kinds(self.config.to_dict())) if kind == "sparse"]
        here = [sparse[column] for column in place.moe_columns]
        for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
            if isinstance(layer, ReplayLayer):
                layer.column = here.index(layer.layer_number - 1)
                layer.mlp.router.frozen_expert_bias = True  # no gradient trains it, and none is here to balance
        return chunks

    def load_into(self, chunks: Sequence[GPTModel]) -> None:
        """Fills the model from the checkpoint; all ranks call it. InputError as from `check_names`."""
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, self.names_of(chunks))
        self.check_names(set().union(*everywhere))
        with torch.no_grad():
            self._bridge.load_hf_weights(list(chunks))

    def names_of(self, chunks: Sequence[GPTModel]) -> set[str]:
        """The checkpoint's names of what this rank holds. InputError for a parameter that has none."""
        tasks = self._bridge.get_conversion_tasks(list(chunks))  # of a rank's own experts
        if unnamed := tasks.count(None):
            raise UnlikeOnGpu(
                f"model.path = {self.folder}: {self.architecture} has {unnamed} parameters here that Megatron-Bridge knows "
                "no tensors for"
            )
        named = [task.mapping.hf_param for task in tasks]
        return {name for names in named for name in ([names] if isinstance(names, str) else names.values())}

    def check_names(self, held: Set[str]) -> None:
        """InputError unless the model has a place for every tensor of the checkpoint, and that one for every parameter.

        held: the names of all ranks together.
        """
        stored = stored_names(self.folder, self.config.to_dict())
        for what, names in (("has no place for", stored - held), ("lacks", held - stored)):
            if names:
                whose = "the model that Megatron-Bridge builds of it" if what != "lacks" else "the checkpoint"
                raise InputError(
                    f"model.path = {self.folder}: {self.architecture}: {whose} {what} {min(names)} ({len(names)} such "
                    "tensors)"
                )

    def tensors_of(self, chunks: Sequence[GPTModel]) -> Iterator[tuple[str, Tensor]]:
        """See `Family`."""
        return base_tensors(self._bridge, chunks)


def _spec(original: Any, config: Any, vp_stage: int | None = None) -> Spec:
    """The model's layers with what they need here in the place of what Megatron would take."""
    takes_stage = getattr(original, "func", original) is get_gpt_decoder_block_spec
    made: Spec = original(config, vp_stage=vp_stage) if takes_stage else original(config)
    if isinstance(made, ModuleSpec):
        return replaying(made)
    layers = [replaying(layer) for layer in made.layer_specs]
    if compat.has_transformer_engine():
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=made.layer_norm)
    return TransformerBlockSubmodules(layer_specs=[_without_te(layer) for layer in layers], layer_norm=RMSNorm)


def _without_te(layer: ModuleSpec) -> ModuleSpec:
    """A layer whose attention keeps packed samples apart and whose norms take sequence parallelism."""
    parts = layer.submodules
    attention = parts.self_attention
    inner = replace(attention.submodules, core_attention=SdpaCore)
    of_heads = [name for name in ("q_layernorm", "k_layernorm") if getattr(inner, name) is not IdentityOp]
    inner = replace(inner, **dict.fromkeys(of_heads, RMSNorm))
    parts = replace(
        parts,
        input_layernorm=RMSNorm,
        pre_mlp_layernorm=RMSNorm,
        self_attention=replace(attention, submodules=inner, params={"attn_mask_type": AttnMaskType.padding_causal}),
    )
    return replace(layer, submodules=parts)
