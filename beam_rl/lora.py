"""What a LoRA adapter consists of: modules, ranks, scales and tensor names.

Trainer, sync, engine and export all ask here, so that they mean the same adapter. Pure functions of the recipe's
`model.lora` and a checkpoint's config.json; knows nothing about tensors' values, Megatron, vLLM or files. Another model
than Beam has an adapter where its projections have the same names; what it lacks is no target.

An adapter module is W + alpha/rank · B·A with A (rank, in) and B (out, rank). The projections that Megatron holds as one
matrix share one A: q, k, v and the output gate; a dense MLP's gate and up; an expert's gate and up.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beam_rl.model_config import experts_of, is_beam, layer_kinds, named_as_beams

ATTENTION_INPUTS = tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "gate"))
ATTENTION_OUTPUT = ("self_attn.o_proj",)
DENSE_INPUTS = ("mlp.gate_proj", "mlp.up_proj")
DENSE_OUTPUT = ("mlp.down_proj",)
EXPERTS = tuple(f"mlp.experts.{part}_proj" for part in ("gate", "up", "down"))
TOGETHER = (  # targets that come all or none, and why
    (ATTENTION_INPUTS, "the trainer holds them as one matrix"),
    (DENSE_INPUTS, "the trainer holds them as one matrix"),
    (EXPERTS, "vLLM loads an expert's three projections together"),
)
EXPERT = re.compile(r"\.experts\.(\d+)\.")
ALL_TARGETS = (*ATTENTION_INPUTS, *ATTENTION_OUTPUT, *DENSE_INPUTS, *DENSE_OUTPUT, *EXPERTS)


@dataclass(frozen=True)
class Adapter:
    """The ranks and scales of a run's adapter. `targets` are of `ALL_TARGETS`."""

    rank: int
    alpha: float
    expert_rank: int
    expert_alpha: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class AdapterModule:
    """One adapted matrix of the checkpoint. `name` is its HF name without `.weight`; W is (outputs, inputs)."""

    name: str
    rank: int
    alpha: float
    outputs: int
    inputs: int
    shares_a_with: str | None = None  # the module whose A this one repeats

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def a(self) -> str:
        return f"{self.name}.lora_A.weight"

    @property
    def b(self) -> str:
        return f"{self.name}.lora_B.weight"

    @property
    def shared_a(self) -> str:
        """The tensor that this module's A is, or repeats."""
        return f"{self.shares_a_with}.lora_A.weight" if self.shares_a_with else self.a


def targets_in(config: Mapping[str, Any], targets: Sequence[str]) -> tuple[str, ...]:
    """Those of the targets that the model has: others than Beam have no output gate, and maybe no experts or dense MLPs."""
    if is_beam(config):
        return tuple(targets)
    kinds, absent = layer_kinds(config), {ATTENTION_INPUTS[-1]}
    absent |= set() if "sparse" in kinds else {*EXPERTS}
    absent |= set() if "dense" in kinds else {*DENSE_INPUTS, *DENSE_OUTPUT}
    return tuple(target for target in targets if target not in absent)


