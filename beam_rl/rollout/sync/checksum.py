"""A checksum of a bucket's bytes at the speed of memory, on whatever device they are.

Catches what goes wrong between two honest machines: any changed word (weights are odd, so a change never cancels), blocks
that were exchanged, shifted, left out or left over from before. No protection against forgery.
"""

import torch
from torch import Tensor

BLOCK_WORDS = 512  # a page
FIRST, SECOND = 6364136223846793005, 3935559000370003845  # odd; multipliers of Knuth's and L'Ecuyer's generators


def checksum(data: Tensor) -> int:
    """64 bits of `data` (bytes,) uint8, a whole number of 8-byte words.

    The sum of each block's words, times the block's own odd weight, all added modulo 2⁶⁴.
    """
    words = data.view(torch.int64)
    whole = len(words) // BLOCK_WORDS * BLOCK_WORDS
    sums = torch.cat([words[:whole].view(-1, BLOCK_WORDS).sum(1), words[whole:].sum().view(1)])
    places = torch.arange(len(sums), device=data.device) * FIRST
    return int((sums * ((places ^ (places >> 32)) * SECOND | 1)).sum())
