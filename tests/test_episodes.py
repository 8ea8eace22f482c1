"""Responses of several turns: what is asked of engines and environments, in which order, and what comes of it.

The engines are scripted, the environments are real processes; test_paces.py has real engines and a trainer.
"""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_rl import flight
from beam_rl.batch import build
from beam_rl.engines import Engines, Slot
from beam_rl.environments import EnvironmentPool
from beam_rl.environments.frame import Frame
from beam_rl.episodes import Episodes
from beam_rl.evaluate import evaluate
from beam_rl.flight import Flight
from beam_rl.loop import StepError, environment_metrics
from beam_rl.recipe.load import load
from beam_rl.samples import Completion, Group, Outcome, Prompt, Request, pack_one
from beam_rl.sampling import Rollout, judge_groups, sample_of
from beam_rl.verifiers import Verdict, VerifyItem

TURNS = Path(__file__).parents[1] / "recipes" / "tiny_cpu_turns.yaml"
STOP, BEFORE, AFTER = 0, 900, 901
CALL = 50  # a token that, as text, is a stop string
NOISY = """
import time
from pathlib import Path

class Noted:
    '''Writes down what it is shown; says the number of the turn; over after the row's number of turns.'''

    def __init__(self, row, log, pause=0.0, reward=None):
        self.row, self.log, self.pause, self.reward, self.turn = row, Path(log), pause, reward, 0

    def step(self, response):
        self.turn += 1
        with self.log.open("a") as log:
            log.write(f"{self.row['name']} {self.turn}: {response}\\n")
        time.sleep(self.pause)
        if self.turn == self.row.get("breaks"):
            raise RuntimeError("broken")
        return (None if self.turn == self.row["turns"] else f"80{self.turn} 80{self.turn}"), self.reward


class Called(Noted):
    stop_strings = ("50",)

    def step(self, response, ended_by):
        return super().step(f"{response} ({ended_by})")
"""


