"""Beam in Megatron-Bridge: which tensor of a HF checkpoint is which parameter, in both directions.

Tensors are streamed one at a time, and keep their dtype: the router and its correction bias are FP32 in Megatron and on
disk. Knows nothing about training.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    ColumnParallelMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    ReplicatedMapping,
    RowParallelMapping,
)
from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import AutoConfig

from beam_rl.checkpoint_shapes import checkpoint_shapes
from beam_rl.errors import InputError
from beam_rl.layout import Place
from beam_rl.megatron.family import base_tensors
from beam_rl.megatron.model import BeamConfig, BeamModel, build_chunks, build_model, config_from_hf
from beam_rl.mxfp8.scheme import Scheme

QKVG = ("q", "k", "v", "gate")


def merge_qkvg(parts: dict[str, Tensor], groups: int) -> Tensor:
    """The projections as Megatron stores them: for each KV group its q heads, gate heads (if any), k head and v head.

    Each part is (heads · dim, hidden), or anything else with the heads in its first dimension.
    """
    rest = parts["q"].shape[1:]
    by_group = [parts[name].reshape(groups, -1, *rest) for name in ("q", "gate", "k", "v") if name in parts]
    return torch.cat(by_group, dim=1).reshape(-1, *rest)


def split_qkvg(
    merged: Tensor, heads: int, groups: int, head_dim: int, names: Sequence[str] = QKVG
) -> dict[str, Tensor]:
    """The inverse of `merge_qkvg`, in the order of `names`; without "gate" there is none."""
    wide, rest = heads // groups * head_dim, merged.shape[1:]
    sizes = {"q": wide, "gate": wide, "k": head_dim, "v": head_dim}
    stored = [name for name in sizes if name in names]
    parts = merged.view(groups, -1, *rest).split([sizes[name] for name in stored], dim=1)
    found = dict(zip(stored, parts, strict=True))
    return {name: found[name].reshape(-1, *rest) for name in names}


class QKVGateMapping(MegatronParamMapping[dict[str, Tensor]]):
    """q, k, v and the full-width output gate ↔ Megatron's one `linear_qkv` (Bridge's own knows a gate value a head)."""

    def __init__(self, megatron_param: str, hf_param: dict[str, str], heads: int, groups: int, head_dim: int) -> None:
        super().__init__(megatron_param, hf_param)
        self.heads, self.groups, self.head_dim = heads, groups, head_dim
        self._sharded = ColumnParallelMapping(megatron_param, megatron_param)

    def resolve(self, captures: tuple[str, ...]) -> "QKVGateMapping":
        megatron_param, hf_param = self._resolve_names(captures)
        return QKVGateMapping(megatron_param, hf_param, self.heads, self.groups, self.head_dim)

    def hf_to_megatron(self, hf_weights: dict[str, Tensor], megatron_module: nn.Module) -> Tensor:
        merged = merge_qkvg(hf_weights, self.groups) if self.tp_rank == 0 else None
        return self._sharded.hf_to_megatron(merged, megatron_module)

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: nn.Module | None) -> dict[str, Tensor]:
        whole = self._sharded.megatron_to_hf(megatron_weights, megatron_module)
        if not whole:
            return {}
        parts = split_qkvg(next(iter(whole.values())), self.heads, self.groups, self.head_dim)
        return {self.hf_param[name]: part for name, part in parts.items()}


@dataclass
class BeamProvider(BeamConfig, ModelProviderMixin[BeamModel]):
    """Bridge's way to ask for a model."""

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> BeamModel:
        first = parallel_state.is_pipeline_first_stage() if pre_process is None else pre_process
        last = parallel_state.is_pipeline_last_stage() if post_process is None else post_process
        return build_model(self, first, last, vp_stage)

    def finalize(self) -> None:
        """`BeamConfig` is complete when it is made."""


@MegatronModelBridge.register_bridge(
    source="BeamForCausalLM", target=BeamModel, provider=BeamProvider, model_type="beam"
)
class BeamBridge(MegatronModelBridge):
    def provider_bridge(self, hf_pretrained: Any) -> BeamProvider:
        hf = hf_pretrained.config
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = config_from_hf(hf, self.dtype_from_hf(hf, default=torch.float32), device)
        return BeamProvider(**{f.name: getattr(config, f.name) for f in fields(BeamConfig) if f.init})

    def _with_progress_tracking(self, tasks: Any, description: str, show_progress: bool = True) -> Any:
        return tasks  # a trainer among many writes no progress bars

    def mapping_registry(self) -> MegatronMappingRegistry:
        return beam_mappings(self.hf_config)


