"""The driver's handle on the vLLM engines: one Ray actor each, all serving the same version of the weights.

Promises: every request that was handed in comes back once, whatever dies meanwhile. An engine that is lost is started
anew at once, in its place; it samples again when it holds the version that the others serve (`sync.WeightSync.mend`).
Calls may come from any thread; what engines do is awaited on one event loop of its own thread.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from beam_rl.episodes import Episodes
from beam_rl.inputs import adapter_for, engine_model, scheme_for
from beam_rl.parity.record import Records
from beam_rl.recipe.tree import Recipe
from beam_rl.rollout.sync.transport import reason
from beam_rl.samples import Completion, Request
from beam_rl.seats import Seat, Seats, own_address, unreserved

POLL_S = 0.2
STOP_S = 5.0
WATCH_S = 5.0  # between two looks at an engine that is sampling
TOGETHER_S = 0.01  # an engine takes many turns at once better than one after the other


class EnginesLost(RuntimeError):
    """An engine was lost more often than the recipe allows."""


@dataclass
class Slot:
    """An engine's place and who fills it now."""

    index: int
    seat: Seat
    actor: Any
    starting: Any  # the unfinished call of its start
    state: Literal["starting", "fresh", "serving"] = "starting"  # fresh: it has started, without the version to serve
    load: int = 0  # requests that it has to answer
    restarts: int = 0
    drafts: tuple[int, int] = (0, 0)  # tokens drafted and taken, as last looked at
    last_error: str = ""
    since: float = field(default_factory=time.monotonic)  # that its start was asked for


@dataclass
class Counters:
    """What went wrong since the last look."""

    restarts: int = 0
    redone: int = 0  # requests that were handed to another engine, or to the same one anew
    causes: list[str] = field(default_factory=list)


