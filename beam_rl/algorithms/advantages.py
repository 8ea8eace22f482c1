"""Group-relative advantages: how much better a response did than the others to the same prompt. Plain torch."""

import torch
from torch import Tensor

EPS = 1e-6  # keeps the quotient finite; rewards differ by far more than this where they differ at all


def grpo(rewards: Tensor) -> Tensor:
    """(r − mean) / (std + 1e-6) within each group (GRPO, arXiv:2402.03300).

    The std is the sample's, divided by samples − 1, as torch.std computes it and TRL and verl use it. A group whose
    rewards are all equal says nothing about its samples and gets exactly 0.

    Args:
        rewards: (groups, samples), at least 2 samples.
    Returns:
        (groups, samples) FP64.
    Raises:
        ValueError: fewer than 2 samples in a group, or a reward that is not finite.
    """
    centred = dr_grpo(rewards)
    return centred / (centred.square().sum(-1, keepdim=True) / (rewards.shape[-1] - 1)).sqrt().add(EPS)


def dr_grpo(rewards: Tensor) -> Tensor:
    """r − mean within each group, without the std that favours very easy and very hard prompts (Dr. GRPO,
    arXiv:2503.20783). Shapes, errors and equal rewards as in `grpo`."""
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)}: a group needs at least 2 samples for a relative advantage "
            "(rollout.samples_per_prompt)"
        )
    if not rewards.isfinite().all():
        group, sample = (~rewards.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"the reward of sample {sample} of group {group} is {rewards[group, sample].item()}")
    r = rewards.double()
    # The mean of equal numbers can be off in its last bit; such a group would train on rounding.
    equal = r.amax(-1, keepdim=True) == r.amin(-1, keepdim=True)
    return torch.where(equal, 0.0, r - r.mean(-1, keepdim=True))
