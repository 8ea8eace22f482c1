"""What this project asks of a model's `config.json`, whoever made the model.

Beam's own names for its parts (`mlp_layer_types`, `num_experts`, …) stand for every model: other families' names for the
same are read here and nowhere else. Plain dictionaries: knows nothing about torch, Megatron or vLLM, and asks transformers
only for what a config.json leaves out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beam_rl.errors import InputError

BEAM = "BeamForCausalLM"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # one number, as families call it


def full_config(folder: Path) -> dict[str, Any]:
    """The config.json in that folder, with what it leaves to the model's class, as trainer and engines see it.

    Beam's own has every key that is read here, and comes as it is. InputError for one that transformers can't read.
    """
    config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return config if is_beam(config) else with_defaults(folder)


def with_defaults(folder: Path) -> dict[str, Any]:
    """The config.json in that folder as transformers reads it. InputError where it can't."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.from_pretrained(folder).to_dict())
    except (OSError, ValueError, StrictDataclassError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"{folder / 'config.json'}: transformers can't read it ({reason})") from None


def is_beam(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is Beam's."""
    return BEAM in architectures(config)


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The classes that the checkpoint says it is of; none for one that does not say."""
    return list(config.get("architectures") or [])


def experts_of(config: Mapping[str, Any]) -> int:
    """Experts of a MoE layer; 0 for a dense model."""
    return next((int(config[name]) for name in EXPERTS if config.get(name)), 0)


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """ "dense" or "sparse" for each layer."""
    if config.get("mlp_layer_types"):
        return list(config["mlp_layer_types"])
    return ["sparse" if _has_experts(config, i) else "dense" for i in range(config["num_hidden_layers"])]


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    if not experts_of(config) or layer in (config.get("mlp_only_layers") or ()):
        return False
    if layer < (config.get("first_k_dense_replace") or 0):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def attention_kinds(config: Mapping[str, Any]) -> list[str]:
    """ "full_attention", "sliding_attention", or what a family calls its own, for each layer."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * config["num_hidden_layers"]


def named_as_beams(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with what layouts and routes are made from under Beam's names; 0 for what a dense model lacks."""
    heads = config["num_attention_heads"]
    return {
        **config,
        "layer_types": attention_kinds(config),
        "mlp_layer_types": layer_kinds(config),
        "num_experts": experts_of(config),
        "num_experts_per_tok": int(config.get("num_experts_per_tok") or 0),
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "moe_intermediate_size": int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0),
    }
