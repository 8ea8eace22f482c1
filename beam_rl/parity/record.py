"""What one side computed at each sub-layer, in a form that is small and the same on every side.

Vectors of up to `EXACT_DIMS` numbers are kept as they are; wider ones (the 5120 of the published Beam, its vocabulary) are
multiplied by a fixed random matrix, the same on every side, which keeps relative differences to a few percent of
themselves. Plain torch: knows nothing about any of the models.
"""

import functools
from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EXACT_DIMS, PROJECTED_DIMS = 1024, 64

Place = tuple[int | None, str]  # layer from 0 (None: before or after the layers) and one of the names below
Records = dict[Place, NDArray[np.float32]]  # (tokens, dims)

BEFORE = ("embedding",)
LAYER = (
    "input_norm",
    "q",  # normalized, with its position
    "k",
    "v",
    "attention",  # before the gate
    "gate",  # after bias and sigmoid
    "attention_out",  # gated and projected
    "post_attention_norm",
    "residual_attention",
    "pre_mlp_norm",
    "router_logits",  # sparse layers
    "experts",  # sparse layers: (tokens, experts) the router's own weights, 0 where not chosen
    "mlp",  # the factor after the experts' sum included
    "post_mlp_norm",
    "residual_mlp",
)
AFTER = ("final_norm", "logits", "log_probabilities")  # logits as the softmax sees them: softcap, temperature
MARGIN = "margin"  # beside them, of the reference alone: how far its choice of experts was from another one


class Recorder:
    """Collects (tokens, …) values by place, in the order in which the tokens come."""

    def __init__(self) -> None:
        self._parts: dict[Place, list[Tensor]] = defaultdict(list)

    def add(self, layer: int | None, sublayer: str, value: Tensor) -> None:
        """value: (tokens, …), every dimension but the first flattened."""
        rows = value.detach().reshape(len(value), -1).float()
        if rows.shape[1] > EXACT_DIMS:
            rows = rows @ projection(rows.shape[1]).to(rows.device)
        self._parts[layer, sublayer].append(rows.to("cpu", copy=True))  # whoever computed it may reuse its memory

    def rows(self, layer: int | None, sublayer: str) -> int:
        """How many tokens this place has seen."""
        return sum(map(len, self._parts[layer, sublayer]))

    def keep_whole(self, tokens: int) -> None:
        """Forgets the places that have not seen all of the tokens."""
        self._parts = defaultdict(list, {p: rows for p, rows in self._parts.items() if self.rows(*p) == tokens})

    def parts(self) -> dict[Place, list[Tensor]]:
        return {place: parts for place, parts in self._parts.items() if parts}

    def records(self) -> Records:
        return {place: torch.cat(parts).numpy() for place, parts in self.parts().items()}


@functools.cache
def projection(dims: int) -> Tensor:
    """(dims, PROJECTED_DIMS) Gaussian, the same in every process; keeps a vector's expected squared length."""
    generator = torch.Generator().manual_seed(dims)
    return torch.randn(dims, PROJECTED_DIMS, generator=generator) / PROJECTED_DIMS**0.5


def concatenate(records: list[Records]) -> Records:
    """Sequences one after the other, at the places that all of them have."""
    places = [place for place in records[0] if all(place in r for r in records)]
    return {place: np.concatenate([r[place] for r in records]) for place in places}