class Actor:
    """An engine that samples a token a millisecond: the turn's seed decides them; it may be told to die."""

    def __init__(self) -> None:
        self.batches: list[list[Request]] = []
        self.cut, self.dies_in = asyncio.Event(), 10**9
        self.generate, self.interrupt, self.release = _Method(self._generate), _Method(self._cut), _Method(self._uncut)

    async def _cut(self) -> None:
        self.cut.set()

    async def _uncut(self) -> None:
        self.cut.clear()

    async def _generate(self, requests: Sequence[Request]) -> AsyncIterator[Any]:
        self.batches.append(list(requests))
        for done in asyncio.as_completed([self._one(r) for r in requests]):
            completion = await done
            self.dies_in -= 1
            if self.dies_in < 0:
                raise RuntimeError("the engine died")
            yield _at_once(completion)

    async def _one(self, request: Request) -> Completion:
        draw = random.Random(request.seed)
        wanted = [draw.randrange(1, 100) for _ in range(draw.randrange(1, 5))] + [STOP]
        tokens: list[int] = []
        ended_by = None
        if request.stop_strings:
            wanted.insert(len(wanted) // 2, CALL)
        while len(tokens) < min(len(wanted), request.max_tokens) and not self.cut.is_set():
            await asyncio.sleep(0.001)
            tokens.append(wanted[len(tokens)])
            if str(tokens[-1]) in request.stop_strings:
                ended_by = str(tokens[-1])
                break
        whole = "stop" if tokens and (ended_by or tokens[-1] == STOP) else "length"
        ids = np.array(tokens, np.int32)
        rows = np.zeros((len(request.prompt_ids) + len(ids) - 1, 1, 1), np.uint8) if tokens else None
        reason = "abort" if self.cut.is_set() and ended_by is None else whole
        return Completion(request.id, ids, -1.0 - ids, rows, reason, 0, ended_by=ended_by)


class _Method:
    """As of a Ray actor."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def options(self, **_: object) -> "_Method":
        return self

    def remote(self, *args: Any) -> Any:
        return self.function(*args)


async def _at_once[T](value: T) -> T:
    return value


class Scripted(Engines):
    """Engines whose actors are scripted; one that is lost is replaced at once."""

    def _lost_or_raise(self, slot: Slot, actor: Any, error: Exception) -> None:
        self.counters.restarts += 1
        slot.actor = Actor()


@contextlib.contextmanager
def engines(tmp_path: Path, *overrides: str, made: str = "Noted", **options: object) -> Iterator[Scripted]:
    """Two engines that play episodes of a class above."""
    (tmp_path / "noted.py").write_text(NOISY)
    recipe = load(TURNS, ["rollout.max_response_tokens=60", "environment.max_turns=4", *overrides])
    assert recipe.environment is not None
    playing = Scripted(recipe, tmp_path, tmp_path)
    playing.slots = [Slot(i, None, Actor(), None, "serving") for i in range(2)]  # type: ignore[arg-type]
    threading.Thread(target=playing._loop.run_forever, daemon=True).start()
    frame = Frame([STOP], [BEFORE], [AFTER], lambda text: [int(word) for word in text.split()])
    options = {"log": str(tmp_path / "log"), **options}
    with EnvironmentPool(f"{tmp_path}/noted.py:{made}", options, recipe.environment.timeout_s) as pool:
        playing.episodes = Episodes(pool, frame, decode, recipe.environment.max_turns)
        yield playing
        playing._loop.call_soon_threadsafe(playing._loop.stop)


def decode(ids: Sequence[int]) -> str:
    return " ".join(str(i) for i in ids if i != STOP)


def prompt(position: int, **row: object) -> Prompt:
    return Prompt(position, position, [700 + position], "gold", {"name": f"p{position}", **row})


def asked(playing: Engines, *prompts: Prompt) -> list[Flight]:
    """One response to each, played to the end."""
    flights = [Flight(p, [None]) for p in prompts]
    done = playing.generate([f.requests(playing.recipe) for f in flights])
    for f in flights:
        f.add(done)
        assert f.complete and not playing.episodes._open
    return flights


def shown(tmp_path: Path) -> dict[str, str]:
    """Turn → what the environment saw; each turn once."""
    lines = (tmp_path / "log").read_text().splitlines()
    found = dict(line.split(": ") for line in lines)
    assert len(found) == len(lines), "a turn was shown twice"
    return found


def whole(f: Flight) -> Completion:
    assert f.parts[0] is not None
    return f.parts[0]


def test_a_response_is_the_models_turns_with_the_framed_answers_between(tmp_path: Path) -> None:
    with engines(tmp_path, reward=0.5) as playing:
        done = whole(asked(playing, prompt(3, turns=3))[0])
        (first,), (second,), (third,) = [b for slot in playing.slots for b in slot.actor.batches]
    turns = [done.token_ids[part].tolist() for part in done.turns]
    assert [t[-1] for t in turns] == [STOP] * 3
    assert [done.token_ids[slice(*part)].tolist() for part in done.given] == [
        [BEFORE, 801, 801, AFTER],
        [BEFORE, 802, 802, AFTER],
    ]
    assert second.prompt_ids == [703, *turns[0], BEFORE, 801, 801, AFTER]
    assert third.prompt_ids == [703, *done.token_ids[: done.turns[2].start].tolist()]
    assert len({first.seed, second.seed, third.seed}) == 3 and first.prompt is None
    assert [r.max_tokens for r in (first, second, third)] == [61 - len(r.prompt_ids) for r in (first, second, third)]
    assert (done.finish_reason, done.later) == ("stop", ())
    assert done.outcome is not None and (done.outcome.reward, done.outcome.problem) == (1.5, None)
    assert shown(tmp_path) == {f"p3 {i + 1}": decode(t) for i, t in enumerate(turns)}
    np.testing.assert_array_equal(done.logp, np.where(done.sampled, -1.0 - done.token_ids, 0.0))
    assert done.routes is not None and len(done.routes) == 1 + len(done.token_ids) - 1


def test_a_turn_that_a_string_ended_is_ended_for_the_template_and_the_environment_is_told(tmp_path: Path) -> None:
    with engines(tmp_path, made="Called") as playing:
        done = whole(asked(playing, prompt(3, turns=3))[0])
        first, second, _ = [request for slot in playing.slots for batch in slot.actor.batches for request in batch]
    turns = [done.token_ids[part].tolist() for part in done.turns]
    assert [t[-1] for t in turns] == [CALL] * 3 and done.finish_reason == "stop"
    assert done.token_ids[slice(*done.given[0])].tolist() == [STOP, BEFORE, 801, 801, AFTER]
    assert shown(tmp_path) == {f"p3 {i + 1}": f"{decode(t)} (50)" for i, t in enumerate(turns)}
    assert (first.stop_strings, first.begun, second.begun) == (("50",), 0, 0)


def test_an_interrupted_turn_is_asked_for_with_what_it_has_begun(tmp_path: Path) -> None:
    with engines(tmp_path, made="Called", pause=0.01) as playing:
        flights = [Flight(prompt(i, turns=4), [None]) for i in range(6)]
        askings = 0
        while any(not f.complete for f in flights):
            askings += 1
            answering = playing.submit(gathered(playing, flights))
            time.sleep(random.Random(askings).uniform(0.003, 0.01) * (1 + askings / 10))  # or a busy machine never ends
            playing.submit(hushed(playing, answering)).result(timeout=20)
        requests = [request for slot in playing.slots for batch in slot.actor.batches for request in batch]
    begun = [r for r in requests if r.begun]
    assert begun and all({STOP, AFTER, CALL}.isdisjoint(r.prompt_ids[-r.begun :]) for r in begun)
    assert {whole(f).token_ids[-1] for f in flights} == {CALL} and len(shown(tmp_path)) == 24


def test_an_episode_ends_with_its_turns_or_its_room(tmp_path: Path) -> None:
    with engines(tmp_path) as playing:
        done = whole(asked(playing, prompt(0, turns=99))[0])
        assert (len(done.turns), done.finish_reason) == (4, "stop"), "environment.max_turns = 4"
        assert done.outcome == Outcome(None, None, done.outcome.seconds if done.outcome else 0), "no reward was given"
    with engines(tmp_path, "rollout.max_response_tokens=14", log=str(tmp_path / "other")) as playing:
        ends = [whole(f) for f in asked(playing, *(prompt(i, turns=99) for i in range(12)))]
    assert {c.finish_reason for c in ends} == {"length"} and max(len(c.token_ids) for c in ends) <= 14
    assert all(c.sampled[-1] for c in ends), "an answer that leaves no room for a turn is left out"
    assert any(c.token_ids[-1] == STOP for c in ends) and any(c.token_ids[-1] != STOP for c in ends)


def test_the_same_run_has_the_same_tokens(tmp_path: Path) -> None:
    many = [prompt(i, turns=1 + i % 4) for i in range(8)]
    tokens = []
    for which in ("one", "two"):
        with engines(tmp_path, log=str(tmp_path / which)) as playing:
            tokens.append([whole(f).token_ids.tolist() for f in asked(playing, *many)])
    assert tokens[0] == tokens[1] and len({tuple(t) for t in tokens[0]}) == 8


def test_turns_go_on_together_where_every_bit_is_to_repeat(tmp_path: Path) -> None:
    many = [prompt(i, turns=3) for i in range(6)]
    with engines(tmp_path, "trainer.deterministic=true") as playing:
        asked(playing, *many)
        for slot in playing.slots:
            names = [[r.id for r in batch] for batch in slot.actor.batches]
            assert len(names) == 3 and names[0] == names[1] == names[2], "three turns of the same episodes, in order"


def test_an_episode_does_not_wait_for_the_others(tmp_path: Path) -> None:
    with engines(tmp_path, pause=0.05) as playing:
        slow, quick = prompt(0, turns=4), prompt(1, turns=1)
        order: list[str] = []
        flights = [Flight(p, [None]) for p in (slow, quick)]
        requests = [f.requests(playing.recipe) for f in flights]

        async def both() -> None:
            took = lambda c: order.append(c.id)  # noqa: E731
            await playing._answer([r for group in requests for r in group], took, playing.slots[0])

        playing.submit(both()).result(timeout=20)
    assert order == ["train-1-0", "train-0-0"]


def test_an_interrupted_episode_goes_on_and_no_turn_is_shown_twice(tmp_path: Path) -> None:
    with engines(tmp_path, pause=0.01) as playing:
        flights = [Flight(prompt(i, turns=4), [None]) for i in range(6)]
        askings = 0
        while any(not f.complete for f in flights):
            askings += 1
            answering = playing.submit(gathered(playing, flights))
            time.sleep(random.Random(askings).uniform(0.005, 0.03))
            playing.submit(hushed(playing, answering)).result(timeout=20)
    assert askings > 3
    for f in flights:
        done = whole(f)
        assert len(done.turns) == 4 and len(done.routes) == len(done.token_ids)  # type: ignore[arg-type]
        for turn, part in enumerate(done.turns):
            assert shown(tmp_path)[f"p{f.prompt.position} {turn + 1}"] == decode(done.token_ids[part].tolist())
    assert len(shown(tmp_path)) == 24


def wait_for(file: Path) -> None:
    end = time.monotonic() + 10
    while not file.exists():
        assert time.monotonic() < end
        time.sleep(0.005)


async def gathered(playing: Engines, flights: Sequence[Flight]) -> None:
    done = await asyncio.gather(*(playing.sample(f.requests(playing.recipe)) for f in flights if not f.complete))
    for f in flights:
        f.add({name: c for one in done for name, c in one.items()})


async def hushed(playing: Engines, answering: Any) -> None:
    async with playing.quiet():
        await asyncio.wrap_future(answering)


def test_engines_come_to_rest_while_an_environment_thinks(tmp_path: Path) -> None:
    with engines(tmp_path, pause=3.0) as playing:
        flights = [Flight(prompt(0, turns=2), [None])]
        answering = playing.submit(gathered(playing, flights))
        wait_for(tmp_path / "log")
        begun = time.monotonic()
        playing.submit(hushed(playing, answering)).result(timeout=20)
        assert time.monotonic() - begun < 2 and not flights[0].complete
        assert whole(flights[0]).token_ids[-1] == STOP, "its turn is kept"
        playing.submit(gathered(playing, flights)).result(timeout=20)
    assert len(whole(flights[0]).turns) == 2 and len(shown(tmp_path)) == 2


def test_an_interrupted_response_that_was_given_up_begins_anew(tmp_path: Path) -> None:
    with engines(tmp_path, pause=0.1) as playing:
        flights = [Flight(prompt(0, turns=2), [None])]
        answering = playing.submit(gathered(playing, flights))
        wait_for(tmp_path / "log")
        playing.submit(hushed(playing, answering)).result(timeout=20)
        flights = [flights[0].restarted()]
        (tmp_path / "log").unlink()
        playing.submit(gathered(playing, flights)).result(timeout=20)
    assert set(shown(tmp_path)) == {"p0 1", "p0 2"} and whole(flights[0]).turns[0].start == 0


def test_an_engine_that_dies_in_an_episode_does_its_turn_again_and_no_environment_its_own(tmp_path: Path) -> None:
    many = [prompt(i, turns=3) for i in range(8)]
    with engines(tmp_path) as playing:
        playing.slots[0].actor.dies_in = 7  # after its four first turns, while others are under way
        done = [whole(f) for f in asked(playing, *many)]
        assert playing.take_counters().redone > 0
    assert len(shown(tmp_path)) == 24 and {len(c.turns) for c in done} == {3}


def test_enough_groups_interrupt_the_others_in_whatever_turn_they_are(tmp_path: Path) -> None:
    with engines(tmp_path, pause=0.05) as playing:
        flights = [Flight(prompt(i, turns=1 if i < 2 else 4), [None]) for i in range(6)]
        done = playing.generate([f.requests(playing.recipe) for f in flights], enough=2)
        for f in flights:
            f.add(done)
        assert 2 <= sum(f.complete for f in flights) < 6
        done = playing.generate([f.requests(playing.recipe) for f in flights])
        for f in flights:
            f.add(done)
        assert all(f.complete for f in flights)
    assert len(shown(tmp_path)) == 18


class Judge:
    """Half a point for everything; remembers what it was shown."""

    def __init__(self) -> None:
        self.items: list[VerifyItem] = []

    def score(self, items: list[VerifyItem]) -> list[Verdict]:
        self.items += items
        return [Verdict(0.5) for _ in items]


def test_an_environment_that_fails_costs_its_episode_alone(tmp_path: Path) -> None:
    with engines(tmp_path, reward=0.25) as playing:
        flights = asked(playing, prompt(0, turns=2, breaks=2), prompt(1, turns=2))
        groups = [Group(f.prompt, [sample_of(f.prompt, whole(f), decode)]) for f in flights]
    counts, judge = Rollout(), Judge()
    judge_groups(groups, judge, playing.recipe, counts)
    assert [g.samples[0].score for g in groups] == [0.0, 0.5] and judge.items == []
    outcome = whole(flights[0]).outcome
    assert outcome is not None and outcome.problem == "RuntimeError: broken"
    assert groups[0].samples[0].record("?")["environment_problem"] == counts.environment_problem == outcome.problem
    assert "environment_problem" not in groups[1].samples[0].record("?")
    with pytest.raises(StepError, match="^step 3: the environment failed in all 2 episodes, .*: RuntimeError: broken$"):
        environment_metrics(replace(counts, environment_failures=2), 3)
    metrics = environment_metrics(counts, 3)
    assert metrics["rollout/turns_mean"] == 2 and metrics["rollout/environment_failures"] == 1
    assert counts.tokens == sum(int(whole(f).sampled.sum()) for f in flights)


def test_where_the_environment_gives_nothing_the_verifier_judges_the_last_turn(tmp_path: Path) -> None:
    with engines(tmp_path) as playing:
        done = asked(playing, prompt(0, turns=2))[0]
    sample, judge = sample_of(done.prompt, whole(done), decode), Judge()
    judge_groups([Group(done.prompt, [sample])], judge, playing.recipe, Rollout())
    last = decode(whole(done).token_ids[whole(done).turns[1]].tolist())
    assert judge.items == [VerifyItem(last, "gold", "stop")] and sample.score == 0.5
    assert [who for who, _ in sample.episode] == ["model", "environment", "model"]
    assert sample.record("?")["turns"][1] == ["environment", f"{BEFORE} 801 801 {AFTER}"]  # type: ignore[index]


def test_evaluation_goes_through_the_environment(tmp_path: Path) -> None:
    with engines(tmp_path, "eval.samples_per_prompt=2", reward=0.5) as playing:
        held_out = [prompt(0, turns=1), prompt(1, turns=3)]
        answers = evaluate(held_out, playing, Judge(), decode, playing.recipe)
        assert answers.scores.tolist() == [[0.5, 0.5], [1.0, 1.0]], "1.5 is cut to what avg@k knows"
        again = evaluate(held_out, playing, Judge(), decode, playing.recipe)
    texts = [[s.text for s in a.samples] for a in (answers, again)]
    assert texts[0] == texts[1] and len(answers.records(decode, 2)[1]["turns"]) == 5  # type: ignore[arg-type]


def test_what_nobody_sampled_has_no_part_in_the_loss() -> None:
    ids, given = np.arange(10, 16, dtype=np.int32), ((2, 4),)
    several = Completion("a", ids, np.array([-1, -2, 0, 0, -3, -4], np.float32), None, "stop", 0, given=given)
    single = Completion("b", ids[:4], -np.ones(4, np.float32), None, "stop", 0)
    samples = [sample_of(prompt(i), c, decode) for i, c in enumerate((several, single, single, several))]
    for s, reward in zip(samples, (1.0, 0.0, 0.0, 1.0), strict=True):
        s.reward = reward
    recipe = load(TURNS, ["rollout.routing_replay=false", "trainer.mini_batches=1"])
    (batch,) = build([Group(samples[0].prompt, samples)], recipe, 16).mini_batches
    assert [s.weight for s in batch] == [1 / 16] * 4, "the mean is over sampled tokens: four of each"
    pack = pack_one(batch, [0])
    assert pack.targets.tolist() == ids.tolist()
    assert pack.response.tolist() == [True, True, False, False, True, True]
    assert pack.weight.tolist() == [1 / 16, 1 / 16, 0, 0, 1 / 16, 1 / 16]
    assert pack.logp_engine.tolist() == [-1, -2, 0, 0, -3, -4]


def test_a_checkpoint_keeps_finished_episodes_and_the_others_begin_anew(tmp_path: Path) -> None:
    def part(k: int, reason: str, outcome: Outcome | None) -> Completion:
        ids = np.arange(6, dtype=np.int32)
        return Completion(f"train-5-{k}", ids, -ids * 1.0, None, reason, 2, given=((2, 4),), outcome=outcome)

    parts = [part(0, "stop", Outcome(0.5, None, 1.25)), part(1, "abort", None)]
    flight.save([Flight(prompt(5), list(parts))], tmp_path)
    (back,) = flight.load(tmp_path, prompt)
    assert [(p.given, p.outcome) for p in back.parts if p] == [(p.given, p.outcome) for p in parts]
    assert [p is not None for p in back.without_unfinished().parts] == [True, False]
