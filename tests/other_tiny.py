"""Tiny random models of other families than Beam, and micro-batches for them. Importing it makes Megatron importable.

A Qwen3-MoE (4 layers, 8 experts, top-2), a Qwen3 (dense, tied embeddings) and others, with the tiny Beam's tokenizer and
task. Weights are large enough for attention and routers to matter, and no norm is 1.
"""

import dataclasses
import functools
from functools import partial
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from beam_rl.layout import PADDING, cut_routes, even_out, pad
from beam_rl.megatron.trainer import Trainer
from beam_rl.recipe.tree import Optimizer, Parallel
from beam_rl.samples import MicroBatch
from beam_rl.tiny.checkpoint import tiny_config, tiny_tokenizer
from beam_rl.tiny.sizes import TINY
from beam_rl.tiny.write import write_data

VOCAB, EXPERTS, TOP_K, LAYERS = 64, 8, 2, 4
LR = 1e-3
_EXPERTS: dict[str, Any] = dict(num_experts_per_tok=TOP_K, moe_intermediate_size=32, norm_topk_prob=True)
_GLM = dict(n_routed_experts=EXPERTS, first_k_dense_replace=1, n_group=1, topk_group=1, use_qk_norm=True)
_LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "moe": (Qwen3MoeConfig, dict(**_EXPERTS, num_experts=EXPERTS, tie_word_embeddings=False)),
    "dense": (Qwen3Config, dict(tie_word_embeddings=True)),
    # Shared experts, sigmoid scores with a correction bias, a dense first layer, RoPE on half of each head.
    "glm": (Glm4MoeConfig, dict(**_EXPERTS, **_GLM)),
    "llama": (LlamaConfig, dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0, **_LLAMA3))),
    "qwen2": (Qwen2Config, {}),  # biases of q, k and v
    "window": (MistralConfig, dict(sliding_window=8)),
}


@functools.cache
def checkpoint(kind: str) -> Path:
    """A HF folder of one of `FAMILIES`, with tokenizer and data; made once for this process and its children."""
    folder = tiny._folder() / f"other-{kind}"
    if not folder.exists():
        write(kind, folder)
    return folder


def write(kind: str, folder: Path) -> None:
    tokens = {name: getattr(tiny_config(), name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    common: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        **tokens,
    )
    torch.manual_seed(0)
    family, own = FAMILIES[kind]
    model: Any = AutoModelForCausalLM.from_config(family(**common, **own))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter is model.get_input_embeddings().weight:  # transformers makes the padding token's 0
                parameter.normal_(std=0.2)
            else:
                parameter.mul_(5.0)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    GenerationConfig(**tokens).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    write_data(folder, TINY)


def trainer(kind: str, **changes: Any) -> Trainer:
    """Of one rank."""
    return Trainer(str(checkpoint(kind)), tiny.settings(**changes), 0, 1, tiny.meeting_point())


def micro_batch(lengths: list[int], seed: int = 0, routes: NDArray[np.integer] | None = None) -> MicroBatch:
    """`megatron_tiny.micro_batch` with these routes, (tokens, layers, top-k)."""
    return dataclasses.replace(tiny.micro_batch(lengths, seed, routes=False), routes=routes)


def random_routes(tokens: int, seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    chosen = [[rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(tokens)]
    return np.array(chosen, np.uint8)


# --- layouts ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    kind: str
    parallel: Parallel
    recompute: str = "none"


def seen_by(layout: Layout, folder: Path, rank: int, master: str) -> dict[str, Any]:
    """What a rank sees of two updates on four micro-batches with random routes (none, of the dense model).

    The second one again from the checkpoint before it, which is left in `folder`.
    """
    p, experts = layout.parallel, EXPERTS if layout.kind == "moe" else 0
    optimizer = Optimizer(lr=LR, weight_decay=0.1, clip_grad=1e9, eps=1e-5, distributed=p.ranks > 1)
    settings = tiny.settings(parallel=p, recompute=layout.recompute, optimizer=optimizer)
    learner = Trainer(str(checkpoint(layout.kind)), settings, rank, p.ranks, master)
    lengths = [[13, 30], [21], [7, 5, 11], [17, 9]]
    batches = [
        micro_batch(each, seed, random_routes(sum(each), seed) if experts else None)
        for seed, each in enumerate(lengths)
    ]
    edge = len(batches) - p.dp + 1
    parts = [batches[:edge], *([batch] for batch in batches[edge:])]
    padded = even_out([[pad(batch, p, experts) for batch in part] for part in parts], p, experts)
    mine = [cut_routes(batch, learner.place) for batch in padded[learner.place.dp]]
    scores = learner.score(mine)
    update = partial(learner.update, mine, tiny.squared_objective, LR)
    metrics = [update()]
    learner.save(folder)
    metrics.append(update())
    weights = weights_of(learner)
    learner.load(folder)
    metrics.append(update())
    found = {
        "logp": [s.logp[b.sample != PADDING] for s, b in zip(scores, mine, strict=bool(scores))],
        "agreement": [(s.routes_agree, s.routes_total) for s in scores],
        "metrics": metrics,
        "weights": weights,
        "resumed": weights_of(learner),
        "place": learner.place,
    }
    if p.ranks > 1:  # else other trainers of this process share the group
        learner.close()
    return found


def weights_of(learner: Trainer) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy().copy() for name, tensor in learner.hf_tensors()}


def run(layout: Layout, folder: Path) -> list[dict[str, Any]]:
    """`seen_by` of all ranks, each in a new process; of one rank in this one."""
    checkpoint(layout.kind)
    if layout.parallel.ranks == 1:
        return [seen_by(layout, folder, 0, tiny.meeting_point())]
    ranks, master = layout.parallel.ranks, tiny.meeting_point()
    return tiny.in_new_processes(seen_by, *[(layout, folder, rank, master) for rank in range(ranks)])
