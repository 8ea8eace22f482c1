"""How far the trainer's log-probabilities are from the engine's for the same tokens and the same weights.

The number that tells whether the run learns from what it sampled. Nothing is swallowed: a log-probability that is not
finite is an error with its count, never a gap of 0. Plain torch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


class NonFiniteLogprobs(ValueError):
    """A response token has a log-probability that is NaN or infinite."""


@dataclass(frozen=True)
class Gap:
    """Over the response tokens of a step; all 0 where there are none."""

    tokens: int
    mean: float  # mean |Δlogp|, nats
    max: float  # largest |Δlogp|, nats
    mismatch_kl: float  # mean of r − log r − 1, r = trainer / engine: estimates KL(engine ‖ trainer), nats


def logprob_gap(logp_trainer: Tensor, logp_engine: Tensor, response: Tensor) -> Gap:
    """The gap over the tokens of the mask.

    The mismatch KL is Schulman's k3 with tokens sampled by the engine, hence of KL(engine ‖ trainer).

    Args:
        logp_trainer, logp_engine: (tokens,) natural-log probabilities.
        response: (tokens,) bool loss mask.
    Raises:
        NonFiniteLogprobs: with how many tokens, on which side, and where the first one is.
    """
    trainer, engine = (
        logp_trainer.detach()[response].double(),
        logp_engine.detach()[response].double(),
    )
    _require_finite(trainer, engine, response)
    if not len(trainer):
        return Gap(0, 0.0, 0.0, 0.0)
    difference = trainer - engine
    kl = torch.expm1(difference) - difference  # the same as r − log r − 1 without cancelling where r is near 1
    return Gap(
        len(trainer),
        difference.abs().mean().item(),
        difference.abs().max().item(),
        kl.mean().item(),
    )


def _require_finite(trainer: Tensor, engine: Tensor, response: Tensor) -> None:
    broken = ~(trainer.isfinite() & engine.isfinite())
    if not broken.any():
        return
    first = int(response.nonzero()[int(broken.nonzero()[0])])
    sides = ", ".join(
        f"{name} {int(logp.isnan().sum())} NaN and {int(logp.isinf().sum())} infinite"
        for name, logp in (("trainer", trainer), ("engine", engine))
    )
    raise NonFiniteLogprobs(
        f"{int(broken.sum())} of {len(broken)} response tokens have no finite log-probability ({sides}); "
        f"the first is token {first} of the pack"
    )
