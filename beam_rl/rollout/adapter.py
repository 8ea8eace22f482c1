"""The adapter in one of vLLM's workers: received in pieces, checked as a whole, swapped in, and read back.

Promises that a refused adapter changes nothing: everything is checked before the running adapter is touched. Knows
nothing about transports, requests or versions; tensors have the names of `beam_rl.lora.sync_shapes`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from beam_rl.adapter_stacks import tensor_in
from beam_rl.checksum import tensor_digest
from beam_rl.lora import Adapter, AdapterModule, adapter_modules, repeated_stacks, stack_of, sync_shapes
from beam_rl.model_config import named_as_beams
from beam_rl.rollout import compat
from beam_rl.rollout.names import adapter_place

ADAPTER = "beam_rl_adapter"  # key of vLLM's additional_config


def to_plain(adapter: Adapter) -> dict[str, Any]:
    """The adapter as plain values, for vLLM's configuration."""
    return asdict(adapter) | {"targets": list(adapter.targets)}


def of_config(vllm_config: Any) -> Adapter | None:
    """The adapter that this vLLM was started for, if any."""
    plain = vllm_config.additional_config.get(ADAPTER) if vllm_config.additional_config else None
    return None if plain is None else Adapter(**plain | {"targets": tuple(plain["targets"])})


def slot_rank(vllm_config: Any, is_experts: bool) -> int | None:
    """The rank of the slots of a layer: experts have their own. None where vLLM runs without this project's adapter."""
    adapter = of_config(vllm_config)
    if adapter is None:
        return None
    return adapter.expert_rank if is_experts else adapter.rank


class Stage:
    """The tensors of one update, in the engine's dtype. Only what belongs to the adapter is kept."""

    def __init__(self, adapter: Adapter, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.repeated = repeated_stacks(adapter, config)
        self.shapes = sync_shapes(adapter, config)
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.problem: str | None = None

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps some tensors; remembers what is wrong with the first wrong one."""
        for name, tensor in tensors:
            self.problem = self.problem or self._problem(name, tensor)
            if self.problem is None:
                self.tensors[name] = tensor.to(self.dtype)

    def complete(self) -> dict[str, Tensor]:
        """All of the adapter, repeated tensors filled in. Raises ValueError, in one line, if it is not whole or wrong."""
        if self.problem is not None:
            raise ValueError(self.problem)
        missing = sorted(self.shapes.keys() - self.tensors.keys())
        if missing:
            raise ValueError(f"adapter sync left out {len(missing)} tensors, the first is {missing[0]}")
        return self.tensors | {name: self.tensors[of] for name, of in self.repeated.items()}

    def _problem(self, name: str, tensor: Tensor) -> str | None:
        if name not in self.shapes:
            return f"adapter sync: {name} is not a tensor that this adapter consists of"
        if tuple(tensor.shape) != self.shapes[name]:
            return f"adapter sync: {name} has shape {tuple(tensor.shape)}, the engine's has {self.shapes[name]}"
        if name in self.tensors:
            return f"adapter sync: {name} came twice"
        if not tensor.isfinite().all():
            return f"adapter sync: {name} holds a NaN or an infinity"
        return None


class HeldAdapter:
    """The worker's one adapter slot: of its pipeline stage's modules, and of each what its tensor rank has."""

    def __init__(self, adapter: Adapter, config: Mapping[str, Any], runner: Any) -> None:
        """config: the checkpoint's config.json. runner: vLLM's model runner."""
        self.adapter, self.config, self.runner = adapter, named_as_beams(config), runner
        own = tuple(f"model.layers.{layer}." for layer in compat.own_layers(runner))
        self.modules = [m for m in adapter_modules(adapter, config) if m.name.startswith(own)]
        self.slots = compat.adapter_slots(runner)
        merged = any(name.endswith(".qkv_gate_proj") for name in self.slots)
        self.places = [adapter_place(m.name, merged) for m in self.modules]
        self.id = 0  # vLLM's id of the adapter held; 0: none yet
        self._check_slots()

    def stage(self) -> Stage:
        return Stage(self.adapter, self.config, compat.adapter_dtype(self.runner))

    def swap(self, tensors: Mapping[str, Tensor], new_id: int) -> None:
        """Puts a complete adapter, by the names of `adapter_stacks`, in the place of the one held.

        Raises RuntimeError when vLLM bound it to other modules than it has: then the slot holds neither adapter.
        """
        parts = [(m, tensor_in(tensors, m.a), tensor_in(tensors, m.b)) for m in self.modules]
        bound = compat.swap_adapter(self.runner, self.id, new_id, parts)
        self.id = new_id
        wanted = {module for module, _, _ in self.places}
        if bound != wanted:
            raise RuntimeError(f"vLLM bound the adapter to {len(bound)} modules of {len(wanted)}")

    def digests(self) -> dict[str, str]:
        """`beam_rl.checksum.tensor_digest` of what the slot holds, whole: A, and B with its scale.

        All tensor-parallel neighbours call it.
        """
        slot = compat.slot_of_adapter(self.runner, self.id)
        found: dict[str, str] = {}
        for module, (name, part, expert) in zip(self.modules, self.places, strict=True):
            if expert:
                continue  # in the stack of the layer's first
            for tensor, shape, half in zip(
                self.slots[name][part], self._shapes(module, expert), (module.a, module.b), strict=True
            ):
                whole = compat.whole(tensor[slot], shape)
                found[stack_of(half)] = tensor_digest(whole[0] if expert is None else whole)
        return found

    def _shapes(self, module: AdapterModule, expert: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of A and B of all experts, before tensor parallelism splits them."""
        experts = 1 if expert is None else self.config["num_experts"]
        return (experts, module.rank, module.inputs), (experts, module.outputs, module.rank)

    def _check_slots(self) -> None:
        """Raises RuntimeError unless there is a slot of exactly the right shape for each matrix, and no other module."""
        wanted = {module for module, _, _ in self.places}
        if wanted != self.slots.keys():
            odd = min(wanted ^ self.slots.keys())
            raise RuntimeError(
                f"vLLM adapts {len(self.slots)} modules, not {len(wanted)}; the first that differs is {odd}"
            )
        for m, (name, part, expert) in zip(self.modules, self.places, strict=True):
            for slot, shape in zip(self.slots[name][part], self._shapes(m, expert), strict=True):
                if not is_shard(tuple(slot.shape[1:]), shape):
                    raise RuntimeError(f"vLLM's adapter slot of {m.name} is {tuple(slot.shape)}, no shard of {shape}")


def is_shard(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether tensors of `shape` put together along one dimension, if at all, give `whole`."""
    cut = [(part, size) for part, size in zip(shape, whole, strict=True) if part != size]
    return not cut or (len(cut) == 1 and cut[0][1] % cut[0][0] == 0)
