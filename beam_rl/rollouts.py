"""Where a step's samples come from, at the recipe's pace: in turn with training, one step ahead of it, or all the time.

All paces answer the same calls: `take` a step's batch; `hold` before the weights change, until no engine is sampling;
`go_on` afterwards. Knows nothing about the trainer.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from beam_rl.engines import Engines
from beam_rl.flight import Flight
from beam_rl.recipe.tree import Recipe
from beam_rl.samples import Group
from beam_rl.sampling import Decode, Flights, Judge, Rollout, group_of, judge_groups, sample_groups, worth_training
from beam_rl.step import Quiet, Step

POLL_S = 0.2


class Rollouts(Protocol):
    flights: Flights

    def take(self, step: Step) -> Rollout:
        """The step's groups; waits for them."""

    def hold(self) -> None:
        """Brings the engines to rest. What is under way then is continued later, or was finished first."""

    def go_on(self, version: int) -> None:
        """The engines serve `version` now."""


def make_rollouts(
    flights: Flights, engines: Engines, verifier: Judge, decode: Decode, recipe: Recipe, mend: Callable[[], None]
) -> Rollouts:
    """The recipe's pace. mend: what gives engines that were started anew their weights; called while waiting."""
    paces = {"synchronous": Synchronous, "one_step_off": OneStepOff, "asynchronous": Asynchronous}
    return paces[recipe.rollout.pace](flights, engines, verifier, decode, recipe, mend)


class Synchronous:
    """Samples a step's batch when the step asks for it, with the weights of that time."""

    def __init__(
        self,
        flights: Flights,
        engines: Engines,
        verifier: Judge,
        decode: Decode,
        recipe: Recipe,
        mend: Callable[[], None],
    ) -> None:
        self.flights, self.engines, self.verifier, self.decode = flights, engines, verifier, decode
        self.recipe, self.mend = recipe, mend

    def take(self, step: Step) -> Rollout:
        rollout = attend(self._start(step), self.mend)
        self._landed(rollout.groups)
        return rollout

    def hold(self) -> None:
        pass

    def go_on(self, version: int) -> None:
        pass

    def _start(self, step: Step) -> "Future[Rollout]":
        parts = (self.flights, self.engines, self.verifier, self.decode, self.recipe)
        return beside(lambda: sample_groups(*parts, step))

    def _landed(self, groups: list[Group]) -> None:
        self.flights.landed(g.prompt.position for g in groups)


class OneStepOff(Synchronous):
    """Samples the next step's batch while the trainer learns from this one's."""

    _next: "Future[Rollout] | None" = None

    def take(self, step: Step) -> Rollout:
        with step.phase("waiting for samples", "generate"):
            rollout = attend(self._next or self._ahead(step.number), self.mend)
        self._landed(rollout.groups)
        self._next = self._ahead(step.number + 1)
        return rollout

    def hold(self) -> None:
        if self._next is not None:
            attend(self._next, self.mend)

    def _ahead(self, number: int) -> "Future[Rollout]":
        return self._start(Step(number, Quiet()))


