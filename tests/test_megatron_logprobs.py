"""Chunked log-probabilities: the value and the gradient of the plain computation, rounded as the engine rounds."""

import pytest
import torch
from torch import Tensor

from beam_rl.megatron.logprobs import token_logprobs

TOKENS, HIDDEN, VOCAB = 11, 6, 17


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.double) * 3
    head = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.double) * 3
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), targets


def plain(hidden: Tensor, head: Tensor, targets: Tensor, softcap: float, temperature: float) -> tuple[Tensor, Tensor]:
    z = hidden @ head.T
    logp = (softcap * torch.tanh(z / softcap) / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), torch.distributions.Categorical(logits=logp).entropy()


@pytest.mark.parametrize("chunk_tokens", [1, 4, TOKENS, 100])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_value_and_gradient_are_those_of_the_plain_computation(chunk_tokens: int, temperature: float) -> None:
    hidden, head, targets = inputs(torch.double)
    logp, entropy = token_logprobs(
        hidden, head, targets, softcap=5.0, temperature=temperature, numerics="reference", chunk_tokens=chunk_tokens
    )
    expected_logp, expected_entropy = plain(hidden, head, targets, 5.0, temperature)
    torch.testing.assert_close(logp, expected_logp)
    torch.testing.assert_close(entropy, expected_entropy)
    assert not entropy.requires_grad
    upstream = torch.linspace(-1, 2, TOKENS, dtype=torch.double)
    ours = torch.autograd.grad((logp * upstream).sum(), (hidden, head))
    theirs = torch.autograd.grad((expected_logp * upstream).sum(), (hidden, head))
    torch.testing.assert_close(ours, theirs)


def test_gradient_agrees_with_finite_differences() -> None:
    hidden, head, targets = inputs(torch.double)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets, softcap=30.0, temperature=0.8, numerics="reference", chunk_tokens=3)[
            0
        ],
        (hidden, head),
    )


def test_engine_numerics_round_the_softcapped_logits_before_the_temperature() -> None:
    hidden, head, targets = inputs(torch.bfloat16)
    z = (hidden @ head.T).float()
    held = (30 * torch.tanh(z / 30)).bfloat16().float()
    expected = (held / 0.9).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    engine, _ = token_logprobs(hidden, head, targets, softcap=30.0, temperature=0.9, numerics="engine")
    reference, _ = token_logprobs(hidden, head, targets, softcap=30.0, temperature=0.9, numerics="reference")
    assert engine.dtype == torch.float32
    torch.testing.assert_close(engine, expected, rtol=0, atol=1e-6)
    assert (engine - reference).abs().max() > 1e-3


def test_gradient_flows_through_the_engines_rounding() -> None:
    hidden, head, targets = inputs(torch.bfloat16)
    logp, _ = token_logprobs(hidden, head, targets, softcap=30.0, temperature=1.0, numerics="engine", chunk_tokens=4)
    (ours,) = torch.autograd.grad(logp.sum(), hidden)
    wide_hidden, wide_head = (hidden.detach().float().requires_grad_(), head.detach().float())
    (exact,) = torch.autograd.grad(plain(wide_hidden, wide_head, targets, 30.0, 1.0)[0].sum(), wide_hidden)
    assert (ours.float() - exact).norm() < 0.02 * exact.norm()


def test_temperature_zero_is_refused() -> None:
    hidden, head, targets = inputs(torch.float32)
    with pytest.raises(ValueError, match="temperature = 0"):
        token_logprobs(hidden, head, targets, softcap=30.0, temperature=0.0, numerics="engine")
