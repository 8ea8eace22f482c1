"""A step's timeline at each pace: who works when, who waits, and how old the weights are that sampled.

Discrete events over one number a response: its length. Lengths come from a long-tailed distribution or from a run's own
samples. Seeded, plain numpy; the seconds of single operations are those of `times.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beam_rl.errors import InputError
from beam_rl.plan.case import Case
from beam_rl.plan.times import Shares, decode_step_seconds

MEAN_SHARE = 0.35  # of `max_response_tokens`: the mean response, where no run says otherwise
SPREAD = 0.9  # standard deviation of a length's logarithm
SLICE = 64  # tokens of decoding between two looks at who is still there


def draw_lengths(count: int, limit: int, seed: int) -> NDArray[np.float64]:
    """Log-normal lengths cut off at the limit, as responses are."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(MEAN_SHARE * limit) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(drawn, 1, limit)


def lengths_of_run(run: Path) -> NDArray[np.float64]:
    """Response lengths in tokens from a run's samples. InputError if it has none."""
    found = []
    for file in sorted((run / "samples").glob("*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            try:
                found += [float(len(json.loads(line)["token_ids"])) for line in lines]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"--lengths {run}: {file} has a line that is no sample") from None
    if not found:
        raise InputError(f"--lengths {run}: no samples there (logging.samples_per_step)")
    return np.asarray(found)


def finish_times(case: Case, lengths: Sequence[float], shares: Shares) -> list[float]:
    """Seconds until each response of an engine's share is done, begun together as far as the engine has room."""
    waiting = [float(length) for length in lengths[::-1]]
    room = concurrency(case)
    running: list[float] = []
    begun: list[float] = []
    now, done = 0.0, []
    while waiting or running:
        while waiting and len(running) < room:
            running.append(waiting.pop())
            begun.append(0.0)
        tokens = min(SLICE, max(1.0, min(running)))
        context = float(np.mean(begun)) + case.recipe.data.max_prompt_tokens / 2
        now += tokens * decode_step_seconds(case, len(running), context, shares)
        still = [(left - tokens, past + tokens) for left, past in zip(running, begun, strict=True)]
        done += [now for left, _ in still if left <= 0]
        running = [left for left, _ in still if left > 0]
        begun = [past for left, past in still if left > 0]
    return done


def concurrency(case: Case) -> int:
    """Requests that an engine runs at once: `max_num_seqs`, or as many of mean length as its KV cache holds."""
    from beam_rl.plan.gpu import engine_sampling

    mean = case.recipe.data.max_prompt_tokens / 2 + MEAN_SHARE * case.recipe.rollout.max_response_tokens
    each = case.engine.kv_of(round(mean))
    fits = max(1, engine_sampling(case).kv_cache // max(1, each))
    return min(case.recipe.rollout.max_num_seqs, fits)


@dataclass(frozen=True)
class Timeline:
    """Means over simulated steps."""

    pace: str
    step_s: float
    trainer_idle: float  # share of the time in which the trainer has nothing to do
    engines_idle: float  # share in which an engine samples nothing
    staleness_mean: float  # versions between the weights that began a group and those that train on it
    staleness_max: int


@dataclass(frozen=True)
class Pieces:
    """What a pace is simulated with, on the part of the cluster that it has."""

    case: Case
    shares: Shares
    lengths: NDArray[np.float64]  # one batch's responses after another; used again from the start at its end
    train_s: float  # score and updates
    sync_s: float
    slower: float  # what decoding takes longer than on the recipe's engines

    def batch(self, number: int) -> NDArray[np.float64]:
        """Response lengths of a step's groups: (prompts, samples)."""
        r = self.case.recipe.rollout
        rows = np.arange(r.prompts_per_step * r.samples_per_prompt) + number * self.case.samples
        return self.lengths[rows % len(self.lengths)].reshape(r.prompts_per_step, -1)


def in_turn(pieces: Pieces, steps: int, turn_s: float) -> Timeline:
    """Synchronous."""
    total = busy_trainer = busy_engines = 0.0
    for number in range(steps):
        longest, mean = _generation(pieces, number)
        total += longest + pieces.train_s + pieces.sync_s + turn_s
        busy_trainer += pieces.train_s + pieces.sync_s
        busy_engines += mean
    return Timeline("synchronous", total / steps, 1 - busy_trainer / total, 1 - busy_engines / total, 0.0, 0)


def one_step_off(pieces: Pieces, steps: int) -> Timeline:
    """The next batch while the trainer learns from this one."""
    total = busy_engines = 0.0
    for number in range(steps):
        longest, mean = _generation(pieces, number)
        total += max(longest, pieces.train_s) + pieces.sync_s
        busy_engines += mean
    busy_trainer = steps * (pieces.train_s + pieces.sync_s)
    return Timeline("one_step_off", total / steps, max(0.0, 1 - busy_trainer / total), 1 - busy_engines / total, 1.0, 1)


def _generation(pieces: Pieces, number: int) -> tuple[float, float]:
    """Seconds until the slowest engine has done its share of a batch, and the engines' mean."""
    engines = pieces.case.recipe.rollout.engines
    groups = pieces.batch(number)
    times = []
    for engine in range(engines):
        done = finish_times(pieces.case, groups[engine::engines].ravel().tolist(), pieces.shares)
        times.append(pieces.slower * max(done, default=0.0))
    return max(times), float(np.mean(times))


class Asynchronous:
    """Sampling all the time, at most `algorithm.staleness` versions behind, as `beam_rl.rollouts.Asynchronous` does it."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces, self.case = pieces, pieces.case
        r = self.case.recipe.rollout
        self.size, self.staleness = r.prompts_per_step, self.case.recipe.algorithm.staleness
        self.room = concurrency(self.case)
        self.engines: list[list[list[float]]] = [[] for _ in range(r.engines)]  # [group, left, past] of each request
        self.clocks = [0.0] * r.engines
        self.busy = 0.0
        self.version = self.begun = self.taken = 0
        self.born: dict[int, int] = {}  # group → version when it was begun
        self.left: dict[int, int] = {}  # group → requests that are not done
        self.ready: list[int] = []
        self.training_until: float | None = None
        self.trained: list[int] = []  # staleness of every group that was trained on
        self.trainer_busy = 0.0

    def run(self, steps: int) -> Timeline:
        """Steps after the first two, which fill the engines."""
        start = (0.0, 0.0, 0.0)
        while self.version < steps + 2:
            i = min(range(len(self.clocks)), key=self.clocks.__getitem__)
            if self.training_until is not None and self.clocks[i] >= self.training_until:
                self._sync()
                if self.version == 2:
                    start = (max(self.clocks), self.busy, self.trainer_busy)
                    self.trained.clear()
                continue
            self._advance(i)
        spent = max(self.clocks) - start[0]
        engines_idle = 1 - (self.busy - start[1]) / (spent * len(self.engines))
        trainer_idle = max(0.0, 1 - (self.trainer_busy - start[2]) / spent)
        mean = float(np.mean(self.trained))
        return Timeline("asynchronous", spent / steps, trainer_idle, max(0.0, engines_idle), mean, max(self.trained))

    def _advance(self, i: int) -> None:
        """One engine decodes a slice, or waits for whoever is next to do something."""
        running = self.engines[i]
        self._fill(running)
        if not running:
            later = [clock for clock in self.clocks if clock > self.clocks[i]]
            later += [self.training_until] if self.training_until is not None else []
            self.clocks[i] = min(later) if later else self.clocks[i] + 1.0
            return
        tokens = min(SLICE, max(1.0, min(request[1] for request in running)))
        context = float(np.mean([request[2] for request in running])) + self.case.recipe.data.max_prompt_tokens / 2
        each = decode_step_seconds(self.case, len(running), context, self.pieces.shares)
        spent = tokens * self.pieces.slower * each
        self.clocks[i] += spent
        self.busy += spent
        for request in running:
            request[1] -= tokens
            request[2] += tokens
        for request in [request for request in running if request[1] <= 0]:
            running.remove(request)
            group = int(request[0])
            self.left[group] -= 1
            if not self.left[group]:
                self.ready.append(group)
        self._train(self.clocks[i])

    def _fill(self, running: list[list[float]]) -> None:
        while len(running) < self.room and self.begun < self.size * (self.version + self.staleness + 1):
            number, row = divmod(self.begun, self.size)
            lengths = self.pieces.batch(number)[row]
            running += [[self.begun, float(length), 0.0] for length in lengths]
            self.born[self.begun], self.left[self.begun] = self.version, len(lengths)
            self.begun += 1

    def _train(self, now: float) -> None:
        """Begins a step if the trainer is free and there is a batch that leaves no group to grow too old."""
        if self.training_until is not None or len(self.ready) < self.size:
            return
        chosen = sorted(self.ready, key=self.born.__getitem__)[: self.size]
        rest = sorted(born for group, born in self.born.items() if group not in set(chosen))
        number = self.version + 1
        if any(born + self.staleness + 1 <= number + i // self.size for i, born in enumerate(rest)):
            return
        self.trained += [self.version - self.born.pop(group) for group in chosen]
        self.ready = [group for group in self.ready if group in self.born]
        self.training_until = now + self.pieces.train_s
        self.trainer_busy += self.pieces.train_s + self.pieces.sync_s

    def _sync(self) -> None:
        assert self.training_until is not None
        end = self.training_until + self.pieces.sync_s
        self.clocks = [max(clock, end) for clock in self.clocks]
        self.version, self.training_until = self.version + 1, None
        self._train(end)


def simulate(case: Case, shares: Shares, lengths: NDArray[np.float64], steps: int = 8) -> list[Timeline]:
    """The three paces on this cluster's GPUs.

    Where the recipe's trainer and engines share GPUs, the paces that need separate ones get half of them each; where they
    have their own, the synchronous pace is given all of them for both, in turn.
    """
    from beam_rl.plan.times import sync_seconds, train_seconds, turn_seconds

    parallel, r = case.recipe.trainer.parallel, case.recipe.rollout
    mean = float(lengths.mean()) + case.recipe.data.max_prompt_tokens / 2
    score, update, optimizer = train_seconds(case, case.samples * mean, mean, shares)
    train, sync = score + update + optimizer, sync_seconds(case, shares)
    engine_gpus = r.engines * r.parallel.workers
    if case.placement == "colocated":
        together = Pieces(case, shares, lengths, train, sync, 1.0)
        apart = Pieces(case, shares, lengths, 2 * train, sync, 2.0)
    else:
        both = parallel.ranks + engine_gpus
        apart = Pieces(case, shares, lengths, train, sync, 1.0)
        together = Pieces(case, shares, lengths, train * parallel.ranks / both, sync, engine_gpus / both)
    return [in_turn(together, steps, turn_seconds(case)), one_step_off(apart, steps), Asynchronous(apart).run(steps)]
