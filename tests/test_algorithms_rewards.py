"""Advantages, overlong punishment, loss weights, evaluation and parity against values worked out by hand."""

import math

import pytest
import torch

from beam_rl.algorithms.advantages import dr_grpo, grpo
from beam_rl.algorithms.evaluation import evaluate, pass_at_k
from beam_rl.algorithms.parity import Gap, NonFiniteLogprobs, logprob_gap
from beam_rl.algorithms.rewards import overlong_punishment
from beam_rl.algorithms.weights import sample_weights


def table(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_grpo_by_hand() -> None:
    # rewards 1, 0, 0, 1: mean 1/2, Σ (±1/2)² = 1, unbiased variance 1/3, advantage ±(1/2) / sqrt(1/3) = ±√3/2
    expected = math.sqrt(3) / 2
    torch.testing.assert_close(
        grpo(table([1, 0, 0, 1])),
        table([expected, -expected, -expected, expected]),
        rtol=2e-6,
        atol=0,
    )


def test_dr_grpo_by_hand() -> None:
    # rewards 1, 0, 0, 0: mean 1/4
    torch.testing.assert_close(dr_grpo(table([1, 0, 0, 0])), table([0.75, -0.25, -0.25, -0.25]))


@pytest.mark.parametrize("advantages", [grpo, dr_grpo])
def test_equal_rewards_give_exactly_zero_also_where_the_mean_rounds(advantages) -> None:
    rewards = table([0.7] * 3, [-1.0] * 3, [0.0] * 3, [0.7, 0.7, 0.1])  # the mean of three 0.7 is off by 1e-16
    result = advantages(rewards)
    assert torch.equal(result[:3], torch.zeros(3, 3, dtype=torch.float64))
    assert result[3].abs().min() > 0.1


@pytest.mark.parametrize("advantages", [grpo, dr_grpo])
def test_groups_do_not_see_each_other(advantages) -> None:
    rewards = table([1, 0, 0.5], [7, -3, 2])
    assert torch.equal(advantages(rewards)[1], advantages(rewards[1:])[0])


@pytest.mark.parametrize("advantages", [grpo, dr_grpo])
def test_groups_of_one_and_broken_rewards_are_refused(advantages) -> None:
    with pytest.raises(ValueError, match=r"at least 2 samples.*rollout\.samples_per_prompt"):
        advantages(table([1.0]))
    with pytest.raises(ValueError, match="sample 1 of group 0 is nan"):
        advantages(table([1.0, math.nan]))


def test_overlong_punishment_by_hand() -> None:
    # max 100, buffer 20, penalty 2: 0 up to 80, −2·(90 − 80)/20 = −1 at 90, −2 at 100
    result = overlong_punishment(torch.tensor([0, 80, 81, 90, 100]), 100, 20, 2.0)
    torch.testing.assert_close(result, torch.tensor([0, 0, -0.1, -1.0, -2.0], dtype=torch.float64))


def test_overlong_buffer_of_zero_is_off_and_a_larger_one_than_the_limit_refused() -> None:
    assert (overlong_punishment(torch.tensor([5, 100]), 100, 0, 1.0) == 0).all()
    with pytest.raises(ValueError, match=r"algorithm\.overlong\.buffer_tokens = 101"):
        overlong_punishment(torch.tensor([5]), 100, 101, 1.0)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 6, 0, 1 / 6]),  # 2 + 0 + 4 tokens
        (
            "sample_mean",
            [1 / (3 * 2), 0, 1 / (3 * 4)],
        ),  # 3 samples, the empty one included
        ("constant", [1 / (3 * 10), 0, 1 / (3 * 10)]),
    ],
)
def test_sample_weights_by_hand(aggregation, expected) -> None:
    weights = sample_weights(torch.tensor([2, 0, 4]), aggregation, max_response_tokens=10)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "constant"])
def test_only_empty_responses_weigh_nothing(aggregation) -> None:
    assert sample_weights(torch.tensor([0, 0]), aggregation, 10).tolist() == [0, 0]
    assert sample_weights(torch.tensor([], dtype=torch.int64), aggregation, 10).shape == (0,)


