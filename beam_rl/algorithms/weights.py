"""How much each response token counts: the reduction of a mini-batch's loss, decided before the batch is split.

The loss of a global mini-batch is Σ weight · token loss over all of its tokens, on whatever rank and in whatever
micro-batch they are. Plain torch.
"""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sample_mean", "constant"]


def sample_weights(lengths: Tensor, aggregation: Aggregation, max_response_tokens: int) -> Tensor:
    """The weight of each response token of each sample of a global mini-batch of n samples.

    token_mean: 1 / Σ lengths, every token alike (DAPO, arXiv:2503.14476, eq. 8).
    sample_mean: 1 / (n · length), every sample alike (GRPO, arXiv:2402.03300).
    constant: 1 / (n · max_response_tokens), no preference for short or long (Dr. GRPO, arXiv:2503.20783).

    Args:
        lengths: (samples,) response tokens of each; 0 for an empty response, which has no token to weigh and gets 0,
            but still counts as one of the n samples.
        max_response_tokens: the recipe's limit; used by `constant` only.
    Returns:
        (samples,) FP64, so that the sum of many small weights is still exact enough.
    """
    counts = lengths.double()
    n = max(len(counts), 1)
    if aggregation == "token_mean":
        weights = torch.ones_like(counts) / counts.sum().clamp(min=1)
    elif aggregation == "sample_mean":
        weights = 1 / (n * counts.clamp(min=1))
    else:
        weights = torch.full_like(counts, 1 / (n * max_response_tokens))
    return torch.where(lengths > 0, weights, 0.0)
