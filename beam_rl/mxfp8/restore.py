"""MXFP8 weights as BF16 ones of the same values, for whoever multiplies in BF16. Plain torch."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from beam_rl.mxfp8.format import Quantized, dequantize, rounded
from beam_rl.mxfp8.scheme import SCALE, Scheme


class Restored:
    """Takes a model's tensors in several streams: a weight's scales may come in a later one than its payload."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self._waiting: dict[str, Tensor] = {}  # payloads, by the names of their scales

    def tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream with BF16 in the place of each MXFP8 weight and its scales.

        A weight of the scheme that comes unquantized is rounded here. BF16 has every value of MXFP8 but those below
        2^-133.
        """
        for name, tensor in tensors:
            if name in self._waiting:
                payload = self._waiting.pop(name)
                yield name.removesuffix(SCALE), dequantize(Quantized(payload, tensor), torch.bfloat16)
            elif not self.scheme.has(name):
                yield name, tensor
            elif tensor.dtype == torch.float8_e4m3fn:
                self._waiting[self.scheme.scale_name(name)] = tensor
            else:
                yield name, rounded(tensor.bfloat16())
