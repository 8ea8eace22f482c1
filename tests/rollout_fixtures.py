"""A tiny random Beam with nothing at its default, and what transformers says about token sequences.

Knows nothing about vLLM or Ray.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import BeamConfig, BeamForCausalLM

VOCABULARY, EOS = 64, 2


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


def make_checkpoint(folder: Path, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a tiny Beam; the router stays FP32 in any dtype."""
    model = BeamForCausalLM(tiny_config()).float()
    randomize(model, seed)
    model.save_pretrained(folder)
    if dtype != torch.float32:
        BeamForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    return folder


class Reference:
    """Transformers' word on a sequence of tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
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