class Asynchronous(Synchronous):
    """Samples all the time; a batch is what is finished first, but never older than `algorithm.staleness` allows.

    At most prompts_per_step · (version + staleness + 1) groups are begun before `version` + 1 is served (the rule of
    AReaL, arXiv:2505.24298, section 5.1), so a batch can always be made of groups that are young enough. A group that
    would be too old for the next step is waited for: dropping it would prefer short responses.

    Everything that changes does so on the engines' event loop.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._size, self._staleness = self.recipe.rollout.prompts_per_step, self.recipe.algorithm.staleness
        self._version = self._taken = 0
        self._dropped = 0  # since the last batch was asked for; bounds the wait
        self._unseen = Rollout()  # what became of dropped groups, for the next batch's counts
        self._born: dict[int, int] = {}  # the version served when a group was begun; of all that are under way
        self._ready: dict[int, tuple[Group, Rollout]] = {}  # in the order in which they were finished
        self._sampling = 0  # groups that engines are answering
        self._going = False
        self._changed = asyncio.Condition()
        self._judging = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._since = time.perf_counter()

    def take(self, step: Step) -> Rollout:
        with step.phase("waiting for samples", "generate"):
            rollout = attend(self.engines.submit(self._take(step.number)), self.mend)
        rollout.generate_s, self._since = time.perf_counter() - self._since, time.perf_counter()
        return rollout

    def hold(self) -> None:
        attend(self.engines.submit(self._hold()), self.mend)

    def go_on(self, version: int) -> None:
        self.engines.submit(self._go_on(version)).result()

    async def _take(self, number: int) -> Rollout:
        self._taken, self._dropped = number - 1, 0
        await self._fill()
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure or self._choose(number) is not None)
        if self._failure:
            raise self._failure
        rollout, self._unseen = self._unseen, Rollout()
        for position in self._choose(number) or ():
            group, counts = self._ready.pop(position)
            del self._born[position]
            rollout.add(counts)
            rollout.groups.append(group)
        self._landed(rollout.groups)
        self._taken = number
        await self._fill()
        return rollout

    def _choose(self, number: int) -> list[int] | None:
        """Positions of the groups for step `number`: the oldest that are finished; None: wait.

        A batch has to leave so few old groups behind that the steps after it can take each of them in time.
        """
        rounds = self.recipe.algorithm.dynamic_sampling.max_rounds
        if len(self._ready) < self._size and self._dropped < rounds * self._size:
            return None
        chosen = sorted(self._ready, key=lambda p: self._born[p])[: self._size]
        left = sorted(born for p, born in self._born.items() if p not in chosen)
        last_steps = [born + self._staleness + 1 for born in left]
        in_time = all(last > number + i // self._size for i, last in enumerate(last_steps))
        return chosen if in_time else None

    async def _fill(self) -> None:
        """Begins as many groups as the staleness allows."""
        room = self._size * (self._version - self._taken + self._staleness + 1) - len(self._born)
        if not self._going or room <= 0:
            return
        for flight in self.flights.take(room):
            begun = self._version if flight.version is None else flight.version
            self._born[flight.prompt.position] = min(self._version, begun)
            task = asyncio.create_task(self._fly(flight))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _fly(self, flight: Flight) -> None:
        """One group, until it is verified or dropped."""
        try:
            while not flight.complete:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._going)
                    self._sampling += 1
                try:
                    flight.add(await self.engines.sample(flight.requests(self.recipe)))
                finally:
                    await self._note(sampling=-1)
            group, counts = group_of(flight, self.decode), Rollout()
            async with self._judging:
                await asyncio.to_thread(judge_groups, [group], self.verifier, self.recipe, counts)
            await self._finished(group, counts)
        except BaseException as error:
            self._failure = error
            await self._note()

    async def _finished(self, group: Group, counts: Rollout) -> None:
        position, (_, dropped) = group.prompt.position, worth_training([group], self.recipe)
        if not dropped:
            self._ready[position] = group, counts
            await self._note()
            return
        del self._born[position]
        self.flights.landed([position])
        self._dropped += 1
        self._unseen.dropped_groups += 1
        self._unseen.add(counts)
        await self._note()
        await self._fill()

    async def _hold(self) -> None:
        self._going = False
        async with self.engines.quiet(), self._changed:
            await self._changed.wait_for(lambda: not self._sampling)
        if self._failure:
            raise self._failure

    async def _go_on(self, version: int) -> None:
        if not self._going and not self._born:
            self._since = time.perf_counter()  # the first rollouts begin
        self._version, self._taken, self._going = version, max(self._taken, version), True  # a resumed run: not from 0
        await self._note()
        await self._fill()

    async def _note(self, sampling: int = 0) -> None:
        async with self._changed:
            self._sampling += sampling
            self._changed.notify_all()


def beside[T](work: Callable[[], T]) -> "Future[T]":
    """Runs `work` in a thread of its own, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def attend[T](future: "Future[T]", mend: Callable[[], None]) -> T:
    """The future's result; while waiting, and so while the trainer rests, calls `mend` again and again."""
    while True:
        try:
            return future.result(timeout=POLL_S)
        except TimeoutError:
            if future.done():
                return future.result()
            mend()
