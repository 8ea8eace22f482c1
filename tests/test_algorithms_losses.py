"""The losses against values worked out by hand, their gradients, and the mask's promise."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from beam_rl.algorithms.corrections import masked_weight, truncated_weight
from beam_rl.algorithms.kl import k1, k2, k3, kl_penalty
from beam_rl.algorithms.losses import (
    LossInputs,
    cispo_loss,
    clipped_loss,
    gspo_loss,
    objective,
)
from beam_rl.algorithms.weights import sample_weights
from beam_rl.recipe.tree import Algorithm

LN2 = math.log(2.0)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def with_gradient(*values: float) -> Tensor:
    return doubles(*values).requires_grad_()


def gradient(loss: Tensor, logp: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), logp)[0]


def test_clip_higher_by_hand() -> None:
    # ratios 2, 2, 1/2, 1/2, 1.1 with A = +1, −1, +1, −1, +1 and bounds 0.8, 1.28:
    #   min(2·1, 1.28·1) = 1.28 (clipped)   min(2·−1, 1.28·−1) = −2   min(0.5, 0.8) = 0.5
    #   min(−0.5, −0.8) = −0.8 (clipped)    min(1.1, 1.1) = 1.1
    logp = with_gradient(-1 + LN2, -1 + LN2, -1 - LN2, -1 - LN2, -1 + math.log(1.1))
    result = clipped_loss(logp, doubles(-1, -1, -1, -1, -1), doubles(1, -1, 1, -1, 1), 0.2, 0.28)
    torch.testing.assert_close(result.loss, doubles(-1.28, 2.0, -0.5, 0.8, -1.1))
    assert result.clipped.tolist() == [True, False, False, True, False]
    # d(−ratio·A)/d logp = −ratio·A where the clip doesn't bind, 0 where it does
    torch.testing.assert_close(gradient(result.loss, logp), doubles(0, 2.0, -0.5, 0, -1.1))


def test_gradient_at_ratio_one_is_the_policy_gradient() -> None:
    logp = with_gradient(-0.3, -2.0)
    result = clipped_loss(logp, logp.detach(), doubles(1.5, -0.5), 0.2, 0.28)
    torch.testing.assert_close(gradient(result.loss, logp), doubles(-1.5, 0.5))


def test_gspo_ratio_is_the_geometric_mean_of_the_response() -> None:
    # Sample 7: prompt token, then ratios 4 and 1: s = sqrt(4·1) = 2, A = 1, bounds 0.5, 3: loss −2 a token.
    # Sample 9: ratios 1/4 and 1: s = 1/2, A = −1: loss 1/2 a token.
    logp = with_gradient(5.0, 2 * LN2, 0.0, -2 * LN2, 0.0)
    response = torch.tensor([False, True, True, True, True])
    sample = torch.tensor([7, 7, 7, 9, 9])
    result = gspo_loss(
        logp,
        doubles(0, 0, 0, 0, 0),
        doubles(0, 1, 1, -1, -1),
        response,
        sample,
        0.5,
        2.0,
    )
    torch.testing.assert_close(result.loss, doubles(0, -2, -2, 0.5, 0.5))
    assert not result.clipped.any()
    # each token's gradient is −s·A: d/d logp of sg(s)·exp(logp − sg(logp)) is s
    torch.testing.assert_close(gradient(result.loss, logp), doubles(0, -2, -2, 0.5, 0.5))


def test_gspo_clips_all_tokens_of_a_response_or_none() -> None:
    logp = with_gradient(2 * LN2, 0.0, 0.1, -0.1)  # s = 2 and s = 1
    response, sample = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    result = gspo_loss(logp, doubles(0, 0, 0, 0), doubles(1, 1, 1, 1), response, sample, 0.2, 0.28)
    assert result.clipped.tolist() == [True, True, False, False]
    torch.testing.assert_close(result.loss, doubles(-1.28, -1.28, -1, -1))
    torch.testing.assert_close(gradient(result.loss, logp), doubles(0, 0, -1, -1))


def test_gspo_with_sample_mean_weights_is_the_sequence_objective() -> None:
    """The reference differentiates the sequence's ratio itself, without any stop-gradient."""
    torch.manual_seed(0)
    lengths = [3, 5]
    sample = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    old = torch.randn(8, dtype=torch.float64) - 2
    logp = (old + 0.1 * torch.randn(8, dtype=torch.float64)).requires_grad_()
    advantage = doubles(1, 1, 1, -0.5, -0.5, -0.5, -0.5, -0.5)
    weight = sample_weights(torch.tensor(lengths), "sample_mean", 16).double()[sample]
    result = gspo_loss(logp, old, advantage, torch.ones(8, dtype=torch.bool), sample, 0.9, 9.0)
    ratio = torch.stack([part.mean() for part in (logp - old).split(lengths)]).exp()
    expected = -(ratio * doubles(1, -0.5)).mean()
    torch.testing.assert_close((weight * result.loss).sum(), expected)
    torch.testing.assert_close(
        torch.autograd.grad((weight * result.loss).sum(), logp)[0],
        torch.autograd.grad(expected, logp)[0],
    )


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    # ratios 2, 1/2, 1 clipped to [0.8, 1.28]: 1.28, 0.8, 1; loss −w·A·logp with A = 1, 2, −1
    logp = with_gradient(-1 + LN2, -1 - LN2, -1.0)
    result = cispo_loss(logp, doubles(-1, -1, -1), doubles(1, 2, -1), 0.2, 0.28)
    torch.testing.assert_close(result.loss, doubles(-1.28 * (LN2 - 1), -0.8 * 2 * (-1 - LN2), -1.0))
    assert result.clipped.tolist() == [True, True, False]
    torch.testing.assert_close(gradient(result.loss, logp), doubles(-1.28, -1.6, 1.0))


