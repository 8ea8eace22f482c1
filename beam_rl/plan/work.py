"""Multiplications and bytes of one token through the model: what its seconds are computed from. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from beam_rl.plan.tensors import Stored


@dataclass(frozen=True)
class Work:
    """Of one token's forward pass through the whole model."""

    active: int  # parameters that a token meets, without the embedding
    dense: int  # of these, outside the routed experts
    expert: int  # parameters of one expert, all its layers counted
    attention: float  # FLOPs for a token of context, summed over layers without a window
    windowed: float  # the same over those with one
    window: int


def work_of(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Work:
    dense = expert = 0
    head = (
        "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    )  # tied: it is met as the head
    for name, stored in tensors.items():
        if ".experts.0." in name:
            expert += stored.count
        elif ".experts." not in name and (name != "model.embed_tokens.weight" or name == head):
            dense += stored.count
    full = sum(kind == "full_attention" for kind in config["layer_types"])
    heads = config["num_attention_heads"] * config["head_dim"]
    active = dense + config["num_experts_per_tok"] * expert
    sliding = len(config["layer_types"]) - full
    return Work(active, dense, expert, 4.0 * heads * full, 4.0 * heads * sliding, config.get("sliding_window") or 0)


def forward_flops(work: Work, tokens: float, mean_length: float) -> float:
    """Multiplications and additions counted one by one, of samples that are all of this length."""
    return tokens * (2 * work.active + _attention_flops(work, mean_length))


def update_flops(work: Work, lengths: Iterable[int], adapter: bool) -> float:
    """Of the forward and backward passes over samples of so many tokens.

    A frozen weight has no gradient of its own; attention has no weights.
    """
    passes = 2 if adapter else 3
    return sum(length * (passes * 2 * work.active + 3 * _attention_flops(work, length)) for length in lengths)


def _attention_flops(work: Work, length: float) -> float:
    """Of a token on average: causal, windowed layers see their window."""
    window = min(work.window, length)
    seen = window - window**2 / (2 * length) if length else 0.0
    return work.attention * length / 2 + work.windowed * seen
