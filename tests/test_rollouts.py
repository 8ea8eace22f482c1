"""The three paces: nothing is lost, nothing comes twice, nothing is older than allowed, whatever is slow or interrupted.

The engines and the verifier are scripted: these tests are about what is asked of them, when, and what is done with it.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from beam_rl.data import PromptStream
from beam_rl.recipe.load import load
from beam_rl.recipe.tree import Recipe
from beam_rl.rollouts import OneStepOff, Rollouts, make_rollouts
from beam_rl.samples import Completion, Prompt, Request
from beam_rl.sampling import Flights
from beam_rl.step import Quiet, Step
from beam_rl.verifiers import Verdict, VerifyItem

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
SIZE, SAMPLES = 4, 2
SMALL = [f"rollout.prompts_per_step={SIZE}", f"rollout.samples_per_prompt={SAMPLES}", "rollout.max_response_tokens=10"]


class Scripted:
    """Engines on an event loop of their own, a token a millisecond; some responses take very long."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.version, self.sampling, self.silent, self.most = 0, 0, False, 0

    def submit(self, coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def generate(self, groups: Sequence[Sequence[Request]], on_progress=None, enough=None) -> dict[str, Completion]:
        return self.submit(self._generate(groups, enough)).result()

    async def _generate(self, groups: Sequence[Sequence[Request]], enough: int | None) -> dict[str, Completion]:
        tasks = [asyncio.create_task(self.sample(group)) for group in groups]
        if enough is not None:
            while sum(t.done() for t in tasks) < enough:
                await asyncio.sleep(0.001)
            self.silent = True
        done = [await t for t in tasks]
        self.silent = False
        return {name: c for group in done for name, c in group.items()}

    async def sample(self, requests: Sequence[Request]) -> dict[str, Completion]:
        self.sampling += len(requests)
        self.most = max(self.most, self.sampling)
        done = await asyncio.gather(*(self._one(r) for r in requests))
        self.sampling -= len(requests)
        return {c.id: c for c in done}

    async def _one(self, request: Request) -> Completion:
        length = random.Random(request.id).choice([1, 2, 3, 10])
        given = 10 - request.max_tokens
        tokens: list[int] = []
        while given + len(tokens) < length and not self.silent:
            await asyncio.sleep(0.002)
            tokens.append(self.version)  # a token says which weights sampled it
        reason = "stop" if given + len(tokens) == length else "abort"
        ids = np.array(tokens, np.int32)
        return Completion(request.id, ids, ids.astype(np.float32), None, reason, self.version)

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        self.silent = True
        yield
        self.silent = False

    def score(self, items: list[VerifyItem]) -> list[Verdict]:
        return [Verdict(float(i % 2)) for i, _ in enumerate(items)]


def prompts(n: int = 40) -> PromptStream:
    return PromptStream([Prompt(i, i, [i, 7], "a") for i in range(n)], seed=0)


def start(engines: Scripted, *overrides: str, source: PromptStream | None = None) -> tuple[Rollouts, Recipe]:
    recipe = load(TINY, [*SMALL, *overrides])
    flights = Flights(source or prompts(), recipe)
    return make_rollouts(flights, engines, engines, lambda ids: str(ids), recipe, lambda: None), recipe  # type: ignore[arg-type]


def train(rollouts: Rollouts, engines: Scripted, steps: int, first: int = 1) -> list[tuple[int, Completion]]:
    """Goes through steps as the loop does; what each trained on."""
    trained = []
    for number in range(first, first + steps):
        rollout = rollouts.take(Step(number, Quiet()))
        assert len(rollout.groups) == SIZE and all(len(g.samples) == SAMPLES for g in rollout.groups)
        trained += [(number, s.completion) for s in rollout.samples]
        rollouts.hold()
        assert engines.sampling == 0  # the weights may change now
        engines.version = number
        rollouts.go_on(number)
    return trained


def resumed(rollouts: Rollouts, version: int, *overrides: str) -> tuple[Rollouts, Scripted]:
    """What goes on from a checkpoint of `rollouts`, in other processes."""
    state, under_way = rollouts.flights.snapshot()
    engines = Scripted()
    engines.version = version
    rollouts, _ = start(engines, *overrides, source=prompts())
    rollouts.flights.restore(state, under_way)
    rollouts.go_on(version)
    return rollouts, engines


def positions(trained: list[tuple[int, Completion]]) -> list[int]:
    return [int(c.id.split("-")[1]) for _, c in trained]


@pytest.mark.parametrize(
    ("pace", "staleness"), [("synchronous", 0), ("one_step_off", 1), ("asynchronous", 1), ("asynchronous", 3)]
)
def test_every_prompt_is_trained_on_once_and_in_time(pace: str, staleness: int) -> None:
    engines = Scripted()
    rollouts, _ = start(engines, f"rollout.pace={pace}", f"algorithm.staleness={max(1, staleness)}")
    rollouts.go_on(0)
    trained = train(rollouts, engines, 24)
    assert len(trained) == len({c.id for _, c in trained}) == 24 * SIZE * SAMPLES
    ages = [number - 1 - c.version for number, c in trained]
    assert max(ages) == staleness and min(ages) >= 0
    state, under_way = rollouts.flights.snapshot()
    everywhere = set(positions(trained)) | {f.prompt.position for f in under_way}
    assert everywhere == set(range(state))  # trained on, or still under way
    assert not set(positions(trained)) & {f.prompt.position for f in under_way}


def test_each_part_of_a_response_says_which_weights_sampled_it() -> None:
    engines = Scripted()
    rollouts, _ = start(engines, "rollout.pace=asynchronous", "algorithm.staleness=3")
    rollouts.go_on(0)
    trained = train(rollouts, engines, 24)
    assert sum(bool(c.later) for _, c in trained) > 5
    for _, c in trained:
        said = np.full(len(c.token_ids), c.version)
        for first, version in c.later:
            said[first:] = version
        np.testing.assert_array_equal(said, c.token_ids)
        np.testing.assert_array_equal(c.logp, c.token_ids)


def test_asynchronous_engines_have_more_to_do_than_one_batch() -> None:
    busy = {}
    for pace in ("synchronous", "asynchronous"):
        engines = Scripted()
        rollouts, _ = start(engines, f"rollout.pace={pace}", "algorithm.staleness=3")
        rollouts.go_on(0)
        train(rollouts, engines, 4)
        busy[pace] = engines.most
    assert busy["synchronous"] == SIZE * SAMPLES and busy["asynchronous"] == 4 * SIZE * SAMPLES


@pytest.mark.parametrize("unfinished", ["continue", "restart"])
def test_over_sampling_waits_for_a_batch_and_loses_nothing(unfinished: str) -> None:
    engines = Scripted()
    rollouts, _ = start(engines, "rollout.over_sampling=2", f"rollout.unfinished={unfinished}")
    rollouts.go_on(0)
    trained = train(rollouts, engines, 12)
    state, under_way = rollouts.flights.snapshot()
    assert sorted({*positions(trained), *(f.prompt.position for f in under_way)}) == list(range(state))
    assert len({c.id for _, c in trained}) == 12 * SIZE * SAMPLES
    assert any(c.later for _, c in trained) == (unfinished == "continue")


@pytest.mark.parametrize("pace", ["synchronous", "one_step_off", "asynchronous"])
def test_a_resumed_run_trains_on_what_was_under_way_and_on_nothing_twice(pace: str) -> None:
    engines = Scripted()
    overrides = (f"rollout.pace={pace}", "algorithm.staleness=2")
    rollouts, _ = start(engines, *overrides)
    rollouts.go_on(0)
    before = train(rollouts, engines, 5)
    rollouts.hold()
    rollouts, engines = resumed(rollouts, 5, *overrides)
    after = train(rollouts, engines, 6, first=6)
    seen = [c.id for _, c in before + after]
    assert len(seen) == len(set(seen)) == 11 * SIZE * SAMPLES
    state, under_way = rollouts.flights.snapshot()
    assert {*positions(before + after), *(f.prompt.position for f in under_way)} == set(range(state))
    assert max(number - 1 - c.version for number, c in after) <= {"synchronous": 0, "one_step_off": 1}.get(pace, 2)


def test_what_version_0_sampled_is_not_young_after_a_resume() -> None:
    engines = Scripted()
    overrides = ("rollout.pace=asynchronous", "algorithm.staleness=2")
    rollouts, _ = start(engines, *overrides)
    rollouts.go_on(0)
    train(rollouts, engines, 1)
    rollouts.hold()
    rollouts, engines = resumed(rollouts, 1, *overrides)
    after = train(rollouts, engines, 8, first=2)
    assert max(number - 1 - c.version for number, c in after) == 2


def test_groups_that_dynamic_sampling_drops_are_counted_at_any_pace() -> None:
    class Alike(Scripted):
        def score(self, items: list[VerifyItem]) -> list[Verdict]:
            """Every second prompt's answers are alike, and could not be judged."""
            alike = int(items[0].response.strip("[").split(",")[0].rstrip("]") or 0) % 2
            return [Verdict(0.0, error="no") if alike else Verdict(float(i % 2)) for i, _ in enumerate(items)]

    engines = Alike()
    rollouts, _ = start(engines, "rollout.pace=asynchronous", "algorithm.dynamic_sampling.enabled=true")
    rollouts.go_on(0)
    dropped = errors = 0
    for number in range(1, 9):
        rollout = rollouts.take(Step(number, Quiet()))
        dropped, errors = dropped + rollout.dropped_groups, errors + rollout.errors
        rollouts.hold()
        engines.version = number
        rollouts.go_on(number)
    assert dropped > 0 and errors == SAMPLES * dropped


def test_one_step_off_resumes_with_the_very_batch_that_was_sampled() -> None:
    engines = Scripted()
    rollouts, _ = start(engines, "rollout.pace=one_step_off")
    rollouts.go_on(0)
    train(rollouts, engines, 3)
    again, _ = resumed(rollouts, 3, "rollout.pace=one_step_off")
    assert isinstance(rollouts, OneStepOff)
    wanted = [s.completion for s in rollouts.take(Step(4, Quiet())).samples]
    got = [s.completion for s in again.take(Step(4, Quiet())).samples]
    assert [(c.id, c.version, c.token_ids.tolist()) for c in got] == [
        (c.id, c.version, c.token_ids.tolist()) for c in wanted
    ]


def test_a_failing_engine_ends_the_wait_with_its_own_error() -> None:
    class Broken(Scripted):
        async def sample(self, requests: Sequence[Request]) -> dict[str, Completion]:
            raise RuntimeError("engine 0: out of memory")

    for pace in ("synchronous", "asynchronous"):
        engines = Broken()
        rollouts, _ = start(engines, f"rollout.pace={pace}")
        rollouts.go_on(0)
        with pytest.raises(RuntimeError, match="engine 0: out of memory"):
            rollouts.take(Step(1, Quiet()))
