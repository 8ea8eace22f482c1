"""How an adapter travels to the engines: each of its matrices of one layer's experts as one stack (`lora.sync_shapes`).

The 501B Beam's adapter has 63,000 tensors to send, nearly all of them of experts, a few tens of KB each; so they are 624. To
pack, check, receive and look at one takes as long as to copy a megabyte.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from beam_rl.lora import EXPERT, stack_of
from beam_rl.model_config import experts_of


def stacked(tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """An adapter's tensors by HF name as they come, with stacks in the place of experts' tensors, each when it is whole.

    Holds what has come of a layer's experts. Raises ValueError where an expert is missing at the end.
    """
    coming: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        found = EXPERT.search(name)
        if found is None:
            yield name, tensor
            continue
        stack = coming.setdefault(stack_of(name), {})
        stack[int(found[1])] = tensor
        if len(stack) == experts_of(config):
            whole = torch.stack([stack[expert] for expert in sorted(stack)])
            del coming[stack_of(name)], stack
            yield stack_of(name), whole
            del whole
    for name, stack in coming.items():
        raise ValueError(f"{name}: {len(stack)} experts of {experts_of(config)} are there")


def tensor_in(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor of this HF name among those that have travelled."""
    found = EXPERT.search(name)
    return tensors[name] if found is None else tensors[stack_of(name)][int(found[1])]
