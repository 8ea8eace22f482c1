"""A layer's experts, one matrix of all of them at a time, for vLLM's loader.

A checkpoint has a tensor for each expert. Handed over one by one they cost vLLM (0.32, 0.33) 0.2 to 0.4 ms each, whatever
their size, because a reload runs each call twice, once to count what it loads: 15 s for the 501B Beam. It takes stacks, too.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from beam_rl.rollout import compat
from beam_rl.rollout.compat import ExpertLayer

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|weight_scale)")
SHARDS = {"gate_proj": ("w1", "w13"), "up_proj": ("w3", "w13"), "down_proj": ("w2", "w2")}  # vLLM's names

Key = tuple[str, str, str]  # layer, projection, weight or weight_scale


class ExpertStacks:
    """Of an engine's worker; `begin` comes before each update of all weights."""

    def __init__(self, model: Any) -> None:
        self.layers = compat.expert_layers(model)
        self.begin()

    def begin(self) -> None:
        """Forgets what is left of an update before."""
        self.coming: dict[Key, Tensor] = {}
        self.left: dict[Key, set[int]] = {}  # experts that a stack still waits for

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
            elif int(found[2]) in layer.places:
                self._add(layer, found, tensor)
            del tensor

    def check_whole(self) -> None:
        """Raises ValueError while a stack waits for an expert."""
        for (layer, projection, kind), experts in self.left.items():
            raise ValueError(f"weight sync: {layer}.{min(experts)}.{projection}.{kind} did not come as the others did")

    def _takes(self, layer: ExpertLayer, found: re.Match[str], tensor: Tensor) -> bool:
        parameter = layer.parameter(f"{SHARDS[found[3]][1]}_{found[4]}")
        return parameter is not None and parameter.dtype == tensor.dtype and (tensor.dim(), parameter.dim()) == (2, 3)

    def _add(self, layer: ExpertLayer, found: re.Match[str], tensor: Tensor) -> None:
        key, expert = (found[1], found[3], found[4]), int(found[2])
        if key not in self.coming:
            self.coming[key] = tensor.new_empty((len(layer.places), *tensor.shape))
            self.left[key] = set(layer.places)
        place = self.coming[key][layer.places[expert]]
        if expert not in self.left[key] or place.shape != tensor.shape:
            raise ValueError(f"weight sync: {found[0]} came twice, or in another shape than the others")
        place.copy_(tensor)
        self.left[key].discard(expert)
        if not self.left[key]:
            del self.left[key]
            shard, prefix = SHARDS[found[3]]
            layer.load(f"{prefix}_{found[4]}", shard, self.coming.pop(key))
