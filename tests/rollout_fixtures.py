"""A tiny random Beam with nothing at its default, what transformers says about it, and real engines as Ray actors.

The engines start once a session, all at the same time: importing vLLM is most of it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BeamConfig, BeamForCausalLM

from beam_rl.rollout.engine import Engine, EngineInfo, EngineStartError
from beam_rl.rollout.launch import EngineSettings
from beam_rl.samples import Completion, Request
from beam_rl.tiny.checkpoint import tiny_tokenizer

VOCABULARY, EOS = 64, 2
KV_CACHE_GIB = 0.002  # room for some 30 short requests


def tiny_config(**changes: object) -> BeamConfig:
    """710,940 parameters: 7 layers, the first 3 dense, layer 5 and the last with full attention."""
    values: dict = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=7,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        sliding_window=8,
        moe_intermediate_size=32,
        num_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        final_logit_softcapping=30.0,
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 4,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return BeamConfig(**(values | changes))


def randomize(model: BeamForCausalLM, seed: int) -> None:
    """Gives every parameter and buffer that is constant at birth a random value."""
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    with torch.no_grad():
        for name, p in model.named_parameters():
            if "gate_bias" in name:
                p.copy_(noise(p, 0.5))
            elif "norm" in name:
                p.add_(noise(p, 0.1))
            else:
                p.copy_(noise(p, 0.2))
        for name, b in model.named_buffers():
            if "e_score_correction_bias" in name:
                b.copy_(noise(b, 0.1))


def make_checkpoint(folder: Path, seed: int, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    """Writes a tiny Beam; the router stays FP32 in any dtype."""
    model = BeamForCausalLM(tiny_config(**config)).float()
    randomize(model, seed)
    model.save_pretrained(folder)
    if dtype != torch.float32:
        BeamForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    return folder


class Reference:
    """Transformers' word on a sequence of tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.folder = folder
        self.model = BeamForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def score(self, prompt: list[int], response: np.ndarray, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """(response,) log-probabilities and (tokens − 1, MoE layers, top_k) expert ids, sorted."""
        ids = torch.tensor([*prompt, *response.tolist()])
        routes: list[Tensor] = []
        moe = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        hooks = [gate.register_forward_hook(lambda _m, _i, out: routes.append(out[2])) for gate in moe]
        logits = self.model(ids[None, :-1]).logits[0]
        for hook in hooks:
            hook.remove()
        logp = (logits.float() / temperature).log_softmax(-1).gather(1, ids[1:, None])[len(prompt) - 1 :, 0]
        return logp.numpy(), torch.stack(routes, 1).sort(-1).values.numpy()


def settings(model: Path, dtype: str, name: str, log_dir: Path, **changes: Any) -> EngineSettings:
    """An engine whose batches and KV cache are small enough for chunked prefill and preemption to happen."""
    values: dict[str, Any] = dict(
        model=str(model),
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=64,
        max_batched_tokens=96,
        kv_cache_gib=KV_CACHE_GIB,
        gpu_memory_utilization=0.5,
        seed=0,
        routing_replay=True,
        host="127.0.0.1",
        log_dir=str(log_dir),
        name=name,
    )
    return EngineSettings(**(values | changes))


@dataclass
class RunningEngine:
    """An engine actor with the checkpoint it started from."""

    actor: Any
    info: EngineInfo
    checkpoint: Path
    tokenizer: str | None = None  # with one it can look for stop strings

    def call(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.actor, method).remote(*args), timeout=60)

    def sample(self, requests: list[Request]) -> dict[str, Completion]:
        stream = self.actor.generate.options(num_returns="streaming").remote(requests)
        return {c.id: c for c in (ray.get(ref, timeout=60) for ref in stream)}


@dataclass
class Engines:
    fp32: RunningEngine
    bf16: RunningEngine
    start_error: Exception  # what the BF16 engine raised while its checkpoint lacked a tensor


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`old` and `new` differ in every tensor; `bf16` is `old` rounded."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "old": make_checkpoint(root / "old", seed=0),
        "new": make_checkpoint(root / "new", seed=1),
        "bf16": make_checkpoint(root / "bf16", seed=0, dtype=torch.bfloat16),
    }


@pytest.fixture(scope="session")
def engines(ray_here: str, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Engines:
    logs = tmp_path_factory.mktemp("logs")
    old, bf16 = checkpoints["old"], checkpoints["bf16"]
    file, whole = bf16 / "model.safetensors", load_file(bf16 / "model.safetensors")
    short = {k: v for k, v in whole.items() if k != "model.layers.1.self_attn.q_norm.weight"}
    save_file(short, file, metadata={"format": "pt"})
    tokenizer = str(logs / "tokenizer")
    tiny_tokenizer().save_pretrained(tokenizer)
    first = ray.remote(Engine).remote(settings(old, "fp32", "fp32", logs, tokenizer=tokenizer))
    second = ray.remote(Engine).remote(settings(bf16, "bf16", "bf16", logs))
    starting = first.start.remote()
    with pytest.raises(EngineStartError) as failed:
        ray.get(second.start.remote(), timeout=300)
    save_file(whole, file, metadata={"format": "pt"})
    infos = ray.get([starting, second.start.remote()], timeout=300)
    return Engines(RunningEngine(first, infos[0], old, tokenizer), RunningEngine(second, infos[1], bf16), failed.value)


@pytest.fixture(scope="session")
def references(checkpoints: dict[str, Path]) -> dict[str, Reference]:
    return {name: Reference(checkpoints[name]) for name in ("old", "new", "bf16")}
