"""From prompts to judged groups: seeds, dynamic sampling and its cap, overlong punishment, evaluation.

The engine and the verifier are scripted here: these tests are about what is asked of them and what is done with it.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from beam_rl.data import PromptStream
from beam_rl.evaluate import evaluate
from beam_rl.recipe.load import load
from beam_rl.samples import Completion, Prompt, Request, sampling_seed
from beam_rl.sampling import Flights, Rollout, sample_groups, shuffle_rewards
from beam_rl.step import Step
from beam_rl.verifiers import Verdict, VerifyItem

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
SMALL = ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=10"]


class Silent:
    """A display that shows nothing."""

    def advance(self, count: int = 1) -> None:
        pass

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None, once: bool = False):
        yield self


class Scripted:
    """An engine whose response to a request is as many tokens as `lengths` says, and a verifier that reads a table."""

    def __init__(self, scores: dict[int, list[float]], length: int = 5) -> None:
        self.scores, self.length = scores, length
        self.requests: list[Request] = []

    def generate(self, groups: Sequence[Sequence[Request]], on_progress=None, enough=None) -> dict[str, Completion]:
        flat = [r for group in groups for r in group]
        self.requests += flat
        for _ in flat:
            on_progress(1)
        return {r.id: self._complete(r) for r in flat}

    def _complete(self, request: Request) -> Completion:
        prompt, k = request.prompt_ids[0], int(request.id.rsplit("-", 1)[1])
        tokens = np.full(self.length, 10 * prompt + k, np.int32)
        stopped = self.length < request.max_tokens
        return Completion(
            request.id, tokens, -np.ones(self.length, np.float32), None, "stop" if stopped else "length", 0
        )

    def score(self, items: list[VerifyItem]) -> list[Verdict]:
        return [Verdict(self.scores[int(i.response) // 10][int(i.response) % 10]) for i in items]


def decode(ids: Sequence[int]) -> str:
    return str(ids[0])


def prompts(n: int = 8) -> PromptStream:
    return PromptStream([Prompt(i, i, [i, 7], "a") for i in range(n)], seed=0)


def sample(engine: Scripted, source: PromptStream, *overrides: str) -> tuple[Rollout, Step]:
    step, recipe = Step(1, Silent()), load(TINY, [*SMALL, *overrides])
    return sample_groups(Flights(source, recipe), engine, engine, decode, recipe, step), step


def test_every_sample_gets_its_own_seed_and_its_own_reward():
    engine = Scripted({i: [1.0, 0.0] for i in range(8)})
    rollout, _ = sample(engine, prompts())
    assert len({r.seed for r in engine.requests}) == len({r.id for r in engine.requests}) == 8
    assert [[s.reward for s in g.samples] for g in rollout.groups] == [[1.0, 0.0]] * 4
    assert (rollout.tokens, rollout.truncated, rollout.dropped_groups) == (40, 0, 0)


def test_a_seed_hangs_on_the_runs_seed_the_prompts_position_and_the_samples_number():
    assert (
        len({sampling_seed(s, w, p, k) for s in (0, 1) for w in ("train", "eval") for p in (0, 1) for k in (0, 1)})
        == 16
    )


def test_dynamic_sampling_replaces_groups_whose_rewards_are_alike():
    alike = {0, 2, 4}
    engine = Scripted({i: [1.0, 1.0] if i in alike else [1.0, 0.0] for i in range(8)})
    source = prompts()
    rollout, _ = sample(engine, source, "algorithm.dynamic_sampling.enabled=true")
    order = [p.row for p in prompts().take(source.state())]
    wanted = [row for row in order if row not in alike]
    assert [g.prompt.row for g in rollout.groups] == wanted[:4]
    assert rollout.dropped_groups == len(order) - 4
    assert rollout.tokens == 10 * len(order), "what was dropped was sampled too"


def test_dynamic_sampling_stops_at_its_cap_with_what_there_is():
    engine = Scripted({i: [0.0, 0.0] if i else [1.0, 0.0] for i in range(8)})
    source = prompts()
    cap = "algorithm.dynamic_sampling.max_rounds=3"
    rollout, _ = sample(engine, source, "algorithm.dynamic_sampling.enabled=true", cap)
    assert len(rollout.groups) <= 2 and rollout.dropped_groups >= 9
    assert source.state() == len(rollout.groups) + rollout.dropped_groups


def test_a_resumed_stream_goes_on_where_the_refills_ended():
    engine = Scripted({i: [1.0, 1.0] if i % 2 else [1.0, 0.0] for i in range(8)})
    whole, dynamic = prompts(), "algorithm.dynamic_sampling.enabled=true"
    first, _ = sample(engine, whole, dynamic)
    resumed = prompts()
    resumed.restore(whole.state())
    again, other = sample(engine, whole, dynamic)[0], sample(engine, resumed, dynamic)[0]
    assert [g.prompt for g in again.groups] == [g.prompt for g in other.groups] != [g.prompt for g in first.groups]


def test_overlong_responses_are_punished_on_top_of_their_score():
    engine = Scripted({i: [1.0, 0.0] for i in range(8)}, length=10)
    overlong = ["algorithm.overlong.buffer_tokens=4", "algorithm.overlong.penalty=0.5"]
    rollout, _ = sample(engine, prompts(), *overlong)
    assert rollout.truncated == 8
    assert [s.score for s in rollout.samples[:2]] == [1.0, 0.0]
    assert [s.reward for s in rollout.samples[:2]] == [0.5, -0.5]  # at the limit: the whole penalty


def shuffled(number: int, *overrides: str) -> tuple[Rollout, Step]:
    """A rollout whose prompts are answered in the same way by all samples, after the control; score = prompt's number."""
    engine = Scripted({i: [float(i), float(i)] for i in range(8)})
    rollout, _ = sample(engine, prompts(), "rollout.prompts_per_step=8")
    step = Step(number, Silent())
    shuffle_rewards(rollout, load(TINY, ["verifier.shuffle=true", *overrides]), step)
    return rollout, step


