"""Beam in Megatron computes what transformers computes."""

import megatron_tiny as tiny
import pytest
import torch
from transformers.models.beam import BeamForCausalLM
from transformers.models.beam.modeling_beam import compute_attention_scaling, depth_scaled_residual_add

from beam_rl.megatron.logprobs import scaled_logits
from beam_rl.megatron.packing import pack
from beam_rl.megatron.trainer import Trainer

LENGTHS = [5, 17, 30, 1, 23]


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return tiny.trainer()


@torch.no_grad()
def logits(trainer: Trainer, samples: list[torch.Tensor]) -> torch.Tensor:
    trainer.model.eval()
    cu = torch.tensor([0] + [len(s) for s in samples]).cumsum(0)
    return trainer.model(
        torch.cat(samples)[None],
        None,
        None,
        packed_seq_params=pack(cu),
        output_processor=lambda hidden_states, output_layer, **_: scaled_logits(
            hidden_states.squeeze(1), output_layer.weight, 30.0, 1.0, rounded=False
        ),
    )


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, tiny.VOCAB, (n,), generator=generator) for n in LENGTHS]


@torch.no_grad()
def reference_logits(**kwargs: str) -> torch.Tensor:
    model = tiny.reference_model(**kwargs)
    return torch.cat([model(s[None]).logits[0] for s in samples()])


def test_fp32_logits_of_packed_samples_are_those_of_transformers(trainer: Trainer) -> None:
    expected = reference_logits()
    assert expected.std() > 0.3  # a model whose logits say something
    torch.testing.assert_close(logits(trainer, samples()), expected, rtol=0, atol=1e-5)


def test_a_sample_is_scored_the_same_alone_and_in_a_pack(trainer: Trainer) -> None:
    alone = torch.cat([logits(trainer, [s]) for s in samples()])
    torch.testing.assert_close(logits(trainer, samples()), alone, rtol=0, atol=2e-6)


def test_a_sample_does_not_see_its_neighbours(trainer: Trainer) -> None:
    first, other = samples()[2], torch.full((40,), 3)
    beside_one = logits(trainer, [other, first])[40:]
    beside_another = logits(trainer, [torch.zeros(40, dtype=torch.long), first])[40:]
    torch.testing.assert_close(beside_one, beside_another, rtol=0, atol=2e-6)


@torch.no_grad()
def test_bf16_departs_from_fp32_no_more_than_transformers_does() -> None:
    exact_model = tiny.reference_model("bf16").float()
    exact = torch.cat([exact_model(s[None]).logits[0] for s in samples()])
    ours = logits(tiny.trainer(precision="bf16"), samples())
    theirs = reference_logits(precision="bf16", attention="sdpa")
    noise = (theirs - exact).abs().mean()
    assert noise > 0.01
    assert (ours - exact).abs().mean() < 1.1 * noise
    assert (ours - theirs).abs().mean() < 0.1 * noise  # packed samples meet other blocks of the kernels


@torch.no_grad()
def test_bf16_sublayers_round_where_transformers_does_bit_for_bit() -> None:
    reference, ours = (tiny.reference_model("bf16", "sdpa"), tiny.trainer(precision="bf16").model)
    generator, n = torch.Generator().manual_seed(2), 30
    x, h = (torch.randn(1, n, 64, generator=generator).bfloat16() for _ in range(2))
    for i, (theirs, layer) in enumerate(zip(reference.model.layers, ours.decoder.layers, strict=True)):
        normed = theirs.input_layernorm(x)
        assert torch.equal(layer.input_layernorm(x), normed)
        attended = layer.self_attention(normed.transpose(0, 1), None, packed_seq_params=pack(torch.tensor([0, n])))[0]
        assert torch.equal(attended.transpose(0, 1), reference_attention(reference, i, normed))
        assert torch.equal(layer.mlp(normed.transpose(0, 1))[0].transpose(0, 1), theirs.mlp(normed))
        for residual, add, norm in (
            (layer.self_attn_bda, theirs.attn_residual_add_idx, theirs.post_attention_layernorm),
            (layer.mlp_bda, theirs.mlp_residual_add_idx, theirs.post_feedforward_layernorm),
        ):
            assert torch.equal(residual.add((x, None), h, 0.0), depth_scaled_residual_add(norm(x), h, add))


def reference_attention(model: BeamForCausalLM, layer: int, x: torch.Tensor) -> torch.Tensor:
    """transformers' attention sub-layer alone, with the positions and the mask that its model would give it."""
    kind, position = model.config.layer_types[layer], torch.arange(x.size(1))[None]
    distance = position.T - position
    if kind == "full_attention":
        scaling, rotary, mask = compute_attention_scaling(position), None, distance >= 0
    else:
        scaling, rotary = None, model.model.rotary_emb(x, position, kind)
        mask = (distance >= 0) & (distance < model.config.sliding_window)
    return model.model.layers[layer].self_attn(x, rotary, mask[None, None], scaling)[0]
