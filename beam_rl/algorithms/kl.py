"""Estimators of KL(policy ‖ reference) from sampled tokens (J. Schulman, "Approximating KL Divergence", 2020).

Plain torch. With logr = logp_reference − logp of a token that the policy sampled:

    k1 = −logr            unbiased, may be negative
    k2 = logr² / 2        biased value; its gradient is that of the reverse KL
    k3 = exp(logr) − 1 − logr   unbiased, never negative; what GRPO uses
"""

from typing import Literal

from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def k1(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """log(policy / reference) of each token, in nats. All shapes (tokens,)."""
    return logp - logp_reference


def k2(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """Half the squared log ratio of each token. All shapes (tokens,)."""
    return 0.5 * (logp - logp_reference).square()


def k3(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """r − 1 − log r of each token, r = reference / policy. All shapes (tokens,)."""
    logr = logp_reference - logp
    return logr.expm1() - logr


def kl_penalty(logp: Tensor, logp_reference: Tensor, estimator: Estimator) -> Tensor:
    """The estimator as a loss term: its value, with a gradient that pulls the policy towards the reference.

    k2 and k3 are differentiated as they stand. k1's own gradient is that of logp alone, whose mean over the policy's
    samples is zero: as a loss it would add noise and pull nowhere. It gets k2's gradient instead, which is the
    reverse KL's (Liu et al., arXiv:2510.01555).

    Args:
        logp: (tokens,) the policy's natural-log probabilities, with gradient.
        logp_reference: (tokens,) the frozen reference's.
    Returns:
        (tokens,) nats.
    """
    reference = logp_reference.detach()
    if estimator == "k2":
        return k2(logp, reference)
    if estimator == "k3":
        return k3(logp, reference)
    surrogate = k2(logp, reference)
    return k1(logp, reference).detach() + surrogate - surrogate.detach()
