"""From prompts to groups of verified samples: the rollout half of a step.

Knows nothing about how engines sample or verifiers judge; a sample's random numbers hang on the recipe's seed, the
prompt's position and the sample's number alone.
"""

import math
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from beam_rl.algorithms.rewards import overlong_punishment
from beam_rl.flight import Flight
from beam_rl.recipe.tree import Recipe
from beam_rl.samples import Completion, Group, Prompt, Request, Sample
from beam_rl.step import Step
from beam_rl.verifiers import Verdict, VerifyItem

Decode = Callable[[Sequence[int]], str]
COUNTS = ("tokens", "truncated", "timeouts", "errors", "continued")
EPISODE_COUNTS = ("episodes", "turns", "environment_s", "environment_failures")


class Sampler(Protocol):
    def generate(
        self,
        groups: Sequence[Sequence[Request]],
        on_progress: Callable[[int], None] | None = None,
        enough: int | None = None,
    ) -> dict[str, Completion]: ...


class Judge(Protocol):
    def score(self, items: list[VerifyItem]) -> list[Verdict]: ...


class Source(Protocol):
    def take(self, n: int) -> list[Prompt]: ...
    def state(self) -> int: ...
    def restore(self, state: int) -> None: ...


@dataclass
class Rollout:
    """A step's groups and what it took to get them."""

    groups: list[Group] = field(default_factory=list)
    tokens: int = 0  # sampled, dropped groups included
    truncated: int = 0
    dropped_groups: int = 0
    timeouts: int = 0
    errors: int = 0  # responses that the verifier could not judge; score 0
    continued: int = 0  # responses that more than one version of the weights sampled
    episodes: int = 0  # responses that an environment answered
    turns: int = 0  # the model's, in these
    environment_s: float = 0.0  # all of them together
    environment_failures: int = 0  # episodes whose environment could not go on; score 0
    environment_problem: str | None = None  # why the first of these could not
    generate_s: float = 0.0

    @property
    def samples(self) -> list[Sample]:
        return [s for g in self.groups for s in g.samples]

    def add(self, counts: "Rollout") -> None:
        """Adds what another one has counted of its samples."""
        for name in COUNTS + EPISODE_COUNTS:
            setattr(self, name, getattr(self, name) + getattr(counts, name))
        self.environment_problem = self.environment_problem or counts.environment_problem


class Flights:
    """The run's prompts in their order, and those of them that are under way: begun, and not yet trained on or dropped.

    So a checkpoint can say of every prompt where it is. Calls may come from any thread.
    """

    def __init__(self, prompts: Source, recipe: Recipe) -> None:
        self._prompts, self._recipe, self._lock = prompts, recipe, threading.Lock()
        self._waiting: list[Flight] = []  # put back: they come before new prompts
        self._out: dict[int, Flight] = {}

    def take(self, n: int) -> list[Flight]:
        """`n` flights: what was put back first, then new prompts."""
        with self._lock:
            taken, self._waiting = self._waiting[:n], self._waiting[n:]
            taken += [Flight.start(p, self._recipe) for p in self._prompts.take(n - len(taken))]
            self._out |= {f.prompt.position: f for f in taken}
            return taken

    def put_back(self, flights: Iterable[Flight]) -> None:
        """For the next `take`, with what they have so far."""
        with self._lock:
            for flight in flights:
                del self._out[flight.prompt.position]
                self._waiting.append(flight)
            self._waiting.sort(key=lambda f: f.prompt.position)  # as a resumed run has them

    def landed(self, positions: Iterable[int]) -> None:
        """Trained on, or dropped: no longer under way."""
        with self._lock:
            for position in positions:
                del self._out[position]

    def snapshot(self) -> tuple[int, list[Flight]]:
        """The prompts' position and all that is under way now, in order."""
        with self._lock:
            flights = [*self._out.values(), *self._waiting]
            flights.sort(key=lambda f: f.prompt.position)
            return self._prompts.state(), [Flight(f.prompt, list(f.parts)) for f in flights]

    def restore(self, position: int, flights: Iterable[Flight]) -> None:
        self._prompts.restore(position)
        self._waiting = list(flights)


def sample_groups(
    flights: Flights, engines: Sampler, verifier: Judge, decode: Decode, recipe: Recipe, step: Step
) -> Rollout:
    """Samples and verifies `rollout.prompts_per_step` groups.

    With dynamic sampling, groups whose rewards are all alike (they carry no gradient) are dropped and other prompts are
    sampled in their place, at most `algorithm.dynamic_sampling.max_rounds` rounds; then the step goes on with what
    there is (DAPO, arXiv:2503.14476, section 3.2). With over-sampling, what a round does not wait for goes back to
    `flights`.
    """
    wanted, dynamic = recipe.rollout.prompts_per_step, recipe.algorithm.dynamic_sampling
    rollout = Rollout()
    for _ in range(dynamic.max_rounds if dynamic.enabled else 1):
        missing = wanted - len(rollout.groups)
        batch = flights.take(math.ceil(missing * recipe.rollout.over_sampling))
        finished, left = _fly(batch, missing, engines, recipe, step)
        keep = recipe.rollout.unfinished == "continue"
        flights.put_back(f if keep or f.complete else f.restarted() for f in left)
        groups = [group_of(f, decode) for f in finished]
        with step.phase("verifying", "verify"):
            judge_groups(groups, verifier, recipe, rollout)
        kept, dropped = worth_training(groups, recipe)
        flights.landed(g.prompt.position for g in dropped)
        rollout.dropped_groups += len(dropped)
        rollout.groups += kept
        if len(rollout.groups) == wanted:
            break
    rollout.generate_s = step.metrics["time/generate_s"]
    return rollout