def test_shuffled_rewards_are_the_same_rewards_for_other_samples_and_the_metric_counts_them():
    rollout, step = shuffled(1)
    rewards, scores = ([getattr(s, what) for s in rollout.samples] for what in ("reward", "score"))
    assert sorted(rewards) == sorted(scores) and rewards != scores, "scores stay; rewards are dealt out anew"
    assert step.metrics["reward/shuffled"] == sum(r != s for r, s in zip(rewards, scores, strict=True)) > 8
    groups = [{s.reward for s in g.samples} for g in rollout.groups]
    assert max(map(len, groups)) == 2, "over the whole batch, not within groups: these were alike"


def test_the_shuffle_hangs_on_the_seed_and_the_step_alone():
    deal = lambda *how: [s.reward for s in shuffled(*how)[0].samples]  # noqa: E731
    assert deal(1) == deal(1) != deal(2) != deal(2, "seed=1")


def test_without_the_control_every_sample_keeps_its_reward():
    rollout, step = shuffled(1, "verifier.shuffle=false")
    assert all(s.reward == s.score for s in rollout.samples) and "reward/shuffled" not in step.metrics


def test_evaluation_asks_the_same_of_every_step_and_averages_over_prompts():
    engine = Scripted({0: [1.0, 1.0], 1: [1.0, 0.0], 2: [0.0, 0.0]})
    held_out = [Prompt(i, i, [i, 7], "a") for i in range(3)]
    recipe = load(TINY, [*SMALL, "eval.samples_per_prompt=2"])
    first = evaluate(held_out, engine, engine, decode, recipe, lambda n: None).summary()
    asked = list(engine.requests)
    engine.requests.clear()
    evaluate(held_out, engine, engine, decode, recipe, lambda n: None)
    assert engine.requests == asked
    assert first.avg == pytest.approx(0.5) and first.pass_rate == pytest.approx(2 / 3)