def test_kl_estimators_by_hand() -> None:
    # policy 1/2, reference 1/4: log ratio ln 2; k1 = ln 2, k2 = ln²2 / 2, k3 = 1/2 − 1 + ln 2
    logp, reference = doubles(-LN2), doubles(-2 * LN2)
    torch.testing.assert_close(k1(logp, reference), doubles(LN2))
    torch.testing.assert_close(k2(logp, reference), doubles(LN2**2 / 2))
    torch.testing.assert_close(k3(logp, reference), doubles(LN2 - 0.5))


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator) -> None:
    """Their mean over the policy's own distribution is the exact KL: Σ p·k = Σ p·log(p/q)."""
    p, q = doubles(0.5, 0.3, 0.2), doubles(0.2, 0.2, 0.6)
    torch.testing.assert_close((p * estimator(p.log(), q.log())).sum(), (p * (p / q).log()).sum())


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_penalty_gradient_is_the_reverse_kls(estimator) -> None:
    """Summed over the whole distribution with the sampling weights p held fixed, it equals d KL(p ‖ q) / d logits."""
    q = doubles(0.2, 0.2, 0.6)
    logits = with_gradient(0.4, -0.3, 0.9)
    logp = logits.log_softmax(0)
    exact = torch.autograd.grad((logp.exp() * (logp - q.log())).sum(), logits, retain_graph=True)[0]
    estimate = (logp.exp().detach() * kl_penalty(logp, q.log(), estimator)).sum()
    torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], exact)


def test_penalty_k1_keeps_k1s_value() -> None:
    logp, reference = with_gradient(-1.0, -0.2), doubles(-0.5, -3.0)
    torch.testing.assert_close(kl_penalty(logp, reference, "k1"), k1(logp, reference))


def test_importance_corrections_by_hand() -> None:
    # trainer / engine = 1/4, 1, 3
    old, engine = doubles(-2 * LN2, 0, math.log(3)), doubles(0, 0, 0)
    torch.testing.assert_close(truncated_weight(old, engine, 2.0), doubles(0.25, 1, 2))
    torch.testing.assert_close(masked_weight(old, engine, 0.5, 2.0), doubles(0, 1, 0))
    torch.testing.assert_close(masked_weight(old, engine, 0.25 - 1e-9, 3 + 1e-9), doubles(0.25, 1, 3))


def test_masked_weight_does_not_hide_a_nan() -> None:
    assert masked_weight(doubles(math.nan), doubles(0), 0.5, 2.0).isnan().all()


def pack() -> LossInputs:
    """Two samples of a prompt token and two response tokens each."""
    return LossInputs(
        logp=with_gradient(-9, -1.0, -1.1, -9, -0.4, -2.0),
        logp_old=doubles(-9, -1.2, -1.0, -9, -0.5, -1.9),
        logp_engine=doubles(0, -1.1, -1.0, 0, -0.5, -3.0),
        logp_reference=doubles(-9, -1.3, -1.0, -9, -0.1, -2.2),
        advantage=doubles(1, 1, 1, -0.5, -0.5, -0.5),
        response=torch.tensor([False, True, True, False, True, True]),
        sample=torch.tensor([4, 4, 4, 5, 5, 5]),
        entropy=doubles(7, 1, 2, 7, 3, 4),
    )


def settings(**changes) -> Algorithm:
    return Algorithm.model_validate(changes)


