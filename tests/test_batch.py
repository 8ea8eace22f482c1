"""What a step trains on: advantages, samples without routes left out and counted, weights fixed over the mini-batch."""

from pathlib import Path

import numpy as np
import pytest

from beam_rl.batch import StepBatch, build
from beam_rl.loop import StepError, check_agreement, learning_rate, replay_metrics, rollout_metrics
from beam_rl.policy import Scores
from beam_rl.recipe.load import load
from beam_rl.routes import invalid_rows
from beam_rl.samples import Completion, Group, Prompt, Sample, pack_one, plan_packs
from beam_rl.sampling import Rollout

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
EXPERTS, LAYERS, TOP_K = 16, 4, 4


def sample(position: int, reward: float, tokens: int = 3, rows: int | None = None) -> Sample:
    prompt = Prompt(position, position, [1, 5, 6], "7")
    rows = len(prompt.token_ids) + tokens - 1 if rows is None else rows
    routes = np.tile(np.arange(TOP_K, dtype=np.uint8), (rows, LAYERS, 1))
    ids = np.arange(10, 10 + tokens, dtype=np.int32)
    logp = -np.arange(1, tokens + 1, dtype=np.float32)
    return Sample(prompt, Completion(f"{position}", ids, logp, routes, "stop", 0), reward=reward)


def group(position: int, *rewards: float) -> Group:
    samples = [sample(position, reward) for reward in rewards]
    return Group(samples[0].prompt, samples)


def test_advantages_are_relative_to_the_group_and_mini_batches_are_whole_groups():
    batch = build([group(i, 1.0, 0.0) for i in range(5)], load(TINY), EXPERTS)
    assert [len(part) for part in batch.mini_batches] == [4, 6]
    for part in batch.mini_batches:
        # two rewards 1 and 0: mean ½, std ½·√2 (of a sample), so ±½ / 0.7071 = ±0.7071
        assert [s.advantage for s in part[:2]] == pytest.approx([0.70711, -0.70711], abs=1e-4)
        assert sum(s.weight * s.response_tokens for s in part) == pytest.approx(1)


def test_a_sample_without_all_its_routes_is_left_out_and_counted():
    groups = [group(0, 1.0, 0.0), group(1, 1.0, 0.0)]
    groups[0].samples[0] = sample(0, 1.0, rows=2)
    groups[1].samples[1].completion.routes[1, 2] = 0  # one expert four times, as where nothing was captured
    batch = build(groups, load(TINY), EXPERTS)
    assert [len(part) for part in batch.mini_batches] == [1, 1]
    assert batch.missing_rows == 5 + 1
    assert batch.complete == 2
    assert batch.mini_batches[0][0].advantage < 0, "the advantage is still relative to the whole group"


def test_without_replay_no_sample_needs_routes():
    groups = [group(0, 1.0, 0.0), group(1, 1.0, 0.0)]
    groups[0].samples[0] = sample(0, 1.0, rows=0)
    batch = build(groups, load(TINY, ["rollout.routing_replay=false"]), EXPERTS)
    assert [len(part) for part in batch.mini_batches] == [2, 2]
    assert (batch.complete, batch.missing_rows) == (4, 0)


def test_a_step_where_nothing_can_be_replayed_fails():
    rollout = Rollout([group(0, 1.0, 0.0)], tokens=6, generate_s=1.0)
    with pytest.raises(StepError, match="routing_replay is on, and not one sample came with the routes"):
        rollout_metrics(rollout, StepBatch([], 0, 0, missing_rows=10, replay=True), step=1)
    learned = StepBatch([[sample(0, 1.0)]], 0, 1, missing_rows=0, replay=True)
    nothing = Scores(np.zeros(3), np.zeros(3), routes_agree=0, routes_total=0)
    with pytest.raises(StepError, match="the trainer has replayed nothing"):
        replay_metrics(nothing, learned, step=1)


