"""Multiplications and bytes of one token through the model: what its seconds are computed from. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from beam_rl.checkpoint_shapes import checkpoint_shapes


@dataclass(frozen=True)
class Work:
    """Of one token's forward pass through the whole model."""

    active: int  # parameters that a token meets, without the embedding
    dense: int  # of these, outside the routed experts
    expert: int  # parameters of one expert, all its layers counted
    attention: float  # FLOPs for a token of context, summed over layers without a window
    windowed: float  # the same over those with one
    window: int


def work_of(config: Mapping[str, Any]) -> Work:
    dense = expert = 0
    for name, shape in checkpoint_shapes(config).items():
        if ".experts.0." in name:
            expert += math.prod(shape)
        elif ".experts." not in name and name != "model.embed_tokens.weight":
            dense += math.prod(shape)
    full = sum(kind == "full_attention" for kind in config["layer_types"])
    heads = config["num_attention_heads"] * config["head_dim"]
    active = dense + config["num_experts_per_tok"] * expert
    sliding = len(config["layer_types"]) - full
    return Work(active, dense, expert, 4.0 * heads * full, 4.0 * heads * sliding, config["sliding_window"])


def forward_flops(work: Work, tokens: float, mean_length: float) -> float:
    """Multiplications and additions counted one by one; windowed layers see their window, others half of the sample."""
    seen = work.attention * mean_length / 2 + work.windowed * min(work.window, mean_length / 2)
    return tokens * (2 * work.active + seen)
