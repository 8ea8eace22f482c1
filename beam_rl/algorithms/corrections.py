"""Weights that correct for sampling with one engine and training with another.

The engine drew the tokens with its own probabilities; the trainer computes slightly different ones for the same
weights. Each function takes (tokens,) natural-log probabilities, the trainer's before the step's first update
(`logp_old`) and the engine's at sampling (`logp_engine`), and returns (tokens,) weights for the policy loss, without
gradient. Plain torch.
"""

from torch import Tensor


def truncated_weight(logp_old: Tensor, logp_engine: Tensor, high: float) -> Tensor:
    """min(trainer / engine, high): truncated importance sampling (TIS).

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025. Truncation bounds the
    variance; tokens that the engine made too likely are still weighted down.
    """
    return (logp_old - logp_engine).detach().exp().clamp(max=high)


def masked_weight(logp_old: Tensor, logp_engine: Tensor, low: float, high: float) -> Tensor:
    """trainer / engine where that lies in [low, high], else 0: IcePop (arXiv:2510.18855, Ring-1T).

    A token far outside is taken for noise of the two engines (another expert was chosen, say) and doesn't train at all.
    A NaN ratio stays NaN, so that a broken token is seen and not masked away.
    """
    ratio = (logp_old - logp_engine).detach().exp()
    outside = (ratio < low) | (ratio > high)
    return ratio.masked_fill(outside, 0.0)
