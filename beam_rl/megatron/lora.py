"""LoRA on a model in Megatron: the adapters on a rank's modules, and the whole adapter by its HF names, in both directions.

Which modules, ranks and scales is `beam_rl.lora`'s to say. A new adapter's A depends on the recipe's seed and the
module's HF name alone, so every layout starts from the same one. Knows nothing about optimizers, files or checkpoints.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from beam_rl.lora import (
    ATTENTION_INPUTS,
    ATTENTION_OUTPUT,
    DENSE_INPUTS,
    DENSE_OUTPUT,
    EXPERTS,
    Adapter,
    AdapterModule,
    adapter_modules,
)
from beam_rl.megatron.bridge import merge_qkvg, split_qkvg
from beam_rl.megatron.lora_layers import AdaptedLinear, adapted

PLACES = (  # Megatron's module in a layer, its linear layer, the targets that this holds
    ("self_attention", "linear_qkv", ATTENTION_INPUTS),
    ("self_attention", "linear_proj", ATTENTION_OUTPUT),
    ("mlp", "linear_fc1", DENSE_INPUTS),
    ("mlp", "linear_fc2", DENSE_OUTPUT),
    ("mlp.experts", "linear_fc1", EXPERTS[:2]),
    ("mlp.experts", "linear_fc2", EXPERTS[2:]),
)


@dataclass(frozen=True, eq=False)
class Piece:
    """What is gathered at one time: one of Megatron's matrices, or those of a layer's experts that one rank computes.

    Every rank lists the same pieces in the same order; which of them it holds, or a part of, is another matter.
    """

    layer: int
    owner: str  # Megatron's module, by its path in the layer
    linear: str  # its linear layer
    experts: range | None  # None: not of an expert
    matrices: tuple[tuple[AdapterModule, ...], ...]  # the HF modules in each of Megatron's matrices

    @property
    def column_parallel(self) -> bool:
        return self.linear in ("linear_qkv", "linear_fc1")

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that have a part of each of its matrices."""
        if self.experts is None:
            return parallel_state.get_tensor_model_parallel_group()
        return parallel_state.get_expert_tensor_parallel_group()

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Its tensors in HF form, in the order in which they leave the trainer; a shared A once."""
        found: dict[str, tuple[int, int]] = {}
        for first, *rest in self.matrices:
            found[first.a] = (first.rank, first.inputs)
            found |= {module.b: (module.outputs, module.rank) for module in (first, *rest)}
        return found


class AdaptedModel:
    """The adapters on a rank's chunks of the model."""

    def __init__(self, chunks: Sequence[Any], adapter: Adapter, hf: Mapping[str, Any]) -> None:
        """Adds adapters that add nothing, and freezes everything else. Every rank calls it.

        Args:
            hf: the checkpoint's config.json, with Beam's names (`model_config.named_as_beams`).
        """
        self.config, self.hf = chunks[0].config, hf
        self.pieces = list(_pieces(adapter, hf))
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.pre_process:
                # Recomputation and pipelines follow a gradient back to their input, below which nothing is trained.
                chunk.embedding.register_forward_hook(lambda module, args, out: out.detach().requires_grad_())
        layers = {layer.layer_number - 1: layer for chunk in chunks for layer in chunk.decoder.layers}
        own = _experts_of(hf, parallel_state.get_expert_model_parallel_rank())
        self.here: dict[Piece, list[AdaptedLinear]] = {
            piece: list(_add(layers[piece.layer], piece))
            for piece in self.pieces
            if piece.layer in layers and piece.experts in (None, own)
        }
        for chunk in chunks:
            chunk.to(self.config.device)
        self._sources = self._first_holders()

    def switch(self, on: bool) -> None:
        """Off: the model computes what it does without an adapter."""
        for linears in self.here.values():
            for linear in linears:
                (linear.enable_adapter_layers if on else linear.disable_adapter_layers)()

    def start_new(self, seed: int) -> None:
        """B zero: the adapter adds nothing. A normal with variance 1 / inputs: A·x is about as large as x."""
        for piece in self.here:
            found = {name: torch.zeros(shape) for name, shape in piece.shapes.items()}
            for first, *_ in piece.matrices:
                digest = hashlib.sha256(f"{seed} {first.name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
                found[first.a].normal_(std=first.inputs**-0.5, generator=generator)
            self._put(piece, found)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the values of a whole adapter, by the names of `beam_rl.lora.adapter_tensors`."""
        for piece in self.here:
            self._put(piece, tensors)

    @torch.no_grad()
    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the adapter but repeated ones, whole, on every rank; all ranks call it. One piece exists whole
        at one time."""
        for piece in self.pieces:
            found = self._whole(piece) if piece in self.here else None
            if dist.get_world_size() > 1:
                found = self._broadcast(piece, found)
            assert found is not None
            yield from found.items()

    # --- parts and wholes ---

    def _parts(self, piece: Piece) -> tuple[list[Tensor], list[Tensor]]:
        """The rank's part of A and B of each matrix: views of the parameters."""
        linears = [linear.adapter for linear in self.here[piece]]
        a, b = ([getattr(adapter, name).weight.detach() for adapter in linears] for name in ("linear_in", "linear_out"))
        if a[0].ndim == 3:  # experts that Transformer Engine computes together
            return list(a[0]), list(b[0])
        return a, b

    @torch.no_grad()
    def _put(self, piece: Piece, tensors: Mapping[str, Tensor]) -> None:
        size, rank = piece.group.size(), piece.group.rank()
        for modules, a, b in zip(piece.matrices, *self._parts(piece), strict=True):
            a.copy_(tensors[modules[0].a].chunk(size, 0 if piece.column_parallel else 1)[rank])
            outputs = [tensors[module.b] for module in modules]
            if piece.linear == "linear_qkv":
                outputs = [
                    merge_qkvg(dict(zip(_parts_of(modules), outputs, strict=True)), self.hf["num_key_value_heads"])
                ]
            b.copy_(torch.cat([part.chunk(size)[rank] for part in outputs]))

    def _whole(self, piece: Piece) -> dict[str, Tensor]:
        """The piece in HF form, from the ranks that share its matrices; they call it together."""
        a_parts, b_parts = (self._gather(torch.stack(parts), piece.group) for parts in self._parts(piece))
        whole_a = torch.cat(a_parts, 1 if piece.column_parallel else 2)
        found: dict[str, Tensor] = {}
        for i, modules in enumerate(piece.matrices):
            found[modules[0].a] = whole_a[i]
            here = [part[i] for part in b_parts]
            if piece.linear == "linear_qkv":
                heads, groups, dim = (self.hf[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
                outputs = list(split_qkvg(torch.cat(here), heads, groups, dim, _parts_of(modules)).values())
            else:
                each = [part.chunk(len(modules)) for part in here]  # a rank's gate rows, then its up rows
                outputs = [torch.cat(parts) for parts in zip(*each, strict=True)]
            found |= {module.b: out for module, out in zip(modules, outputs, strict=True)}
        return found

    @staticmethod
    def _gather(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        if group.size() == 1:
            return [part]
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return parts

    def _broadcast(self, piece: Piece, found: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The piece on every rank, from the first one that holds it."""
        sizes = [math.prod(shape) for shape in piece.shapes.values()]
        if found is None:
            flat = torch.empty(sum(sizes), dtype=self.config.params_dtype, device=self.config.device)
        else:
            flat = torch.cat([found[name].reshape(-1) for name in piece.shapes])
        dist.broadcast(flat, self._sources[piece])
        parts = zip(piece.shapes.items(), flat.split(sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    def _first_holders(self) -> dict[Piece, int]:
        if dist.get_world_size() == 1:
            return dict.fromkeys(self.pieces, 0)
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, [i for i, piece in enumerate(self.pieces) if piece in self.here])
        return {piece: next(r for r, numbers in enumerate(held) if i in numbers) for i, piece in enumerate(self.pieces)}


def _parts_of(modules: Sequence[AdapterModule]) -> list[str]:
    """q, k, v and gate, or those of them that the model has."""
    return [module.name.rpartition(".")[2].removesuffix("_proj") for module in modules]


def _experts_of(hf: Mapping[str, Any], expert_rank: int) -> range:
    """The experts of an expert-parallel rank, in each layer."""
    count = hf["num_experts"] // parallel_state.get_expert_model_parallel_world_size()
    return range(expert_rank * count, (expert_rank + 1) * count)


def _pieces(adapter: Adapter, hf: Mapping[str, Any]) -> Iterator[Piece]:
    modules = {module.name: module for module in adapter_modules(adapter, hf)}
    for layer, kind in enumerate(hf["mlp_layer_types"]):
        for owner, linear, targets in PLACES:
            if targets[0] not in adapter.targets or owner == ("mlp" if kind == "sparse" else "mlp.experts"):
                continue
            if owner != "mlp.experts":
                names = [f"model.layers.{layer}.{target}" for target in targets if target in adapter.targets]
                yield Piece(layer, owner, linear, None, (tuple(modules[name] for name in names),))
                continue
            parts = [target.rpartition(".")[2] for target in targets]
            for rank in range(parallel_state.get_expert_model_parallel_world_size()):
                experts = _experts_of(hf, rank)
                each = [[f"model.layers.{layer}.mlp.experts.{e}.{part}" for part in parts] for e in experts]
                yield Piece(layer, owner, linear, experts, tuple(tuple(modules[n] for n in names) for names in each))


def _add(layer: nn.Module, piece: Piece) -> Iterator[AdaptedLinear]:
    """Puts adapters on the piece's matrices of this rank: on each expert's, or on all at once where they are one."""
    owner = attrgetter(piece.owner)(layer)
    owners: Iterable[tuple[str, Any]] = [(piece.owner, owner)]
    if piece.experts is not None and hasattr(owner, "local_experts"):
        owners = [(f"{piece.owner}.local_experts.{i}", expert) for i, expert in enumerate(owner.local_experts)]
    module = piece.matrices[0][0]
    for path, holder in owners:
        linear = adapted(getattr(holder, piece.linear), f"{path}.{piece.linear}", module.rank, module.alpha)
        setattr(holder, piece.linear, linear)
        yield linear