def _fly(
    batch: Sequence[Flight], enough: int, engines: Sampler, recipe: Recipe, step: Step
) -> tuple[list[Flight], list[Flight]]:
    """Samples until `enough` of the flights are complete. Returns those, and the others."""
    requests = [f.requests(recipe) for f in batch]
    with step.phase("sampling", "generate", sum(map(len, requests))) as phase:
        completions = engines.generate(requests, phase.advance, enough if enough < len(batch) else None)
    for flight in batch:
        flight.add(completions)
    finished = [f for f in batch if f.complete][:enough]
    chosen = {f.prompt.position for f in finished}
    return finished, [f for f in batch if f.prompt.position not in chosen]


def group_of(flight: Flight, decode: Decode) -> Group:
    """A complete flight's samples, not judged yet."""
    completions = [part for part in flight.parts if part is not None]
    return Group(flight.prompt, [sample_of(flight.prompt, c, decode) for c in completions])


def sample_of(prompt: Prompt, completion: Completion, decode: Decode) -> Sample:
    """A response as text: that of its last turn, and where there are several, all that was said."""

    def said(part: slice) -> str:
        return decode(completion.token_ids[part].tolist())

    *earlier, last = [("model", said(part)) for part in completion.turns]
    answers = [("environment", said(slice(*part))) for part in completion.given]
    episode = [line for turn in zip(earlier, answers, strict=True) for line in turn]
    return Sample(prompt, completion, last[1], episode=(*episode, last) if episode else ())


def worth_training(groups: Sequence[Group], recipe: Recipe) -> tuple[list[Group], list[Group]]:
    """The groups to train on, and those that dynamic sampling drops: their rewards are all alike."""
    if not recipe.algorithm.dynamic_sampling.enabled:
        return list(groups), []
    mixed = [len({s.reward for s in g.samples}) > 1 for g in groups]
    return [g for g, m in zip(groups, mixed, strict=True) if m], [
        g for g, m in zip(groups, mixed, strict=True) if not m
    ]


def shuffle_rewards(rollout: Rollout, recipe: Recipe, step: Step) -> None:
    """The control that `verifier.shuffle` asks for: a step's rewards are dealt out anew among all its samples.

    Scores stay as they were. The order hangs on the recipe's seed and the step's number alone, so a resumed run has it
    again.
    """
    if not recipe.verifier.shuffle:
        return
    samples = rollout.samples
    own = [s.reward for s in samples]
    dealt = random.Random(f"{recipe.seed} {step.number} shuffled rewards").sample(own, len(own))
    for sample, reward in zip(samples, dealt, strict=True):
        sample.reward = reward
    step.log({"reward/shuffled": sum(a != b for a, b in zip(own, dealt, strict=True))})


def verdicts_of(samples: Sequence[Sample], verifier: Judge) -> list[Verdict]:
    """One each: what the environment gave, 0 where it failed; where it gave nothing, the verifier's of the last turn."""

    def given(sample: Sample) -> Verdict | None:
        outcome = sample.completion.outcome
        if outcome is None or (outcome.reward is None and not outcome.problem):
            return None
        return Verdict(0.0 if outcome.problem else outcome.reward or 0.0)

    known = [given(s) for s in samples]
    open_ = [s for s, verdict in zip(samples, known, strict=True) if verdict is None]
    judged = iter(verifier.score([VerifyItem(s.text, s.prompt.answer, s.completion.finish_reason) for s in open_]))
    return [verdict or next(judged) for verdict in known]


def judge_groups(groups: Sequence[Group], verifier: Judge, recipe: Recipe, counts: Rollout) -> None:
    """Fills in every sample's score and reward, exactly one each, and counts tokens, truncations and time-outs."""
    samples = [s for g in groups for s in g.samples]
    limit, overlong = recipe.rollout.max_response_tokens, recipe.algorithm.overlong
    lengths = torch.tensor([s.response_tokens for s in samples])
    punishments = overlong_punishment(lengths, limit, overlong.buffer_tokens, overlong.penalty).tolist()
    for sample, verdict, punishment in zip(samples, verdicts_of(samples, verifier), punishments, strict=True):
        sample.score, sample.reward = verdict.score, verdict.score + punishment
        counts.timeouts += verdict.timed_out
        counts.errors += verdict.error is not None and not verdict.timed_out
        counts.tokens += sample.sampled_tokens
        counts.truncated += sample.completion.finish_reason == "length"
        counts.continued += bool(sample.completion.later)
        if outcome := sample.completion.outcome:
            counts.episodes += 1
            counts.turns += len(sample.completion.turns)
            counts.environment_s += outcome.seconds
            counts.environment_failures += outcome.problem is not None
            counts.environment_problem = counts.environment_problem or outcome.problem