def test_pass_at_k_by_hand_and_against_all_subsets() -> None:
    # 4 samples, 1 passed, k = 2: 1 − C(3,2)/C(4,2) = 1 − 3/6
    torch.testing.assert_close(
        pass_at_k(torch.tensor([0, 1, 3, 4]), 4, 2),
        torch.tensor([0, 0.5, 1, 1], dtype=torch.float64),
    )
    subsets = torch.combinations(torch.tensor([1, 1, 0, 0, 0]), 3).amax(1).double().mean()
    torch.testing.assert_close(pass_at_k(torch.tensor([2]), 5, 3)[0], subsets)


def test_evaluation_by_hand() -> None:
    # per-prompt means 1, 1/2, 0: mean 1/2, std 1/2, half width 1.96·0.5/√3 = 0.566 → cut to [0, 1]; 2 of 3 pass
    result = evaluate(table([1, 1], [0, 1], [0, 0]))
    assert result.record("toy") == {
        "task": "toy",
        "avg@k": 0.5,
        "pass@k": pytest.approx(2 / 3),
        "k": 2,
        "prompts": 3,
        "ci95": [0.0, 1.0],
        "samples": 2,
    }


def test_interval_is_over_prompts_not_samples() -> None:
    # 8 prompts with means ¼ and ¾: std = sqrt(8/7)/4, half width 1.96·std/√8 = 0.1852, with 4 samples a prompt or 400
    for samples in (4, 400):
        low_high = evaluate(table([1, 0, 0, 0], [1, 1, 1, 0]).repeat(4, samples // 4)).ci95
        assert low_high == pytest.approx((0.5 - 0.1852, 0.5 + 0.1852), abs=1e-4)


def test_prompts_that_are_all_right_leave_wilsons_interval() -> None:
    # 8 of 8: 8 / (8 + 1.96²) = 0.6756, whatever the samples a prompt
    assert evaluate(table([1, 1]).repeat(8, 1)).ci95 == pytest.approx((0.6756, 1), abs=1e-4)
    assert evaluate(table([0, 0]).repeat(8, 1)).ci95 == pytest.approx((0, 1 - 0.6756), abs=1e-4)


def test_one_prompt_has_no_interval_and_wrong_scores_are_refused() -> None:
    assert evaluate(table([1, 0])).ci95 is None
    for scores, words in [
        (table([2.0]), "between 0 and 1"),
        (table([math.nan]), "between 0 and 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            evaluate(scores)
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples a prompt, there are 2"):
        evaluate(table([1, 0]), k=3)


def test_logprob_gap_by_hand() -> None:
    # differences ln 2 and −ln 2: mean and max ln 2; r − log r − 1 = 1 − ln 2 and ln 2 − 1/2, mean 1/4
    ln2 = math.log(2)
    gap = logprob_gap(
        torch.tensor([9.0, -1 + ln2, -1 - ln2]),
        torch.tensor([math.nan, -1.0, -1.0]),
        torch.tensor([False, True, True]),
    )
    assert gap.tokens == 2
    assert (gap.mean, gap.max, gap.mismatch_kl) == pytest.approx((ln2, ln2, 0.25), rel=1e-6)


def test_mismatch_kl_of_a_small_gap_does_not_cancel() -> None:
    # r − log r − 1 ≈ d²/2 = 5e-15 for d = 1e-7: computed as written it would be lost in the rounding of r
    d = torch.tensor([1e-7], dtype=torch.float64)
    gap = logprob_gap(d, torch.zeros_like(d), torch.ones(1, dtype=torch.bool))
    assert gap.mismatch_kl == pytest.approx(5e-15, rel=1e-2)


def test_a_mask_without_tokens_is_a_gap_of_nothing() -> None:
    empty = logprob_gap(torch.ones(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert empty == Gap(0, 0.0, 0.0, 0.0)


def test_non_finite_logprobs_are_counted_and_raised() -> None:
    trainer = torch.tensor([math.nan, -1.0, math.nan, -1.0])
    engine = torch.tensor([0.0, -1.0, -math.inf, -math.inf])
    with pytest.raises(
        NonFiniteLogprobs,
        match=r"^2 of 3 response tokens .*trainer 1 NaN and 0 infinite, engine 0 NaN and 2 infinite.*token 2 of",
    ):
        logprob_gap(trainer, engine, torch.tensor([False, True, True, True]))