def test_objective_composes_weight_times_policy_loss_plus_kl() -> None:
    # token 1: ratio exp(0.2) ≤ 1.28; weight min(exp(−0.1), 2); KL k2 = 0.3² / 2
    # token 5: ratio exp(−0.1), A = −0.5; weight exp(1.1) = 3.004 truncated to 2; KL k2 = 0.2² / 2
    chosen = settings(
        kl={"coefficient": 0.1, "estimator": "k2"},
        importance_correction={"kind": "truncate", "high": 2},
    )
    result = objective(pack(), chosen)
    assert result.loss[1].item() == pytest.approx(-math.exp(-0.1) * math.exp(0.2) + 0.1 * 0.045)
    assert result.loss[5].item() == pytest.approx(2 * 0.5 * math.exp(-0.1) + 0.1 * 0.02)
    assert result.kl is not None and not result.kl.requires_grad
    torch.testing.assert_close(result.kl, doubles(0, 0.045, 0.005, 0, 0.045, 0.02))


def test_masked_correction_leaves_the_kl_of_a_masked_token() -> None:
    chosen = settings(
        kl={"coefficient": 0.1},
        importance_correction={"kind": "mask", "low": 0.5, "high": 2},
    )
    result = objective(pack(), chosen)
    assert result.kl is not None
    assert result.loss[5].item() == pytest.approx(0.1 * result.kl[5].item())


def test_kl_is_reported_without_a_coefficient_and_does_not_change_the_loss() -> None:
    inputs = pack()
    watched, alone = (
        objective(inputs, settings()),
        objective(replace(inputs, logp_reference=None), settings()),
    )
    assert watched.kl is not None and alone.kl is None
    assert torch.equal(watched.loss, alone.loss)


def test_kl_coefficient_without_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.kl\.coefficient = 0\.5"):
        objective(replace(pack(), logp_reference=None), settings(kl={"coefficient": 0.5}))


CHOICES = [
    settings(
        loss=loss,
        kl={"coefficient": 0.1, "estimator": kl},
        importance_correction={"kind": correction},
    )
    for loss, kl, correction in [
        ("clip", "k1", "none"),
        ("clip", "k2", "truncate"),
        ("gspo", "k3", "mask"),
        ("cispo", "k3", "truncate"),
        ("cispo", "k1", "mask"),
    ]
]


@pytest.mark.parametrize(
    "chosen",
    CHOICES,
    ids=lambda c: f"{c.loss}-{c.kl.estimator}-{c.importance_correction.kind}",
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tokens_outside_the_mask_give_exactly_nothing(chosen: Algorithm, bad: float) -> None:
    clean = pack()

    def spoil(values: Tensor) -> Tensor:
        return torch.where(clean.response, values.detach(), bad)

    spoiled = LossInputs(
        logp=spoil(clean.logp).requires_grad_(),
        logp_old=spoil(clean.logp_old),
        logp_engine=spoil(clean.logp_engine),
        logp_reference=spoil(clean.logp_reference),
        advantage=spoil(clean.advantage),
        response=clean.response,
        sample=clean.sample,
        entropy=spoil(clean.entropy),
    )
    result, expected = objective(spoiled, chosen), objective(clean, chosen)
    outside = ~clean.response
    slope = gradient(result.loss, spoiled.logp)
    assert (result.loss[outside] == 0).all() and (slope[outside] == 0).all() and not result.clipped[outside].any()
    assert result.kl is not None and (result.kl[outside] == 0).all()
    assert torch.equal(result.loss, expected.loss) and torch.equal(slope, gradient(expected.loss, clean.logp))


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_a_nan_inside_the_mask_reaches_the_loss(loss: str) -> None:
    inputs = pack()
    broken = inputs.logp.detach().clone()
    broken[1] = math.nan
    assert objective(replace(inputs, logp=broken), settings(loss=loss)).loss[1].isnan()


@pytest.mark.parametrize(
    "chosen",
    CHOICES,
    ids=lambda c: f"{c.loss}-{c.kl.estimator}-{c.importance_correction.kind}",
)
def test_loss_and_gradient_do_not_depend_on_the_packs(chosen: Algorithm) -> None:
    inputs = pack()
    weight = sample_weights(torch.tensor([2, 2]), chosen.aggregation, 8).double()[inputs.sample - 4]
    whole = (weight * objective(inputs, chosen).loss).sum()
    parts = [
        (weight[half] * objective(LossInputs(**{k: v[half] for k, v in vars(inputs).items()}), chosen).loss).sum()
        for half in (slice(0, 3), slice(3, 6))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(
        torch.autograd.grad(parts[0] + parts[1], inputs.logp)[0],
        torch.autograd.grad(whole, inputs.logp)[0],
    )


def test_an_empty_pack_has_an_empty_loss() -> None:
    inputs = LossInputs(**{k: v[:0] for k, v in vars(pack()).items()})
    for loss in ("clip", "gspo", "cispo"):
        assert objective(inputs, settings(loss=loss)).loss.shape == (0,)
