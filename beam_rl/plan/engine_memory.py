"""Bytes of one worker of a vLLM engine: its part of the weights, adapter slots, what a step needs, the KV cache.

Pure formulas of config.json and an engine's settings; how vLLM splits what over its workers is said here. Knows nothing
about trainers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from beam_rl.checkpoint_shapes import weight_files
from beam_rl.lora import Adapter, AdapterModule, adapter_modules
from beam_rl.mxfp8.scheme import Scheme
from beam_rl.plan.memory import Bytes
from beam_rl.plan.tensors import Stored
from beam_rl.recipe.tree import EngineParallel

GIB = 2**30
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for
GRAPHS_BYTES = 2 * GIB  # CUDA graphs and the workspaces of kernels, in the order of what vLLM reports for large models
ASLEEP_BYTES = 2 * GIB  # of a sleeping engine: CUDA context, NCCL, graphs
MXFP8_ELEMENT = 33 / 32


@dataclass(frozen=True)
class EngineShape:
    """What hangs on the model and the recipe, not on the GPU."""

    weights: int
    adapters: int
    step: int  # activations of one engine step, the logits, graphs
    kv_token: int  # of one token, in the layers that keep all of them
    kv_window: int  # of one of their window's tokens, in the layers that keep no more
    window: int  # tokens

    def kv_of(self, tokens: int) -> int:
        """Bytes of a request of so many tokens."""
        return tokens * self.kv_token + min(tokens, self.window) * self.kv_window


def engine_shape(
    config: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    parallel: EngineParallel,
    value_bytes: int,
    scheme: Scheme | None,
    adapter: Adapter | None,
    max_num_seqs: int,
    max_batched_tokens: int,
    kv_value_bytes: int | None = None,
) -> EngineShape:
    """The fullest worker's.

    Args:
        config: the model's config.json, with Beam's names. tensors: the checkpoint's.
        value_bytes: of a weight that is not MXFP8, and of an activation.
        scheme: the weights that are MXFP8. kv_value_bytes: of a value in the KV cache; None: as an activation.
    """
    kv_heads = -(-config["num_key_value_heads"] // parallel.tp)  # a head is copied where there are more workers
    kv_layer = 2 * kv_heads * config["head_dim"] * (kv_value_bytes or value_bytes)
    full, sliding = (sum(kind == k for k in config["layer_types"]) for kind in ("full_attention", "sliding_attention"))
    return EngineShape(
        weights=round(_weights(config, tensors, parallel, value_bytes, scheme)),
        adapters=round(_slots(config, parallel, value_bytes, adapter)) if adapter else 0,
        step=_step(config, parallel, value_bytes, max_num_seqs, max_batched_tokens),
        kv_token=-(-full // parallel.pp) * kv_layer,
        kv_window=-(-sliding // parallel.pp) * kv_layer,
        window=config.get("sliding_window") or 0,
    )


def on_gpu(shape: EngineShape, hbm_bytes: int, utilization: float) -> Bytes:
    """While it samples: vLLM gives to the KV cache what `gpu_memory_utilization` leaves; negative where nothing is left."""
    room = int(hbm_bytes * utilization) - shape.weights - shape.adapters - shape.step - GRAPHS_BYTES
    return Bytes(weights=shape.weights, adapters=shape.adapters, kv_cache=room, buffers=shape.step + GRAPHS_BYTES)


def in_another_form(shape: EngineShape, tensors: Mapping[str, Stored], value_bytes: int, folder: Path) -> EngineShape:
    """The same worker with the weights of that checkpoint, whose files say how much smaller they are."""
    whole = sum((4 if stored.fp32 else value_bytes) * stored.count for stored in tensors.values())
    on_disk = sum(file.stat().st_size for file in weight_files(folder))
    return replace(shape, weights=round(shape.weights * on_disk / whole))


def _weights(
    config: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    parallel: EngineParallel,
    value_bytes: int,
    scheme: Scheme | None,
) -> float:
    """Of the fullest pipeline stage, supposing that layers are dealt out evenly; the last one has the head, tied or not."""
    layers, ends = [0.0] * config["num_hidden_layers"], [0.0, 0.0]
    for name, stored in tensors.items():
        element = 4 if stored.fp32 else MXFP8_ELEMENT if scheme and scheme.has(name) else value_bytes
        nbytes = element * stored.count / _share(name, config, parallel)
        if name.startswith("model.layers."):
            layers[int(name.split(".")[2])] += nbytes
        else:
            ends[name != "model.embed_tokens.weight"] += nbytes
    size = -(-len(layers) // parallel.pp)
    stages = [sum(layers[i : i + size]) for i in range(0, len(layers), size)]
    if parallel.pp > 1 and "lm_head.weight" not in tensors:
        ends[1] += ends[0]
    stages[0] += ends[0]
    stages[-1] += ends[1]
    return max(stages)


def _share(name: str, config: Mapping[str, Any], parallel: EngineParallel) -> int:
    """The workers of a stage that a tensor is split over; the others have copies."""
    if ".experts." in name:
        return parallel.tp * parallel.dp  # each expert split, or with ep whole experts spread
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        return min(parallel.tp, config["num_key_value_heads"])
    if "norm" in name or ".mlp.gate." in name:
        return 1
    return parallel.tp


def _slots(config: Mapping[str, Any], parallel: EngineParallel, value_bytes: int, adapter: Adapter) -> float:
    """One slot a module: A (rank, inputs) and B (outputs, rank); where the base is split, that side is split too."""
    return sum(value_bytes * _slot(module, parallel) for module in adapter_modules(adapter, config)) / parallel.pp


def _slot(module: AdapterModule, parallel: EngineParallel) -> float:
    expert = ".experts." in module.name
    room = module.rank if expert else next(rank for rank in LORA_RANKS if rank >= module.rank)
    a, b = room * module.inputs, module.outputs * room
    if expert and parallel.ep > 1:
        return (a + b) / parallel.ep
    ways = parallel.tp * (parallel.dp if expert else 1)
    row_parallel = module.name.endswith(("o_proj", "down_proj"))
    return a / ways + b if row_parallel else a + b / ways


def _step(config: Mapping[str, Any], parallel: EngineParallel, value_bytes: int, seqs: int, tokens: int) -> int:
    """The experts' three buffers (each token top-k times) or an MLP's, copies of the residual stream, the logits."""
    hidden, top_k = config["hidden_size"], config["num_experts_per_tok"]
    width = config["moe_intermediate_size"] / (1 if parallel.ep > 1 else parallel.tp * parallel.dp)
    experts = tokens * top_k * value_bytes * (hidden + 3 * width) if top_k else 3 * tokens * value_bytes * width
    stream = 8 * tokens * hidden * value_bytes
    logits = 3 * 4 * seqs * config["vocab_size"]
    return round(experts + stream + logits)
