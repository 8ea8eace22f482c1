"""A checksum of bytes, worked out while they are copied, chunk by chunk, so that a CPU's caches still hold them.

Catches what goes wrong between two honest machines: any changed word (weights are odd, so a change never cancels), blocks
that were exchanged, shifted, left out or left over from before. No protection against forgery.
"""

import torch
from torch import Tensor

BLOCK_WORDS, WORD_BYTES = 512, 8  # a page
CHUNK_BLOCKS = {"cpu": 512, "cuda": 2**20}  # copied at a time: what a core's cache holds; few large kernels
FIRST, SECOND = 6364136223846793005, 3935559000370003845  # odd; multipliers of Knuth's and L'Ecuyer's generators


def checksum(data: Tensor) -> int:
    """64 bits of `data` (bytes,) uint8, aligned to words; the same on every device.

    The sum of each block's words, times the block's own odd weight, all added modulo 2⁶⁴. A rest of less than a word
    counts as if zeros followed it.
    """
    blocks, words, rest = _parts(data)
    return _fold(blocks.sum(1), words, rest)


def copy_with_checksum(source: Tensor, into: Tensor) -> int:
    """Copies `source` (bytes,) uint8 and returns its checksum; one of the two at least is aligned to words."""
    if source.storage_offset() % WORD_BYTES:  # torch would not look at it as words
        into.copy_(source)
        return checksum(into)
    chunk = CHUNK_BLOCKS[source.device.type]
    size = chunk * BLOCK_WORDS * WORD_BYTES
    if len(source) <= size:
        into.copy_(source)
        return checksum(source)
    blocks, words, rest = _parts(source)
    sums = torch.empty(len(blocks), dtype=torch.int64, device=source.device)
    for first in range(0, len(blocks), chunk):
        torch.sum(blocks[first : first + chunk], 1, out=sums[first : first + chunk])
        begin = first * BLOCK_WORDS * WORD_BYTES
        end = min(begin + size, blocks.nbytes)
        into[begin:end].copy_(source[begin:end])
    into[blocks.nbytes :].copy_(source[blocks.nbytes :])
    return _fold(sums, words, rest)


def _parts(data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The words of whole blocks (blocks, BLOCK_WORDS), those after them, and the bytes after those."""
    words = data[: len(data) // WORD_BYTES * WORD_BYTES].view(torch.int64)
    whole = len(words) // BLOCK_WORDS * BLOCK_WORDS
    return words[:whole].view(-1, BLOCK_WORDS), words[whole:], data[words.nbytes :]


def _fold(sums: Tensor, words: Tensor, rest: Tensor) -> int:
    """Adds up the blocks' sums; the words after them and the rest have the two weights that follow theirs."""
    weights, blocks = _weights(len(sums) + 2, sums.device), len(sums)
    total = (sums * weights[:blocks]).sum()
    if len(words):
        total += words.sum() * weights[blocks]
    if len(rest):
        padded = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=rest.device)
        padded[: len(rest)] = rest
        total += padded.view(torch.int64)[0] * weights[blocks + 1]
    return int(total)


def _weights(count: int, device: torch.device) -> Tensor:
    """(count or more,) odd int64: kept, as working them out takes longer than a small tensor's sum."""
    known = _known_weights.get(device)
    if known is None or len(known) < count:
        places = torch.arange(max(count, 1024), device=device) * FIRST
        known = _known_weights[device] = (places ^ (places >> 32)) * SECOND | 1
    return known


_known_weights: dict[torch.device, Tensor] = {}