def beam_mappings(hf: Any) -> MegatronMappingRegistry:
    """Every parameter of Megatron's Beam and the tensors that it is made of; `hf` is transformers' BeamConfig."""
    here, there = "decoder.layers.*.", "model.layers.*."
    replicated = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attn_bda.norm.weight": "post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
        "mlp_bda.norm.weight": "post_feedforward_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    }
    mappings: list[Any] = [ReplicatedMapping(here + a, there + b) for a, b in replicated.items()]
    mappings += [
        ColumnParallelMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ColumnParallelMapping("output_layer.weight", "lm_head.weight"),
        ReplicatedMapping("decoder.final_layernorm.weight", "model.norm.weight"),
        RowParallelMapping(here + "self_attention.linear_proj.weight", there + "self_attn.o_proj.weight"),
        ColumnParallelMapping(here + "self_attention.gate_bias", there + "self_attn.gate_bias"),
        QKVGateMapping(
            here + "self_attention.linear_qkv.weight",
            {name: there + f"self_attn.{name}_proj.weight" for name in QKVG},
            hf.num_attention_heads,
            hf.num_key_value_heads,
            hf.head_dim,
        ),
    ]
    # Dense; experts one by one (CPU); grouped experts (Transformer Engine), which carry their number last.
    for ours, theirs in (
        ("mlp.{}.weight", "mlp.{}.weight"),
        ("mlp.experts.local_experts.*.{}.weight", "mlp.experts.*.{}.weight"),
        ("mlp.experts.{}.weight*", "mlp.experts.*.{}.weight"),
    ):
        gate, up, down = (there + theirs.format(f"{name}_proj") for name in ("gate", "up", "down"))
        mappings.append(GatedMLPMapping(here + ours.format("linear_fc1"), gate, up))
        mappings.append(RowParallelMapping(here + ours.format("linear_fc2"), down))
    return MegatronMappingRegistry(*mappings)


class BeamCheckpoint:
    """A Beam checkpoint in HF format: a folder with `config.json` and safetensors."""

    def __init__(self, path: str) -> None:
        """Raises InputError, in one line, if `path` is not such a folder or lacks a tensor of the model."""
        self.folder = Path(path)
        self.config = read_config(self.folder)
        self._bridge = AutoBridge.from_hf_pretrained(path)
        expected = set(checkpoint_shapes(self.config.to_dict()))
        found = set(self._bridge.hf_pretrained.state.source.get_all_keys())
        for what, names in (("lacks", expected - found), ("has the unknown", found - expected)):
            if names:
                raise InputError(f"model.path = {path}: the checkpoint {what} {min(names)} ({len(names)} such tensors)")

    @property
    def softcap(self) -> float:
        return self.config.final_logit_softcapping

    def megatron_config(
        self, dtype: torch.dtype, device: torch.device, place: Place, scheme: Scheme | None, **layout: Any
    ) -> BeamConfig:
        """Megatron's configuration of this Beam."""
        return config_from_hf(self.config, dtype, device, scheme, routed_columns=place.moe_columns, **layout)

    def build(self, config: BeamConfig, place: Place) -> list[BeamModel]:
        """This rank's part of the model, weights not initialized."""
        return build_chunks(config)

    def load_into(self, chunks: Sequence[BeamModel]) -> None:
        """Fills the chunks of the model that this rank holds, which have no adapter, from the slices of the files that they
        are. The ranks need not call it together."""
        from beam_rl.megatron.slice_reader import SafetensorsFolder
        from beam_rl.megatron.slices import targets_of

        targets = targets_of(chunks, self.config)
        SafetensorsFolder(self.folder).read_into((target.tensor, target.slices) for target in targets)

    def tensors_of(self, chunks: Sequence[BeamModel]) -> Iterator[tuple[str, Tensor]]:
        """See `Family`."""
        return base_tensors(self._bridge, chunks)


def read_config(folder: Path) -> Any:
    """transformers' BeamConfig of a checkpoint folder; InputError if it is none."""
    try:
        architectures = json.loads((folder / "config.json").read_text()).get("architectures") or []
    except (OSError, ValueError):
        raise InputError(f"model.path = {folder}: no folder with a readable config.json") from None
    if "BeamForCausalLM" not in architectures:
        raise InputError(f"model.path = {folder}: not a Beam checkpoint (its architectures: {architectures})")
    return AutoConfig.from_pretrained(folder)