def adapter_of(lora: Any, top_k: int) -> Adapter:
    """The adapter that a recipe's `model.lora` (`recipe.tree.Lora`) asks for on a model with `top_k` experts a token.

    With `normalize_moe_lora` an expert's rank is rank / top_k: a token meets top_k experts, so its experts have together
    the rank of a dense module. The expert's scale alpha / rank stays that of a dense module unless the recipe names
    `expert_alpha`. (Megatron-Bridge keeps alpha and so multiplies the experts' scale by top_k.)

    Raises ValueError, naming the recipe's key, when the rank does not divide.
    """
    if not lora.normalize_moe_lora:
        expert_rank = lora.rank
    elif lora.rank % top_k:
        near = [r for r in (lora.rank // top_k * top_k, (lora.rank // top_k + 1) * top_k) if r]
        raise ValueError(
            f"model.lora.rank = {lora.rank}: with model.lora.normalize_moe_lora an expert's rank is rank / top-k, and the "
            f"model's top-k is {top_k}; use a multiple of it, such as {' or '.join(map(str, near))}"
        )
    else:
        expert_rank = lora.rank // top_k
    same_scale = lora.alpha * expert_rank / lora.rank
    expert_alpha = same_scale if lora.expert_alpha is None else lora.expert_alpha
    return Adapter(lora.rank, lora.alpha, expert_rank, expert_alpha, tuple(lora.targets))


def adapter_modules(adapter: Adapter, config: Mapping[str, Any]) -> Iterator[AdapterModule]:
    """Every adapted matrix of the model, layer by layer; `config` is the checkpoint's config.json."""
    config = named_as_beams(config)
    for layer, kind in enumerate(config["mlp_layer_types"]):
        yield from _attention(adapter, config, f"model.layers.{layer}.")
        if kind == "dense":
            yield from _dense(adapter, config, f"model.layers.{layer}.")
        else:
            yield from _experts(adapter, config, f"model.layers.{layer}.")


def adapter_tensors(adapter: Adapter, config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Name and shape of every tensor of the adapter in HF form, repeated A's included."""
    modules = list(adapter_modules(adapter, config))
    shapes = {m.a: (m.rank, m.inputs) for m in modules} | {m.b: (m.outputs, m.rank) for m in modules}
    return {name: shapes[name] for m in modules for name in (m.a, m.b)}


def repeated_tensors(adapter: Adapter, config: Mapping[str, Any]) -> dict[str, str]:
    """Tensors that equal another one, and which: a sync sends the other alone."""
    return {m.a: m.shared_a for m in adapter_modules(adapter, config) if m.shares_a_with is not None}


def stack_of(name: str) -> str:
    """The name under which a tensor travels to the engines; `*` stands for all experts of the layer."""
    return EXPERT.sub(".experts.*.", name)


def sync_shapes(adapter: Adapter, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What a sync sends: A (rank, inputs) and B (outputs, rank), of experts (experts, …, …); repeated tensors once."""
    repeated, shapes = repeated_tensors(adapter, config), adapter_tensors(adapter, config)
    each = {name: shape for name, shape in shapes.items() if name not in repeated}
    return {stack_of(n): (experts_of(config), *shape) if EXPERT.search(n) else shape for n, shape in each.items()}


def repeated_stacks(adapter: Adapter, config: Mapping[str, Any]) -> dict[str, str]:
    """What a sync leaves out, and what it equals."""
    return {stack_of(name): stack_of(same) for name, same in repeated_tensors(adapter, config).items()}


def _attention(adapter: Adapter, config: Mapping[str, Any], layer: str) -> Iterator[AdapterModule]:
    hidden, head = config["hidden_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    if ATTENTION_INPUTS[0] in adapter.targets:
        for target, outputs in zip(ATTENTION_INPUTS, (wide, narrow, narrow, wide), strict=True):
            if target not in adapter.targets:
                continue
            shared = None if target == ATTENTION_INPUTS[0] else layer + ATTENTION_INPUTS[0]
            yield AdapterModule(layer + target, adapter.rank, adapter.alpha, outputs, hidden, shared)
    if ATTENTION_OUTPUT[0] in adapter.targets:
        yield AdapterModule(layer + ATTENTION_OUTPUT[0], adapter.rank, adapter.alpha, hidden, wide)


def _dense(adapter: Adapter, config: Mapping[str, Any], layer: str) -> Iterator[AdapterModule]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if DENSE_INPUTS[0] in adapter.targets:
        gate, up = (layer + target for target in DENSE_INPUTS)
        yield AdapterModule(gate, adapter.rank, adapter.alpha, inner, hidden)
        yield AdapterModule(up, adapter.rank, adapter.alpha, inner, hidden, gate)
    if DENSE_OUTPUT[0] in adapter.targets:
        yield AdapterModule(layer + DENSE_OUTPUT[0], adapter.rank, adapter.alpha, hidden, inner)


def _experts(adapter: Adapter, config: Mapping[str, Any], layer: str) -> Iterator[AdapterModule]:
    if EXPERTS[0] not in adapter.targets:
        return
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    rank, alpha = adapter.expert_rank, adapter.expert_alpha
    for expert in range(config["num_experts"]):
        gate, up, down = (f"{layer}mlp.experts.{expert}.{part}_proj" for part in ("gate", "up", "down"))
        yield AdapterModule(gate, rank, alpha, inner, hidden)
        yield AdapterModule(up, rank, alpha, inner, hidden, gate)
        yield AdapterModule(down, rank, alpha, hidden, inner)
