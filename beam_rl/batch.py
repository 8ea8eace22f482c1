"""From verified groups to the mini-batches of a step: advantages, samples left out, loss weights.

Knows nothing about ranks and micro-batches: a sample's loss weight is fixed here, over the whole global mini-batch, so
that nothing later can change the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from beam_rl.algorithms.advantages import dr_grpo, grpo
from beam_rl.algorithms.weights import Aggregation, sample_weights
from beam_rl.recipe.tree import Recipe
from beam_rl.routes import invalid_rows
from beam_rl.samples import Group, Sample

ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo}


@dataclass(frozen=True)
class StepBatch:
    """What a step trains on. Empty `mini_batches`: there is nothing to learn from."""

    mini_batches: list[list[Sample]]
    skipped: int  # mini-batches whose advantages are all 0
    complete: int  # samples with all that they need; the others are left out
    missing_rows: int  # rows of routes that were missing or invalid
    replay: bool  # whether the recipe asks for replay


def build(groups: Sequence[Group], recipe: Recipe, num_experts: int) -> StepBatch:
    """Advantages relative to each group, then at most `trainer.mini_batches` mini-batches of whole groups.

    A sample whose routes are missing or invalid is left out after its group's advantage is known, and counted. A step
    whose advantages are all 0 has no mini-batches: an update would move the weights by the optimizer's momentum alone.
    """
    algorithm, replay = recipe.algorithm, recipe.rollout.routing_replay
    for group in groups:
        rewards = torch.tensor([[s.reward for s in group.samples]])
        for sample, advantage in zip(group.samples, ADVANTAGES[algorithm.advantage](rewards)[0], strict=True):
            sample.advantage = float(advantage)
    missing = complete = skipped = 0
    parts: list[list[Sample]] = []
    for part in _split(groups, recipe.trainer.mini_batches):
        kept = []
        for sample in (s for g in part for s in g.samples):
            if bad := _missing_rows(sample, num_experts) if replay else 0:
                missing += bad
            else:
                kept.append(sample)
        complete += len(kept)
        if any(s.advantage for s in kept) or (kept and algorithm.kl.coefficient):
            _set_weights(kept, algorithm.aggregation, recipe.rollout.max_response_tokens)
            parts.append(kept)
        else:
            skipped += 1
    return StepBatch(parts, skipped, complete, missing, replay)


def _set_weights(mini_batch: Sequence[Sample], aggregation: Aggregation, max_response_tokens: int) -> None:
    """Fixes every sample's loss weight over the whole mini-batch (see `algorithms.weights`)."""
    lengths = torch.tensor([s.sampled_tokens for s in mini_batch])
    for sample, weight in zip(mini_batch, sample_weights(lengths, aggregation, max_response_tokens), strict=True):
        sample.weight = float(weight)


def _split(groups: Sequence[Group], parts: int) -> list[Sequence[Group]]:
    """Whole groups in order, as even as can be; fewer parts when there are fewer groups."""
    edges = np.linspace(0, len(groups), min(parts, len(groups)) + 1).round().astype(int)
    return [groups[a:b] for a, b in pairwise(edges)]


def _missing_rows(sample: Sample, num_experts: int) -> int:
    """Rows that replay would lack: all of them when the count is wrong, else the invalid ones."""
    routes = sample.completion.routes
    if routes is None or len(routes) != sample.model_tokens:
        return sample.model_tokens
    return int(invalid_rows(routes, num_experts).any(axis=-1).sum())