def test_a_run_whose_engine_serves_other_weights_ends_before_its_first_rollout():
    check_agreement(9e-6, load(TINY))
    with pytest.raises(StepError, match=r"differ by 3.00e-02 .* above 1e-05: `beam-rl parity` says where"):
        check_agreement(0.03, load(TINY))
    check_agreement(0.03, load(TINY, ["parity.logprob_mean_bound=0.05"]))


def test_a_step_that_dynamic_sampling_leaves_empty_ends_the_run_with_the_diagnosis():
    with pytest.raises(StepError, match="all 64 sampled groups have rewards that are all alike"):
        rollout_metrics(Rollout(dropped_groups=64, generate_s=1.0), StepBatch([], 0, 0, 0, replay=True), step=3)


def test_groups_whose_rewards_are_all_alike_give_nothing_to_learn_from():
    batch = build([group(0, 1.0, 1.0), group(1, 0.0, 0.0)], load(TINY), EXPERTS)
    assert batch.mini_batches == [] and batch.skipped == 2


def test_fewer_groups_than_mini_batches_make_fewer_updates():
    assert len(build([group(0, 1.0, 0.0)], load(TINY), EXPERTS).mini_batches) == 1


def test_which_rows_cannot_be_replayed():
    routes = np.array([[[0, 1, 2, 3]], [[0, 0, 1, 2]], [[0, 0, 0, 0]], [[1, 2, 3, 16]], [[15, 3, 1, 0]]])
    assert invalid_rows(routes, EXPERTS)[:, 0].tolist() == [False, True, True, True, False]


def test_a_pack_lays_samples_end_to_end_and_masks_the_prompts():
    samples = [sample(0, 1.0, tokens=2), sample(1, 0.0, tokens=3)]
    for s, weight in zip(samples, (0.25, 0.5), strict=True):
        s.weight, s.advantage = weight, weight * 2
    pack = pack_one(samples, [0, 1])
    assert pack.cu_tokens.tolist() == [0, 4, 9]
    assert pack.tokens.tolist() == [1, 5, 6, 10, 1, 5, 6, 10, 11]
    assert pack.targets.tolist() == [5, 6, 10, 11, 5, 6, 10, 11, 12]
    assert pack.response.tolist() == [False, False, True, True, False, False, True, True, True]
    assert pack.logp_engine.tolist() == [0, 0, -1, -2, 0, 0, -1, -2, -3]
    assert pack.weight.tolist() == [0, 0, 0.25, 0.25, 0, 0, 0.5, 0.5, 0.5]
    assert pack.routes.shape == (9, LAYERS, TOP_K)


def test_packs_stay_within_the_budget_and_are_balanced_over_ranks():
    # 24 tokens on 2 ranks with room for 8: two micro-batches a rank; 7, then the fours, then the 1 beside a four
    assert plan_packs([4, 4, 4, 7, 1, 4], token_budget=8, ranks=2) == [[[3], [1, 4]], [[0, 5], [2]]]
    lengths = np.random.default_rng(0).integers(5, 400, 200).tolist()
    plan = plan_packs(lengths, token_budget=2000, ranks=3)
    assert sorted(i for rank in plan for pack in rank for i in pack) == list(range(200))
    assert len({len(rank) for rank in plan}) == 1
    tokens = [[sum(lengths[i] for i in pack) for pack in rank] for rank in plan]
    assert max(map(max, tokens)) <= 2000
    per_rank = list(map(sum, tokens))
    assert max(per_rank) <= 1.02 * min(per_rank)
    assert sum(map(len, tokens)) == -(-sum(lengths) // 6000) * 3, "no more micro-batches than the tokens need"


def test_a_rank_may_have_no_sample_and_a_sample_may_not_exceed_the_budget():
    assert plan_packs([5], token_budget=8, ranks=2) == [[[0]], [[]]]
    with pytest.raises(ValueError, match=r"token_budget = 8: a sample has 30 tokens"):
        plan_packs([2, 30], token_budget=8, ranks=2)


def test_the_learning_rate_warms_up_and_stays():
    recipe = load(TINY, ["trainer.optimizer.lr=1.0", "trainer.optimizer.warmup_updates=4"])
    assert [learning_rate(u, recipe) for u in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
