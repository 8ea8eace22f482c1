"""Beam in Megatron computes what transformers computes."""

import megatron_tiny as tiny
import pytest
import torch

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


def test_bf16_departs_from_fp32_no_more_than_transformers_does() -> None:
    exact = tiny.reference_model("bf16").float()
    with torch.no_grad():
        exact_logits = torch.cat([exact(s[None]).logits[0] for s in samples()])
    ours = logits(tiny.trainer(precision="bf16"), samples())
    theirs = reference_logits(precision="bf16")
    assert ours.dtype == torch.float32
    our_noise = (ours - exact_logits).abs().mean()
    their_noise = (theirs - exact_logits).abs().mean()
    assert 0 < our_noise < 1.25 * their_noise
    assert (ours - theirs).abs().mean() < 1.5 * their_noise


def test_bf16_sublayers_round_where_transformers_does() -> None:
    """Layer by layer on the same input, before differences of the attention kernels can add up: bit for bit."""
    reference, ours = tiny.reference_model("bf16", "sdpa"), tiny.trainer(precision="bf16").model
    x = torch.randn(6, 1, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    h = torch.randn(6, 1, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        for theirs, layer in zip(reference.model.layers, ours.decoder.layers, strict=True):
            assert torch.equal(layer.input_layernorm(x), theirs.input_layernorm(x))
            n = theirs.attn_residual_add_idx
            normed = theirs.post_attention_layernorm(x)
            expected = normed * (1 / n**0.5) + h * ((n - 1) / n) ** 0.5
            assert torch.equal(layer.self_attn_bda.add((x, None), h, 0.0), expected)
            out = layer.mlp(x)[0]
            torch.testing.assert_close(out, theirs.mlp(x.transpose(0, 1)).transpose(0, 1), rtol=0, atol=0)
