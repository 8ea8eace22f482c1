"""What is added to the verifier's score to make the reward. Plain torch."""

import torch
from torch import Tensor


def overlong_punishment(lengths: Tensor, max_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), times `penalty`.

    0 up to max_tokens − buffer_tokens, then falling linearly to −penalty at max_tokens.

    Args:
        lengths: (samples,) response tokens.
        max_tokens: the limit; a response that was cut off has this many.
        buffer_tokens: over how many tokens before the limit the punishment grows; 0 switches it off.
        penalty: the size of the punishment at the limit, in units of reward.
    Returns:
        (samples,) FP64, each in [−penalty, 0], to be added to the score.
    """
    if not 0 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"algorithm.overlong.buffer_tokens = {buffer_tokens}: must lie between 0 and "
            f"rollout.max_response_tokens = {max_tokens}"
        )
    if buffer_tokens == 0:
        return torch.zeros(lengths.shape, dtype=torch.float64)
    over = (lengths.double() - (max_tokens - buffer_tokens)) / buffer_tokens
    return -penalty * over.clamp(0, 1)
