"""Trains the tiny Beam of `megatron_tiny` in any layout, in real processes, and reports what one process would see.

Everything comes back whole and under its HF name or in its sample's order: log-probabilities, gradients, weights.
"""

import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import megatron_tiny as tiny
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from beam_rl.layout import PADDING, cut_routes, even_out, pad
from beam_rl.megatron.optimizer import is_distributed, owned
from beam_rl.recipe.tree import Optimizer, Parallel
from beam_rl.samples import MicroBatch

LR = 1e-3
# Four micro-batches of different lengths, none of them a multiple of anything.
BATCHES = [tiny.micro_batch(lengths, seed=i) for i, lengths in enumerate([[13, 30], [21], [7, 5, 11], [17, 9]])]


@dataclass(frozen=True)
class Layout:
    name: str
    parallel: Parallel = Parallel()
    recompute: str = "none"
    distributed: bool = True

    def settings(self, **changes: Any) -> tiny.TrainerSettings:
        # No clipping: it would scale the gradients that we compare.
        optimizer = Optimizer(lr=LR, weight_decay=0.1, clip_grad=1e9, distributed=self.distributed)
        return tiny.settings(**({"parallel": self.parallel, "recompute": self.recompute, "optimizer": optimizer} | changes))


@dataclass
class Seen:
    """What a layout computed."""

    logp: list[NDArray[np.float32]]  # of each micro-batch's real tokens
    entropy: list[NDArray[np.float32]]
    agreement: list[tuple[int, int]]
    metrics: list[dict[str, float]]  # of two updates
    start: dict[str, NDArray[Any]]  # exported before
    gradients: dict[str, NDArray[Any]] = field(default_factory=dict)  # of the first update, by the weight's HF name
    weights: dict[str, NDArray[Any]] = field(default_factory=dict)  # exported after both


def shares(parallel: Parallel) -> list[list[MicroBatch]]:
    """The micro-batches of each data-parallel replica: all but one for the first, so that padding fills the others."""
    edge = len(BATCHES) if parallel.dp == 1 else len(BATCHES) - parallel.dp + 1
    parts = [BATCHES[:edge], *([batch] for batch in BATCHES[edge:])]
    padded = [[pad(batch, parallel, tiny.EXPERTS) for batch in part] for part in parts]
    return even_out(padded, parallel, tiny.EXPERTS)


def measure(trainer: tiny.Trainer) -> Seen:
    place = trainer.place
    mine = [cut_routes(batch, place) for batch in shares(place.parallel)[place.dp]]
    start = weights(trainer)
    scores = trainer.score(mine)
    assert bool(scores) == place.last_stage
    logp, entropy, agreement = [], [], []
    for batch, score in zip(mine, scores, strict=bool(scores)):
        real = batch.sample != PADDING
        if real.any():
            logp.append(score.logp[real])
            entropy.append(score.entropy[real])
            agreement.append((score.routes_agree, score.routes_total))
    first = trainer.update(mine, tiny.squared_objective, LR)
    gradient = gradients(trainer)
    second = trainer.update(mine, tiny.squared_objective, LR)
    return Seen(logp, entropy, agreement, [first, second], start, gradient, weights(trainer))


def weights(trainer: tiny.Trainer) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy().copy() for name, tensor in trainer.hf_tensors()}


@torch.no_grad()
def gradients(trainer: tiny.Trainer) -> dict[str, NDArray[Any]]:
    """Every weight's gradient, by the weight's HF name: they take the way of an export, in the weights' place."""
    live = trainer._weights_on_host()
    for chunk in trainer.chunks:
        mine = owned(chunk, trainer.optimizer)
        for parameter in chunk.parameters():
            whole = torch.zeros_like(parameter.main_grad).view(-1)
            if parameter in mine:
                part = slice(mine[parameter].start, mine[parameter].start + mine[parameter].main.numel())
                whole[part] = parameter.main_grad.view(-1)[part]
            if is_distributed(trainer.optimizer):
                dense = getattr(parameter, "allreduce", True)
                dist.all_reduce(
                    whole,
                    group=parallel_state.get_data_parallel_group(with_context_parallel=True)
                    if dense
                    else parallel_state.get_expert_data_parallel_group(),
                )
            parameter.copy_(whole.view(parameter.shape))
    found = {name: grad for name, grad in weights(trainer).items() if "e_score_correction_bias" not in name}
    trainer._put_weights(live)
    return found


# --- processes --------------------------------------------------------------------------------------------


def _run(rank: int, layouts: Sequence[tuple[Layout, str]]) -> list[tuple[Any, Seen]]:
    """One rank of each layout after another, in one process."""
    found = []
    for layout, master in layouts:
        trainer = tiny.Trainer(str(tiny.checkpoint()), layout.settings(), rank, layout.parallel.ranks, master)
        try:
            found.append((trainer.place, measure(trainer)))
        except BaseException:
            print(f"{layout.name}, rank {rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            raise
        trainer.close()
    return found


def run(layouts: Sequence[Layout]) -> Iterator[tuple[Layout, Seen]]:
    """What each layout computed; they must have equally many ranks, which run in as many processes."""
    (size,) = {layout.parallel.ranks for layout in layouts}
    jobs = [(layout, f"127.0.0.1:{tiny.free_port()}") for layout in layouts]
    per_rank = tiny.in_new_processes(_run, *[(rank, jobs) for rank in range(size)])
    for layout, *seen in zip(layouts, *per_rank, strict=True):
        yield layout, joined(seen)


def joined(ranks: Sequence[tuple[Any, Seen]]) -> Seen:
    """The whole from the ranks that report; what several know must be the same on all."""
    first = ranks[0][1]
    for _, seen in ranks[1:]:
        assert seen.metrics == first.metrics
        for ours, theirs in ((seen.start, first.start), (seen.gradients, first.gradients), (seen.weights, first.weights)):
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    reports = [seen for place, seen in sorted(ranks, key=lambda found: found[0].dp) if place.reports]
    for name in ("logp", "entropy", "agreement"):
        setattr(first, name, [value for seen in reports for value in getattr(seen, name)])
    return first
