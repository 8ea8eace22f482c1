"""A layer's experts, one matrix of all of them at a time, for vLLM's loader.

A checkpoint has a tensor for each expert. Handed over one by one they cost vLLM 0.2 to 0.4 ms each, whatever their size,
because it keeps account of what a layer still waits for: a minute for some hundred thousand. It takes a stack as well.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from beam_rl.rollout import compat

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|weight_scale)")
SHARDS = {"gate_proj": ("w1", "w13"), "up_proj": ("w3", "w13"), "down_proj": ("w2", "w2")}  # vLLM's names


class ExpertStacks:
    """Those of one update of all weights."""

    def __init__(self, model: Any) -> None:
        self.layers = compat.expert_layers(model)
        self.coming: dict[tuple[str, str, str], dict[int, Tensor]] = {}

    def others(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are left for the model's own loader; a stack is loaded as soon as it has come whole.

        Left are also experts that vLLM would convert, and those of layers that hold an expert more than once. Experts
        that another worker holds are dropped.
        """
        for name, tensor in tensors:
            found = EXPERT.fullmatch(name)
            layer = self.layers.get(found[1]) if found else None
            if found is None or layer is None or not self._takes(layer, found, tensor):
                yield name, tensor
            elif int(found[2]) in layer.local:
                self._add(layer, found, tensor)
            del tensor

    def _takes(self, layer: "compat.ExpertLayer", found: re.Match[str], tensor: Tensor) -> bool:
        parameter = layer.parameter(f"{SHARDS[found[3]][1]}_{found[4]}")
        return parameter is not None and parameter.dtype == tensor.dtype and tensor.dim() == parameter.dim() - 1

    def _add(self, layer: "compat.ExpertLayer", found: re.Match[str], tensor: Tensor) -> None:
        key = found[1], found[3], found[4]
        stack = self.coming.setdefault(key, {})
        stack[int(found[2])] = tensor
        if len(stack) == len(layer.local):
            del self.coming[key]
            shard, prefix = SHARDS[found[3]]
            layer.load(f"{prefix}_{found[4]}", shard, torch.stack([stack[expert] for expert in layer.local]))