class Engines:
    """All engines of a run as a context; they serve once `starting` is done and the first sync has given them weights."""

    def __init__(self, recipe: Recipe, model_path: Path, logs: Path, seats: Seats | None = None) -> None:
        """seats: where the engines run; None: anywhere."""
        self.recipe, self.model_path, self.logs, self.seats = recipe, model_path, logs, seats
        self.slots: list[Slot] = []
        self.version: int | None = None  # what every serving engine serves
        self.counters = Counters()
        self.episodes: Episodes | None = None  # what plays the turns of requests that have an environment
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._hush = asyncio.Event()  # set: nothing is to be sampled
        self._drafted = (0, 0)  # and taken, beside what the slots' engines have counted since
        self._answering = 0  # calls of `_answer` under way
        self._traced: dict[int, Any] = {}  # the actors that record what they do, by their slots' indices
        self._over: Exception | None = None  # why nobody is answered any more

    def __enter__(self) -> "Engines":
        self.seats = self.seats or unreserved(self.recipe)
        threading.Thread(target=self._loop.run_forever, name="engines", daemon=True).start()
        self.slots = [Slot(i, seat, *self._new(i, seat)) for i, seat in enumerate(self.seats.engines)]
        self.submit(self._watch())
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        self._over = RuntimeError("the run is ending")
        with contextlib.suppress(TimeoutError):
            self.submit(_cancel_others()).result(timeout=STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        stopping = [s.actor.stop.remote() for s in self.slots if s.state != "starting"]  # the others would not answer
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=STOP_S)
        for slot in self.slots:
            ray.kill(slot.actor)

    @property
    def starting(self) -> list[Any]:
        """The unfinished calls of the engines' first start."""
        return [slot.starting for slot in self.slots]

    @property
    def actors(self) -> list[Any]:
        return [slot.actor for slot in self.slots]

    # -- sampling -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        groups: Sequence[Sequence[Request]],
        on_progress: Callable[[int], None] | None = None,
        enough: int | None = None,
    ) -> dict[str, Completion]:
        """Samples all requests at once; a group's requests (one prompt) go to one engine, which shares their prefix.

        Args:
            on_progress: called with the number of new completions.
            enough: when so many groups are finished, the others are interrupted.
        Returns:
            completions by request id; those of interrupted requests have the tokens so far.
        """
        return self._wait(self._generate(groups, on_progress, enough))

    async def _generate(
        self, groups: Sequence[Sequence[Request]], on_progress: Callable[[int], None] | None, enough: int | None
    ) -> dict[str, Completion]:
        done: dict[str, Completion] = {}
        open_groups = {r.id: i for i, group in enumerate(groups) for r in group}
        left = [len(group) for group in groups]
        finished = sum(not n for n in left)
        stopping: list[asyncio.Task] = []

        def took(completion: Completion) -> None:
            nonlocal finished
            done[completion.id] = completion
            if on_progress:
                on_progress(1)
            if completion.finished:
                left[open_groups[completion.id]] -= 1
                finished += not left[open_groups[completion.id]]
            if enough is not None and finished >= enough and not stopping:
                stopping.append(asyncio.create_task(self._interrupt()))

        if enough is None or finished < enough:
            shares = await self._shares(groups)
            await asyncio.gather(*(self._answer(requests, took, slot) for slot, requests in shares))
            await asyncio.gather(*stopping)
        return done

    async def sample(self, requests: Sequence[Request]) -> dict[str, Completion]:
        """One group's requests, on the engine with the least to do. For the loop of `submit`."""
        done: dict[str, Completion] = {}
        await self._answer(requests, lambda c: done.update({c.id: c}), await self._least_loaded())
        return done

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Runs something on the engines' event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Inside, nothing is sampled: what is being sampled comes back with the tokens so far, what is asked with none."""
        serving = [slot for slot in self.slots if slot.state == "serving"]
        self._hush.set()
        await asyncio.gather(*(self._ask(slot, "interrupt") for slot in serving))
        try:
            yield
        finally:
            self._hush.clear()
            standing = [slot for slot in serving if slot.state == "serving" and not self._over]
            await asyncio.gather(*(self._ask(slot, "release") for slot in standing))

    async def _interrupt(self) -> None:
        """Returns when no engine has anything to answer."""
        async with self.quiet(), self._changed:
            await self._changed.wait_for(lambda: self._over or not self._answering)

    async def _shares(self, groups: Sequence[Sequence[Request]]) -> list[tuple[Slot, list[Request]]]:
        """Who answers what: each group to the engine that has the least by then."""
        await self._least_loaded()
        serving = [slot for slot in self.slots if slot.state == "serving"]
        shares: dict[int, list[Request]] = {slot.index: [] for slot in serving}
        for group in groups:
            least = min(serving, key=lambda slot: slot.load + len(shares[slot.index]))
            shares[least.index].extend(group)
        return [(slot, shares[slot.index]) for slot in serving if shares[slot.index]]

    async def _least_loaded(self) -> Slot:
        """Waits while no engine serves."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._over or any(s.state == "serving" for s in self.slots))
        if self._over:
            raise self._over
        return min((s for s in self.slots if s.state == "serving"), key=lambda s: s.load)

    async def _answer(self, requests: Sequence[Request], took: Callable[[Completion], None], slot: Slot) -> None:
        """Has the requests answered, by one engine as long as it lives, turn by turn where there is an environment."""
        self._answering += 1
        try:
            if self.episodes is None:
                await self._sample(requests, took, slot)
            else:
                first = {r.id for r in requests if r.prompt is not None and self.episodes.ask(r)}
                turns, answers = [r for r in requests if r.id not in first], [r for r in requests if r.id in first]
                await self._play(self.episodes, turns, answers, took, slot)
        finally:
            async with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    async def _play(
        self,
        episodes: Episodes,
        requests: Sequence[Request],
        answers_first: Sequence[Request],
        took: Callable[[Completion], None],
        slot: Slot,
    ) -> None:
        """Samples a turn of each request, and goes on with each episode as soon as its environment has answered.

        Where runs are to be the same in every bit, all go on together: what an engine computes hangs on its batch.
        """
        asked, together = {r.id: r for r in (*requests, *answers_first)}, self.recipe.trainer.deterministic
        following: list[asyncio.Task[None]] = []
        ready: dict[str, Request] = {}

        async def play_on() -> None:
            now = [ready.pop(name) for name in asked if name in ready]
            if now:
                await self._play(episodes, now, [], took, slot)

        async def follow(name: str, said: Completion | None) -> None:
            after = await episodes.go_on(name, said, self._hush)
            if isinstance(after, Completion):
                took(after)
                return
            ready[name] = after
            if len(ready) == 1 and not together:  # the first takes those along that come soon
                await asyncio.sleep(TOGETHER_S)
                await play_on()

        def heard(said: Completion) -> None:
            if asked[said.id].prompt is None:
                took(said)
            else:
                following.append(asyncio.create_task(follow(said.id, said)))

        following += [asyncio.create_task(follow(r.id, None)) for r in answers_first]
        await self._sample([episodes.for_engine(r) for r in requests], heard, slot)
        await asyncio.gather(*following)
        await play_on()

    async def _sample(self, requests: Sequence[Request], took: Callable[[Completion], None], slot: Slot) -> None:
        """Has one engine sample the requests, and another one those that it leaves undone when it is lost."""
        left = {r.id: r for r in requests}
        while left and not self._hush.is_set():
            if slot.state != "serving":  # lost since it was chosen
                slot = await self._least_loaded()
                continue  # unless all are to be quiet by now
            actor, count = slot.actor, len(left)
            slot.load += count
            try:
                async for reference in actor.generate.options(num_returns="streaming").remote(list(left.values())):
                    completion = await reference
                    del left[completion.id]
                    took(completion)
            except Exception as error:
                self._lost_or_raise(slot, actor, error)
                self.counters.redone += len(left)
            finally:
                async with self._changed:
                    slot.load -= count
                    self._changed.notify_all()
        for request in left.values():
            took(Completion.not_begun(request, self.version or 0))

    # -- engines that are lost ----------------------------------------------------------------------------------------

    def lost(self, indices: Iterable[int], error: Exception) -> None:
        """Gives these engines up and starts others in their places. Raises EnginesLost when that was done too often."""

        async def replace() -> None:
            for index in indices:
                self._lost_or_raise(self.slots[index], self.slots[index].actor, error)

        self._wait(replace())

    def check(self) -> None:
        """Raises EnginesLost once an engine was lost too often."""
        if self._over:
            raise self._over

    def all_alive(self) -> bool:
        """Asks every engine; one that does not answer is lost, and starting anew."""

        self._ask_all([slot for slot in self.slots if slot.state != "starting"], lambda _: ("alive",))
        return all(slot.state != "starting" for slot in self.slots)

    def kill(self) -> None:
        """Ends the engines at once, for a run that ends anyway."""
        import ray

        self._over = RuntimeError("the run is ending")
        for slot in self.slots:
            ray.kill(slot.actor)

    def fresh(self) -> list[int]:
        """The engines that have started anew and lack the version to serve. EnginesLost when one can't start again."""
        import ray

        self.check()
        limit_s = self.recipe.cluster.start_timeout_s
        for slot in self.slots:
            if slot.state != "starting":
                continue
            if slot.seat.lost:  # noticed after the engine's own death
                ray.kill(slot.actor)
                self._start_anew(slot)
            elif ray.wait([slot.starting], timeout=0)[0]:
                try:
                    ray.get(slot.starting)
                    slot.state = "fresh"
                except Exception as error:
                    self.lost([slot.index], RuntimeError(f"did not start again: {error}"))
            elif time.monotonic() - slot.since > limit_s:
                self.lost([slot.index], TimeoutError(f"did not start again within {limit_s:g} s"))
        return [slot.index for slot in self.slots if slot.state == "fresh"]

    def serving(self) -> list[int]:
        """The engines that sample."""
        return [slot.index for slot in self.slots if slot.state == "serving"]

    def standing(self) -> list[int]:
        """The engines that can take weights: all but those that are starting anew. Waits while there is none."""
        while not (found := sorted({*self.fresh(), *self.serving()})):
            time.sleep(POLL_S)
        return found

    def serve(self, version: int, indices: Iterable[int]) -> None:
        """These engines hold `version` now, as all others that serve do."""

        async def note() -> None:
            async with self._changed:
                for index in indices:
                    self.slots[index].state = "serving"
                self.version = version
                self._changed.notify_all()

        self._wait(note())

    def take_drafts(self) -> tuple[int, int]:
        """Tokens that were drafted for the engines since the last call, and those of them that were taken.

        Without those of `drafts_apart`.
        """

        async def ask() -> list[int]:
            serving = [slot for slot in self.slots if slot.state == "serving"]
            asked = (_awaited(slot.actor.counters.remote()) for slot in serving)
            new, self._drafted = [*self._drafted], (0, 0)
            for slot, found in zip(serving, await asyncio.gather(*asked, return_exceptions=True), strict=True):
                if not isinstance(found, BaseException):  # else it is being lost
                    now = found.drafted_tokens, found.accepted_tokens
                    new = [total + n - before for total, n, before in zip(new, now, slot.drafts, strict=True)]
                    slot.drafts = now
            return new

        drafted, accepted = self._wait(ask())
        return drafted, accepted

    @contextlib.contextmanager
    def drafts_apart(self) -> Iterator[None]:
        """What is drafted inside is no step's: for what is sampled to look at, while nothing is to train on."""
        if self.recipe.rollout.speculative is None:
            yield
            return
        before = self.take_drafts()
        yield
        self.take_drafts()
        self._drafted = before

    def take_counters(self) -> Counters:
        """What went wrong since the last call."""
        taken, self.counters = self.counters, Counters()
        return taken

    def _lost_or_raise(self, slot: Slot, actor: Any, error: Exception) -> None:
        """Starts another engine if it was the engine that failed, and not what it was asked."""
        import ray

        cause = getattr(error, "cause", None) or error
        if self._over or isinstance(cause, ValueError):  # the latter: a request that no engine can answer
            raise self._over or error
        if slot.actor is not actor:  # noticed before, by another of its requests
            return
        said = reason(error)
        slot.last_error = said if said.startswith("engine ") else f"engine {slot.index}: {said}"
        slot.restarts += 1
        ray.kill(actor)  # which also ends whatever waits for it
        if slot.restarts > self.recipe.rollout.engine_restarts:
            slot.state = "starting"
            self._over = EnginesLost(
                f"{slot.last_error}; it was started anew {slot.restarts - 1} times, as often as "
                f"rollout.engine_restarts allows; its log is in {self.logs}"
            )
            raise self._over from error
        self.counters.restarts += 1
        self.counters.causes.append(slot.last_error)
        self._start_anew(slot)

    def _start_anew(self, slot: Slot) -> None:
        if slot.seat.lost:
            slot.seat = slot.seat.elsewhere()
        slot.actor, slot.starting = self._new(slot.index, slot.seat)
        slot.drafts = (0, 0)
        slot.since = time.monotonic()
        slot.state = "starting"  # last: other threads look at what a starting slot has

    async def _ask(self, slot: Slot, method: str, *args: Any) -> Any:
        """The answer to a short call; None from an engine that does not answer, and so is lost."""
        actor = slot.actor
        try:
            return await asyncio.wait_for(
                _awaited(getattr(actor, method).remote(*args)), self.recipe.rollout.engine_deadline_s
            )
        except TimeoutError:
            self._lost_or_raise(slot, actor, TimeoutError(f"no answer to {method}"))
        except Exception as error:
            self._lost_or_raise(slot, actor, error)

    async def _watch(self) -> None:
        """Looks at the engines that have something to do: one that hangs is lost like one that died."""
        while not self._over:
            await asyncio.sleep(WATCH_S)
            busy = [slot for slot in self.slots if slot.load and slot.state == "serving"]
            await asyncio.gather(*(self._ask(slot, "alive") for slot in busy), return_exceptions=True)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def sync_places(self, only: Sequence[int]) -> list[Any]:
        """Asks these engines where their workers are; the unfinished calls."""
        return [self.actors[i].sync_places.remote() for i in only]

    def join_sync(self, only: Sequence[int], joins: Sequence[dict[str, Any]]) -> list[Any]:
        """Starts these engines' joining of the trainer's weight sync; their unfinished calls."""
        return [self.actors[i].join_sync.remote(join) for i, join in zip(only, joins, strict=True)]

    def begin_update(self, only: Sequence[int]) -> list[Any]:
        """Starts a weight update in these engines; their unfinished calls."""
        return [self.actors[i].begin_update.remote() for i in only]

    def finish_update(self, only: Sequence[int], version: int) -> list[Any]:
        """Closes it: each engine has all the tensors and serves `version`; unfinished calls that tell of its adapter."""
        return [self.actors[i].finish_update.remote(version) for i in only]

    def abandon_update(self, only: Sequence[int]) -> list[Any]:
        """Ends an update that another engine's failure has cut off; the unfinished calls."""
        return [self.actors[i].abandon_update.remote() for i in only]

    def forget_prefixes(self) -> None:
        """Empties the prefix caches, so that what comes next does not hang on what was sampled before."""
        serving = [slot for slot in self.slots if slot.state == "serving"]
        self._ask_all(serving, lambda _: ("forget_prefixes",))

    def begin_traces(self) -> list[str]:
        """Has the engines that serve record what they do next: of their own steps, `rollout.profile.engine_steps`.

        Returns what kept some from it.
        """
        serving = [slot for slot in self.slots if slot.state == "serving"]
        actors = {slot.index: slot.actor for slot in serving}
        answers = self._ask_all(serving, lambda _: ("begin_trace", self.recipe.rollout.profile.engine_steps))
        self._traced = {i: actors[i] for i, problem in answers.items() if problem is None}
        return [f"engine {i}: {problem}" for i, problem in answers.items() if problem]

    def end_traces(self, path: Path) -> list[str]:
        """Writes PATH_engine_E.json for each, a table beside it; returns what kept some from being written."""
        there = [self.slots[i] for i, actor in self._traced.items() if self.slots[i].actor is actor]
        answers = self._ask_all(there, lambda slot: ("end_trace", f"{path}_engine_{slot.index}"))
        lost = [i for i, actor in self._traced.items() if self.slots[i].actor is not actor]
        return [f"engine {i}: {problem}" for i, problem in answers.items() if problem] + [
            f"engine {i} was lost meanwhile" for i in lost
        ]

    def _ask_all(self, slots: Sequence[Slot], call: Callable[[Slot], tuple[Any, ...]]) -> dict[int, Any]:
        """The answers, by index, of these engines to a method with arguments; None of those that are lost in it."""

        async def ask() -> dict[int, Any]:
            answers = await asyncio.gather(*(self._ask(slot, *call(slot)) for slot in slots))
            return {slot.index: answer for slot, answer in zip(slots, answers, strict=True)}

        return self._wait(ask())

    def each(self, method: str, *args: Any) -> None:
        """Has every engine do it, one that is starting when it has started; one that is lost meanwhile in its new form.

        For when nothing is being sampled.
        """
        done: set[Any] = set()
        while todo := [slot for slot in self.slots if slot.actor not in done]:
            self._await_starts()
            actors = [slot.actor for slot in todo]
            self._ask_all(todo, lambda _: (method, *args))
            done |= {actor for slot, actor in zip(todo, actors, strict=True) if slot.actor is actor}

    def _await_starts(self) -> None:
        """Returns when no engine is starting. EnginesLost when one does not start again."""
        import ray

        while starting := [slot.starting for slot in self.slots if slot.state == "starting"]:
            ray.wait(starting, num_returns=len(starting), timeout=WATCH_S)
            self.fresh()

    def probe(self, token_ids: list[int], routes: Any, temperature: float, sublayers: bool = True) -> Records:
        """One sequence through the first engine, looked at from inside (`rollout.engine.Engine.probe`)."""
        import ray

        return ray.get(self.actors[0].probe.remote(token_ids, routes, temperature, sublayers))

    def _wait[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _new(self, index: int, seat: Seat) -> tuple[Any, Any]:
        """An engine's actor and the unfinished call of its start."""
        import ray

        from beam_rl.rollout.engine import Engine

        actor: Any = ray.remote(Engine).options(max_concurrency=10_000, **seat.options)
        actor = actor.remote(self._settings(index, seat))
        host = () if seat.host else (actor.__ray_call__.remote(lambda _: own_address()),)
        return actor, actor.start.remote(*host)

    def _settings(self, index: int, seat: Seat) -> Any:
        from beam_rl.rollout.launch import EngineSettings

        assert self.seats is not None
        r = self.recipe.rollout
        return EngineSettings(
            model=str(engine_model(self.recipe, self.model_path)),
            dtype=self.recipe.trainer.dtype,
            max_model_len=self.recipe.data.max_prompt_tokens + r.max_response_tokens,
            max_num_seqs=r.max_num_seqs,
            max_batched_tokens=r.max_batched_tokens,
            kv_cache_gib=r.kv_cache_gib,
            gpu_memory_utilization=r.gpu_memory_utilization,
            seed=self.recipe.seed,
            routing_replay=r.routing_replay,
            host=seat.host,
            log_dir=str(self.logs),
            name=f"engine-{index}",
            adapter=adapter_for(self.recipe, self.model_path),
            fp32_head=self.recipe.trainer.numerics == "fp32_head",
            mxfp8=scheme_for(self.recipe, self.model_path),
            parallel=r.parallel,
            devices=seat.devices,
            sleeps=self.seats.shared_gpus,
            speculative=r.speculative,
            tokenizer=str(self.model_path) if self.recipe.environment else None,
            traces="none" if not r.profile.steps else "python" if r.profile.python else "operations",
            extra=r.engine_args,
        )


async def _cancel_others() -> None:
    """Ends every other task of this event loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _awaited(reference: Any) -> Any:
    return await reference
