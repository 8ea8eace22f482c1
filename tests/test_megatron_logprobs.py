"""Chunked log-probabilities: value and gradient of the plain computation, in any chunks, on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from beam_rl.megatron.logprobs import scaled_logits, token_logprobs
from beam_rl.seats import free_port

TOKENS, HIDDEN, VOCAB = 11, 6, 18
BEAM_VOCAB = 151_936


def inputs(dtype: torch.dtype, tokens: int = TOKENS, vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.double) * 3
    head = torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.double) * 3
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), targets


def plain(hidden: Tensor, head: Tensor, targets: Tensor, softcap: float, temperature: float) -> tuple[Tensor, Tensor]:
    z = hidden @ head.T
    logp = (softcap * torch.tanh(z / softcap) / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), torch.distributions.Categorical(logits=logp).entropy()


def widened(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def upstream(tokens: int) -> Tensor:
    return torch.linspace(-1, 2, tokens, dtype=torch.double)


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
    ours = torch.autograd.grad((logp * upstream(TOKENS)).sum(), (hidden, head))
    theirs = torch.autograd.grad((expected_logp * upstream(TOKENS)).sum(), (hidden, head))
    torch.testing.assert_close(ours, theirs)


def test_gradient_agrees_with_finite_differences() -> None:
    hidden, head, targets = inputs(torch.double)
    options: Any = {"softcap": 30.0, "temperature": 0.8, "numerics": "reference", "chunk_tokens": 3}
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, **options)[0], (hidden, head))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_no_bit_of_the_forward_pass_and_only_rounding_of_the_gradient(
    dtype: torch.dtype, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    # Small integers: every sum of the GEMM is exact, whatever kernel the library chooses for the chunk's size.
    hidden = torch.randint(-3, 4, (50, 16), generator=generator).to(dtype).requires_grad_()
    head = torch.randint(-2, 3, (1000, 16), generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 1000, (50,), generator=generator)

    def run(chunk_tokens: int) -> tuple[Tensor, ...]:
        options: Any = {"softcap": 30.0, "temperature": temperature, "numerics": "engine"}
        logp, entropy = token_logprobs(hidden, head, targets, **options, chunk_tokens=chunk_tokens)
        return logp, entropy, *torch.autograd.grad((logp * upstream(50)).sum(), (hidden, head))

    whole = run(50)
    for chunk_tokens in (1, 7, 16, 49):
        chunked = run(chunk_tokens)
        assert torch.equal(chunked[0], whole[0]) and torch.equal(chunked[1], whole[1])
        rounding = 1e-6 if dtype == torch.float32 else 2**-7
        for ours, theirs in zip(chunked[2:], whole[2:], strict=True):
            assert (ours - theirs).norm() <= rounding * theirs.norm()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_few_tokens_of_a_whole_vocabulary(dtype: torch.dtype, bound: float) -> None:
    hidden, head, targets = inputs(dtype, tokens=4, vocab=BEAM_VOCAB)
    hidden = (hidden / 8).detach().requires_grad_()  # logits of a few units, as a model has them
    logp, entropy = token_logprobs(hidden, head, targets, softcap=30.0, temperature=1.0, numerics="reference")
    wide_hidden, wide_head = widened(hidden, head)
    expected_logp, expected_entropy = plain(wide_hidden, wide_head, targets, 30.0, 1.0)
    assert (logp - expected_logp).abs().max() < bound * 10  # log-probabilities near -12: a few units in the last place
    assert (entropy - expected_entropy).abs().max() < bound * 10
    ours = torch.autograd.grad((logp * upstream(4)).sum(), (hidden, head))
    theirs = torch.autograd.grad((expected_logp * upstream(4)).sum(), (wide_hidden, wide_head))
    for mine, exact in zip(ours, theirs, strict=True):  # a GEMM that sums 152k terms in FP32 is right to 5e-5
        assert (mine - exact).norm() < max(bound, 1e-4) * exact.norm()


@pytest.mark.parametrize(
    ("scale", "softcap", "temperature"),
    [(1e4, 30.0, 1.0), (1e4, 30.0, 1e-3), (10.0, 1e4, 1.0), (0.0, 30.0, 1.0)],
    ids=["saturated", "cold", "beyond exp's range", "uniform"],
)
def test_extreme_logits(scale: float, softcap: float, temperature: float) -> None:
    hidden, head, targets = inputs(torch.float32)
    hidden, head = ((t * factor).detach().requires_grad_() for t, factor in ((hidden, scale), (head, max(scale, 1))))
    logp, entropy = token_logprobs(
        hidden, head, targets, softcap=softcap, temperature=temperature, numerics="reference", chunk_tokens=4
    )
    wide_hidden, wide_head = widened(hidden, head)
    expected_logp, expected_entropy = plain(wide_hidden, wide_head, targets, softcap, temperature)
    rounding = 1e-6 * max(1.0, float((wide_hidden @ wide_head.T).abs().max().clamp(max=softcap)) / temperature)
    torch.testing.assert_close(logp.double(), expected_logp, rtol=1e-6, atol=rounding)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=rounding)
    ours = torch.autograd.grad(logp.sum(), (hidden, head))
    theirs = torch.autograd.grad(expected_logp.sum(), (wide_hidden, wide_head))
    for mine, exact in zip(ours, theirs, strict=True):
        assert mine.isfinite().all()
        assert (mine - exact).norm() <= 10 * rounding * exact.norm()


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


def test_a_head_in_fp32_rounds_no_logit() -> None:
    hidden, head, targets = inputs(torch.bfloat16)
    capped = 30 * torch.tanh(hidden.double() @ head.double().T / 30)
    exact = (capped / 0.9).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1).float()
    options: Any = {"softcap": 30.0, "temperature": 0.9, "chunk_tokens": 3}
    wide, _ = token_logprobs(hidden, head, targets, **options, numerics="fp32_head")
    reference, _ = token_logprobs(hidden, head, targets, **options, numerics="reference")
    torch.testing.assert_close(wide, exact, rtol=0, atol=1e-5)
    assert (reference - exact).abs().max() > 1e-3


@pytest.mark.parametrize("temperature", [0.9, 1.0])
@pytest.mark.parametrize("numerics", ["engine", "reference"])
def test_scaled_logits_are_what_the_log_softmax_sees(numerics: Any, temperature: float) -> None:
    hidden, head, targets = inputs(torch.bfloat16)
    logits = scaled_logits(hidden, head, 30.0, temperature, rounded=numerics == "engine")
    logp, _ = token_logprobs(hidden, head, targets, softcap=30.0, temperature=temperature, numerics=numerics)
    expected = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-6)


def bf16_gradients_are_near_the_exact_ones(device: str, numerics: Any) -> None:
    hidden, head, targets = (t.detach().to(device) for t in inputs(torch.bfloat16, tokens=64, vocab=500))
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    options: Any = {"softcap": 30.0, "temperature": 1.0, "numerics": numerics, "chunk_tokens": 16}
    logp, _ = token_logprobs(hidden, head, targets, **options)
    ours = torch.autograd.grad(logp.sum(), (hidden, head))
    wide_hidden, wide_head = widened(hidden, head)
    exact = torch.autograd.grad(plain(wide_hidden, wide_head, targets, 30.0, 1.0)[0].sum(), (wide_hidden, wide_head))
    for mine, theirs in zip(ours, exact, strict=True):
        assert (mine - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("numerics", ["engine", "fp32_head"])
def test_gradient_flows_through_the_engines_rounding(numerics: str) -> None:
    bf16_gradients_are_near_the_exact_ones("cpu", numerics)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("numerics", ["engine", "fp32_head"])
def test_gradient_flows_through_the_engines_rounding_on_a_gpu(numerics: str) -> None:
    bf16_gradients_are_near_the_exact_ones("cuda", numerics)


def test_frozen_head_leaves_the_gradient_of_the_hidden_states_as_it_is() -> None:
    hidden, head, targets = inputs(torch.float32)
    options: Any = {"softcap": 30.0, "temperature": 1.0, "numerics": "engine", "chunk_tokens": 4}
    (trained,) = torch.autograd.grad(token_logprobs(hidden, head, targets, **options)[0].sum(), hidden)
    (frozen,) = torch.autograd.grad(token_logprobs(hidden, head.detach(), targets, **options)[0].sum(), hidden)
    assert torch.equal(trained, frozen)
    (alone,) = torch.autograd.grad(token_logprobs(hidden.detach(), head, targets, **options)[0].sum(), head)
    assert alone.shape == head.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_gradient_is_added_to_the_memory_that_is_given_for_it(dtype: torch.dtype) -> None:
    hidden, head, targets = inputs(dtype)
    options: Any = {"softcap": 30.0, "temperature": 1.0, "numerics": "engine", "chunk_tokens": 4}
    of_hidden, of_head = torch.autograd.grad(token_logprobs(hidden, head, targets, **options)[0].sum(), (hidden, head))
    there = torch.ones_like(head, dtype=torch.float32)
    token_logprobs(hidden, head, targets, **options, head_gradient=there)[0].sum().backward()
    assert head.grad is None and torch.equal(hidden.grad, of_hidden)
    torch.testing.assert_close(
        (there - 1).to(dtype), of_head, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


def test_no_tokens_give_no_log_probabilities() -> None:
    hidden, head, targets = inputs(torch.float32, tokens=0)
    logp, entropy = token_logprobs(hidden, head, targets, softcap=30.0, temperature=1.0, numerics="engine")
    logp.sum().backward()
    assert logp.shape == entropy.shape == (0,) and not head.grad.any()


def test_temperature_zero_is_refused() -> None:
    hidden, head, targets = inputs(torch.float32)
    with pytest.raises(ValueError, match="temperature = 0"):
        token_logprobs(hidden, head, targets, softcap=30.0, temperature=0.0, numerics="engine")


@pytest.mark.parametrize("target", [-1, VOCAB])
def test_target_outside_the_vocabulary_is_refused(target: int) -> None:
    hidden, head, targets = inputs(torch.float32)
    targets[3] = target
    with pytest.raises(ValueError, match=f"target {target}: outside the vocabulary of {VOCAB}"):
        token_logprobs(hidden, head, targets, softcap=30.0, temperature=1.0, numerics="engine")


# --- the vocabulary cut over ranks: three processes of their own -----------------------------------------------

OPTIONS: Any = {"softcap": 5.0, "temperature": 1.0, "numerics": "engine", "chunk_tokens": 4}
CASES = [(torch.float32, 1.0, 2), (torch.float32, 0.7, 3), (torch.bfloat16, 1.0, 2)]  # dtype, temperature, TP


def evaluated(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, group: Any = None) -> list[Tensor]:
    """Log-probabilities, entropies and both gradients."""
    logp, entropy = token_logprobs(hidden, head, targets, **OPTIONS | {"temperature": temperature}, tp_group=group)
    gradients = torch.autograd.grad((logp * upstream(TOKENS)).sum(), (hidden, head))
    return [logp.detach(), entropy, *gradients]


def run_rank(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    groups = {2: dist.new_group([1, 2]), 3: dist.new_group([0, 1, 2])}  # the pair's ranks differ from the world's
    results: list[Any] = []
    for dtype, temperature, size in CASES:
        if rank < 3 - size:
            results.append(None)
            continue
        hidden, head, targets = inputs(dtype)
        part = head.detach().chunk(size)[dist.get_rank(groups[size])].clone().requires_grad_()
        results.append(evaluated(hidden, part, targets, temperature, groups[size]))
    hidden, head, targets = inputs(torch.float32)
    try:
        token_logprobs(hidden, head.chunk(3)[rank], targets + VOCAB, **OPTIONS, tp_group=groups[3])
    except ValueError as error:
        results.append(str(error))
    torch.save(results, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What each of three processes got for each case."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, (free_port("127.0.0.1"), str(folder)), nprocs=3)
    return [torch.load(folder / str(rank)) for rank in range(3)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=["tp2", "tp3", "tp2 bf16"])
def test_vocabulary_over_ranks_gives_the_numbers_of_one_process(ranks: list[list[Any]], case: int) -> None:
    dtype, temperature, size = CASES[case]
    logp, entropy, grad_hidden, grad_head = evaluated(*inputs(dtype), temperature)
    members = [results[case] for results in ranks[3 - size :]]
    for member in members[1:]:
        assert all(torch.equal(a, b) for a, b in zip(member[:3], members[0][:3], strict=True))
    torch.testing.assert_close(members[0][0], logp, rtol=0, atol=1e-6)
    torch.testing.assert_close(members[0][1], entropy, rtol=0, atol=1e-6)
    rounding = 1e-6 if dtype == torch.float32 else 2**-7
    assert (members[0][2] - grad_hidden).norm() <= rounding * grad_hidden.norm()
    joined = torch.cat([member[3] for member in members])
    assert (joined - grad_head).norm() <= rounding * grad_head.norm()


def test_target_outside_all_ranks_vocabularies_is_refused_on_every_rank(ranks: list[list[Any]]) -> None:
    for results in ranks:
        assert "outside the vocabulary of 18 tokens" in results[-1]
