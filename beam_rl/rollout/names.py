"""Where a vLLM Beam holds each tensor of a checkpoint, and each matrix of an adapter.

Knows nothing about vLLM's processes; the model is any module with vLLM's fused parameters.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
QKV = re.compile(r"(.*\.self_attn)\.([qkv])_proj\.weight")
ATTENTION_INPUT = re.compile(r"(.*\.self_attn)\.(q|k|v|gate)_proj\.weight")
GATE_UP = re.compile(r"(.*\.mlp)\.(gate|up)_proj\.weight")


def adapter_place(name: str, merged_inputs: bool = False) -> tuple[str, int, int | None]:
    """Where vLLM holds the adapter of a checkpoint's matrix (its name without `.weight`).

    Returns the module, which of the module's adapters (query, key, value, gate; gate, up, down), and the expert.
    merged_inputs: the model has the four attention inputs in one matrix.
    """
    name += ".weight"
    if match := EXPERT.fullmatch(name):
        return match[1], ("gate", "up", "down").index(match[3]), int(match[2])
    if merged_inputs and (match := ATTENTION_INPUT.fullmatch(name)):
        return f"{match[1]}.qkv_gate_proj", ("q", "k", "v", "gate").index(match[2]), None
    if match := QKV.fullmatch(name):
        return f"{match[1]}.qkv_proj", "qkv".index(match[2]), None
    if match := GATE_UP.fullmatch(name):
        return f"{match[1]}.gate_up_proj", int(match[2] == "up"), None
    return _own_name(name).removesuffix(".weight"), 0, None


def held_tensor(model: nn.Module, name: str) -> Tensor:
    """The tensor that a vLLM Beam holds under a checkpoint's name: a parameter, or its part of a fused one, or its shard.

    Modules with an adapter hold the checkpoint's weight one level deeper. Raises KeyError if there is no such tensor.
    """
    held = {held_as.replace(".base_layer.", "."): tensor for held_as, tensor in model.named_parameters()}
    if name in held:
        return held[name]
    if match := EXPERT.fullmatch(name):
        experts, index, part = match.groups()
        fused = "w2_weight" if part == "down" else "w13_weight"
        weight = held[f"{experts}.routed_experts.{fused}"][int(index)]
        return weight if part == "down" else weight.chunk(2)[part == "up"]
    if match := QKV.fullmatch(name):
        module: Any = model.get_submodule(match[1])
        sizes = [module.heads, module.kv_heads, module.kv_heads]
        parts = held[f"{match[1]}.qkv_proj.weight"].split([n * module.head_dim for n in sizes])
        return parts["qkv".index(match[2])]
    if match := GATE_UP.fullmatch(name):
        return held[f"{match[1]}.gate_up_proj.weight"].chunk(2)[match[2] == "up"]
    return held[_own_name(name)]


def _own_name(name: str) -> str:
    """The name of a parameter that is not part of a fused one."""
    return name.replace(".self_attn.gate_proj", ".self_attn.output_gate_proj")


def adapted_modules(targets: Iterable[str]) -> list[str]:
    """The last parts of the names of the modules that hold these targets' adapters (`beam_rl.lora`), in either model."""
    names = [f"model.layers.0.{t.replace('.experts.', '.experts.0.')}" for t in targets]
    return sorted({adapter_place(name, merged)[0].rpartition(".")[2] for name in names for merged in (False, True)})
