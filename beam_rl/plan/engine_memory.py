"""Bytes of one worker of a vLLM engine: its part of the weights, adapter slots, what a step needs, the KV cache.

Pure formulas of config.json and an engine's settings; how vLLM splits what over its workers is said here. Knows nothing
about trainers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from beam_rl.checkpoint_shapes import checkpoint_shapes, is_fp32
from beam_rl.lora import Adapter, AdapterModule, adapter_modules
from beam_rl.mxfp8.scheme import Scheme
from beam_rl.plan.memory import Bytes
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
    kv_window: int  # of one request, in the sliding layers, once it has outgrown their window

    def kv_of(self, tokens: int, window: int) -> int:
        """Bytes of a request of so many tokens."""
        return tokens * self.kv_token + round(min(1.0, tokens / window) * self.kv_window)


def engine_shape(
    config: Mapping[str, Any],
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
        config: the model's config.json. value_bytes: of a weight that is not MXFP8, and of an activation.
        scheme: the weights that are MXFP8. kv_value_bytes: of a value in the KV cache; None: as an activation.
    """
    kv_heads = -(-config["num_key_value_heads"] // parallel.tp)  # a head is copied where there are more workers
    kv_layer = 2 * kv_heads * config["head_dim"] * (kv_value_bytes or value_bytes)
    full, sliding = (sum(kind == k for k in config["layer_types"]) for kind in ("full_attention", "sliding_attention"))
    return EngineShape(
        weights=round(_weights(config, parallel, value_bytes, scheme)),
        adapters=round(_slots(config, parallel, value_bytes, adapter)) if adapter else 0,
        step=_step(config, parallel, value_bytes, max_num_seqs, max_batched_tokens),
        kv_token=-(-full // parallel.pp) * kv_layer,
        kv_window=-(-sliding // parallel.pp) * kv_layer * config["sliding_window"],
    )


def on_gpu(shape: EngineShape, hbm_bytes: int, utilization: float) -> Bytes:
    """While it samples: vLLM gives to the KV cache what `gpu_memory_utilization` leaves; negative where nothing is left."""
    room = int(hbm_bytes * utilization) - shape.weights - shape.adapters - shape.step - GRAPHS_BYTES
    return Bytes(weights=shape.weights, adapters=shape.adapters, kv_cache=room, buffers=shape.step + GRAPHS_BYTES)


def in_another_form(shape: EngineShape, config: Mapping[str, Any], value_bytes: int, folder: Path) -> EngineShape:
    """The same worker with the weights of that checkpoint, whose files say how much smaller they are."""
    whole = sum((4 if is_fp32(name) else value_bytes) * math.prod(s) for name, s in checkpoint_shapes(config).items())
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return replace(shape, weights=round(shape.weights * stored / whole))


def _weights(config: Mapping[str, Any], parallel: EngineParallel, value_bytes: int, scheme: Scheme | None) -> float:
    """Of the fullest pipeline stage, supposing that layers are dealt out evenly; the last one has the head."""
    layers, ends = [0.0] * config["num_hidden_layers"], [0.0, 0.0]
    for name, shape in checkpoint_shapes(config).items():
        element = 4 if is_fp32(name) else MXFP8_ELEMENT if scheme and scheme.has(name) else value_bytes
        nbytes = element * math.prod(shape) / _share(name, config, parallel)
        if name.startswith("model.layers."):
            layers[int(name.split(".")[2])] += nbytes
        else:
            ends[name != "model.embed_tokens.weight"] += nbytes
    size = -(-len(layers) // parallel.pp)
    stages = [sum(layers[i : i + size]) for i in range(0, len(layers), size)]
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
    """The experts' three buffers (each token top-k times), copies of the residual stream, the sampler's FP32 logits."""
    hidden, top_k = config["hidden_size"], config["num_experts_per_tok"]
    width = config["moe_intermediate_size"] / (1 if parallel.ep > 1 else parallel.tp * parallel.dp)
    experts = tokens * top_k * value_bytes * (hidden + 3 * width)
    stream = 8 * tokens * hidden * value_bytes
    logits = 3 * 4 * seqs * config["vocab_size"]
    return round(experts + stream + logits)
