"""A checksum of an adapter that trainer and engine work out apart from each other, each from the tensors it has.

An engine holds A as it is and B multiplied by its scale, both in the model's dtype: the checksum is of those bits, so
equal checksums mean that the engine computes with the trainer's adapter. Plain torch; knows nothing about either side.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from beam_rl.lora import Adapter, adapter_modules, repeated_stacks, stack_of


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bits."""
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{data.dtype} {tuple(data.shape)} ".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def checksum(digests: Mapping[str, str]) -> str:
    """One checksum of all tensors by their names, in whatever order they came."""
    return hashlib.sha256("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode()).hexdigest()


class SentChecksum:
    """The checksum that an engine will have of what passes through `watch`, once all of the adapter has passed."""

    def __init__(self, adapter: Adapter, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        """config: the checkpoint's config.json. dtype: the engine's."""
        self.dtype = dtype
        self.scales = {stack_of(m.b): m.scale for m in adapter_modules(adapter, config)}
        self.repeated = repeated_stacks(adapter, config)
        self.digests: dict[str, str] = {}

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hands on as they are what `adapter_stacks.stacked` gives; B comes without its scale."""
        for name, tensor in tensors:
            held = tensor.detach().to(self.dtype)
            self.digests[name] = tensor_digest(held * self.scales[name] if name in self.scales else held)
            yield name, tensor

    def value(self) -> str:
        """The checksum; KeyError if a tensor that others repeat did not pass."""
        return checksum(self.digests | {name: self.digests[of] for name, of in self.repeated.items()})
