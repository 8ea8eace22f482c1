"""The adapter in one of vLLM's workers: received in pieces, checked as a whole, swapped in, and read back.

Promises that a refused adapter changes nothing: everything is checked before the running adapter is touched. Knows
nothing about transports, requests or versions; tensors have the checkpoint's names (`beam_rl.lora`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from beam_rl.checksum import checksum, tensor_digest
from beam_rl.lora import Adapter, AdapterModule, adapter_modules, adapter_tensors, repeated_tensors
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
        self.repeated = repeated_tensors(adapter, config)
        self.shapes = {n: s for n, s in adapter_tensors(adapter, config).items() if n not in self.repeated}
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.problem: str | None = None

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies some tensors; remembers what is wrong with the first wrong one."""
        for name, tensor in tensors:
            self.problem = self.problem or self._problem(name, tensor)
            if self.problem is None:
                self.tensors[name] = tensor.to(self.dtype, copy=True)

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
    """The worker's one adapter slot."""

    def __init__(self, adapter: Adapter, config: Mapping[str, Any], runner: Any) -> None:
        """config: the checkpoint's config.json. runner: vLLM's model runner."""
        self.adapter, self.config, self.runner = adapter, config, runner
        self.modules = list(adapter_modules(adapter, config))
        self.slots = compat.adapter_slots(runner)
        self.id = 0  # vLLM's id of the adapter held; 0: none yet
        check_slots(self.modules, self.slots)

    def stage(self) -> Stage:
        return Stage(self.adapter, self.config, compat.adapter_dtype(self.runner))

    def swap(self, staged: Stage, new_id: int) -> None:
        """Puts the staged adapter in the place of the one held.

        Raises ValueError, having changed nothing, for a staged adapter that is not whole or wrong; RuntimeError when vLLM
        bound it to other modules than it has: then the slot holds neither adapter.
        """
        tensors = staged.complete()
        parts = [(adapter_place(m.name)[0], m, tensors[m.a], tensors[m.b]) for m in self.modules]
        wanted = {module for module, *_ in parts}
        bound = compat.swap_adapter(self.runner, self.id, new_id, [(m, a, b) for _, m, a, b in parts])
        self.id = new_id
        if bound != wanted:
            raise RuntimeError(f"vLLM bound the adapter to {len(bound)} modules of {len(wanted)}")

    def checksum(self) -> str:
        """`beam_rl.checksum.checksum` of what the slot holds."""
        digests: dict[str, str] = {}
        for module in self.modules:
            a, b = self.held(module)
            digests |= {module.a: tensor_digest(a), module.b: tensor_digest(b)}
        return checksum(digests)

    def held(self, module: AdapterModule) -> tuple[Tensor, Tensor]:
        """A and the scaled B that the slot holds for one of the checkpoint's matrices, as views."""
        name, part, expert = adapter_place(module.name)
        a, b = self.slots[name][part]
        slot = compat.slot_of_adapter(self.runner, self.id)
        return a[slot, expert or 0], b[slot, expert or 0]


def check_slots(modules: list[AdapterModule], slots: dict[str, list[tuple[Tensor, Tensor]]]) -> None:
    """Raises RuntimeError unless there is a slot of exactly the right shape for each module, and no other slot."""
    wanted = {adapter_place(m.name)[0] for m in modules}
    if wanted != slots.keys():
        odd = sorted(wanted ^ slots.keys())
        raise RuntimeError(
            f"vLLM has {len(slots)} adapted modules instead of {len(wanted)}; the first other is {odd[0]}"
        )
    for module in modules:
        name, part, _ = adapter_place(module.name)
        a, b = slots[name][part]
        shapes = (tuple(a.shape[2:]), tuple(b.shape[2:]))
        if shapes != ((module.rank, module.inputs), (module.outputs, module.rank)):
            raise RuntimeError(f"vLLM's adapter slot of {module.name} is {shapes}, its rank should be {module.rank}")
