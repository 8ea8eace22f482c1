"""A checksum of a bucket's bytes at the speed of memory, on whatever device they are.

Catches what goes wrong between two honest machines: every changed word (all factors are odd, so a change never
cancels), exchanged or shifted words and pages. No protection against forgery.
"""

import torch
from torch import Tensor

FACTOR = 6364136223846793005  # odd, of Knuth's MMIX generator
ROW_WORDS = {"cpu": 2**17, "cuda": 2**22}  # a row of sums stays in a CPU's cache; a GPU wants few large kernels


def checksum(data: Tensor) -> int:
    """64 bits of `data` (bytes,) uint8, a whole number of 8-byte words.

    The words stand in rows; the rows are the coefficients of a polynomial, column by column, taken at FACTOR (Horner's
    rule); the columns are then added with odd weights. All modulo 2⁶⁴. The row's length depends on the device's kind.
    """
    words = data.view(torch.int64)
    width = min(ROW_WORDS[data.device.type], len(words))
    sums = torch.zeros(width, dtype=torch.int64, device=data.device)
    for row in words.split(max(width, 1)):
        head = sums[: len(row)]
        torch.add(row, head, alpha=FACTOR, out=head)
    return int((sums * (2 * torch.arange(width, device=data.device) + 1)).sum())
