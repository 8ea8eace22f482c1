"""Policy-gradient losses per token, not reduced.

The reduction is one sum, Σ weight · token loss, with the weights of `weights.py`: they are fixed for the whole global
mini-batch before it is split, so neither the micro-batch size nor the data-parallel split can change the loss.
Plain torch; knows nothing about models, ranks or packing beyond "the tokens of one sample stand together".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from beam_rl.algorithms.corrections import masked_weight, truncated_weight
from beam_rl.algorithms.kl import kl_penalty

if TYPE_CHECKING:
    from beam_rl.recipe.tree import Algorithm


@dataclass(frozen=True)
class LossInputs:
    """Everything a loss may need of a pack of tokens; all tensors are (tokens,), log-probabilities natural and FP32.

    Only `logp` carries a gradient. What stands outside `response` is never used, whatever it is.
    """

    logp: Tensor  # the policy's, now
    logp_old: Tensor  # the trainer's own, before the step's first update
    logp_engine: Tensor  # the engine's, as sampled
    logp_reference: Tensor | None  # the frozen reference policy's; needed for the KL term
    advantage: Tensor  # the sample's, repeated over its tokens
    response: Tensor  # bool: True where a sampled token is predicted
    sample: Tensor  # int: which sample the token belongs to; the tokens of one sample are contiguous
    entropy: Tensor | None = None  # of the policy's distribution at each token, nats; detached, for the statistics


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token, exactly 0 outside the response mask, and what to watch while it falls."""

    loss: Tensor  # (tokens,) with gradient
    clipped: Tensor  # (tokens,) bool: the clip was binding
    kl: Tensor | None  # (tokens,) nats, detached; None without a reference


def objective(inputs: LossInputs, settings: Algorithm) -> TokenLoss:
    """The loss that a recipe's `algorithm` section asks for: importance weight · policy loss + coefficient · KL.

    Raises:
        ValueError: a KL coefficient without `logp_reference`.
    """
    inputs = keep_response(inputs)
    policy = _policy_loss(inputs, settings)
    loss = policy.loss
    weight = _importance_weight(inputs, settings)
    if weight is not None:
        loss = weight * loss
    kl = None
    if inputs.logp_reference is not None:
        penalty = kl_penalty(inputs.logp, inputs.logp_reference, settings.kl.estimator)
        loss = loss + settings.kl.coefficient * penalty
        kl = penalty.detach()
    elif settings.kl.coefficient > 0:
        raise ValueError(
            f"algorithm.kl.coefficient = {settings.kl.coefficient}: needs the reference's log-probabilities"
        )
    return TokenLoss(loss=loss, clipped=policy.clipped, kl=kl)


def _policy_loss(inputs: LossInputs, settings: Algorithm) -> TokenLoss:
    logp, old, advantage = inputs.logp, inputs.logp_old, inputs.advantage
    low, high = settings.clip_low, settings.clip_high
    if settings.loss == "clip":
        return clipped_loss(logp, old, advantage, low, high)
    if settings.loss == "gspo":
        return gspo_loss(logp, old, advantage, inputs.response, inputs.sample, low, high)
    return cispo_loss(logp, old, advantage, low, high)


def _importance_weight(inputs: LossInputs, settings: Algorithm) -> Tensor | None:
    correction = settings.importance_correction
    if correction.kind == "truncate":
        return truncated_weight(inputs.logp_old, inputs.logp_engine, correction.high)
    if correction.kind == "mask":
        return masked_weight(inputs.logp_old, inputs.logp_engine, correction.low, correction.high)
    return None


def keep_response(inputs: LossInputs) -> LossInputs:
    """The same inputs with 0 outside the response: ratio 1, advantage 0, KL 0, hence loss and gradient exactly 0.

    Replaced before any arithmetic: multiplying by the mask afterwards would leave inf · 0 = NaN, in the gradient too.
    """

    def kept(values: Tensor) -> Tensor:
        return torch.where(inputs.response, values, 0.0)

    return replace(
        inputs,
        logp=kept(inputs.logp),
        logp_old=kept(inputs.logp_old).detach(),
        logp_engine=kept(inputs.logp_engine).detach(),
        logp_reference=None if inputs.logp_reference is None else kept(inputs.logp_reference).detach(),
        advantage=kept(inputs.advantage),
    )


def clipped_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, low: float, high: float) -> TokenLoss:
    """PPO's clipped surrogate with separate bounds, "clip-higher" (DAPO, arXiv:2503.14476, eq. 8).

    loss = −min(ratio · A, clip(ratio, 1 − low, 1 + high) · A), ratio = exp(logp − logp_old).

    Args:
        logp, logp_old, advantage: (tokens,)
        low, high: distance of the bounds from ratio 1.
    """
    return _clip((logp - logp_old).exp(), advantage, low, high)


def gspo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    response: Tensor,
    sample: Tensor,
    low: float,
    high: float,
) -> TokenLoss:
    """GSPO-token (arXiv:2507.18071): the ratio and its clip belong to the whole response.

    s = exp(mean over the response's tokens of logp − logp_old) is every token's ratio in value; its gradient flows
    through the token's own logp. With `sample_mean` weights the sum over a response is the sequence-level objective.

    Args:
        logp, logp_old, advantage: (tokens,)
        response: (tokens,) bool, the tokens that count.
        sample: (tokens,) int; equal values stand together.
        low, high: distance of the bounds from 1; the paper's are near 3e-4 and 4e-4.
    """
    log_ratio = torch.where(response, logp - logp_old, 0.0).detach()
    _, group = torch.unique_consecutive(sample, return_inverse=True)
    groups = int(group[-1]) + 1 if len(group) else 0
    sums = log_ratio.new_zeros(groups).index_add(0, group, log_ratio)
    tokens = log_ratio.new_zeros(groups).index_add(0, group, response.to(log_ratio.dtype))
    sequence = torch.where(response, (sums / tokens.clamp(min=1)).exp()[group], 1.0)
    return _clip(sequence * (logp - logp.detach()).exp(), advantage, low, high)


def cispo_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, low: float, high: float) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv:2506.13585): the importance weight is clipped, no token loses its gradient.

    loss = −stop_gradient(clip(ratio, 1 − low, 1 + high)) · A · logp. The paper has no lower bound: a `low` of 1.

    Args:
        logp, logp_old, advantage: (tokens,)
    """
    ratio = (logp - logp_old).detach().exp()
    loss = -ratio.clamp(1 - low, 1 + high) * advantage * logp
    return TokenLoss(loss, (ratio < 1 - low) | (ratio > 1 + high), None)


def _clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> TokenLoss:
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    binding = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    return TokenLoss(-surrogate, binding.detach(), None)
