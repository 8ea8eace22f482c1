"""Responses of several turns: what an environment answers, and what the model is asked next.

Promises that no turn of the model's is shown to an environment twice, that sampled tokens are never encoded again, and that
an episode which was interrupted goes on where it stopped. Knows nothing about engines; one event loop calls it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from beam_rl.environments import EnvironmentFailure, EnvironmentPool, Remote, make_environments
from beam_rl.environments.frame import Frame
from beam_rl.flight import joined
from beam_rl.recipe.tree import Environment
from beam_rl.samples import Completion, Outcome, Request, sampling_seed

Answer = tuple[str | None, float | None]  # None: the episode is over; None: no reward


@dataclass
class Episode:
    """A response that is not finished."""

    asked: Request  # with all the earlier turns in its prompt
    so_far: Completion | None = None  # what came of `asked`; it ends with a sampled token
    turn: list[int] = field(default_factory=list)  # the tokens of the model's turn, asked for once or more often
    ended_by: str | None = None  # the stop string that ended the turn, None: a token did
    turns: int = 0  # that the environment was shown
    answer: "asyncio.Task[Answer] | None" = None  # to the last turn, until a token of the next one is there
    given: list[int] = field(default_factory=list)  # the answer's tokens, as the engine was told
    remote: Remote | None = None
    reward: float | None = None
    problem: str | None = None
    seconds: float = 0.0

    @property
    def told(self) -> list[int]:
        """The tokens of everything so far."""
        return self.asked.prompt_ids + ([] if self.so_far is None else self.so_far.token_ids.tolist())

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.asked.max_tokens - (0 if self.so_far is None else len(self.so_far.token_ids))

    def hear(self, said: Completion) -> None:
        """Takes what an engine has sampled; a turn's first token settles the answer before it."""
        if not len(said.token_ids):
            return
        if self.answer is not None:
            said = after(self.given, said)
            self.answer, self.given, self.turn = None, [], []
        self.turn += said.token_ids[said.sampled].tolist()
        self.ended_by = said.ended_by
        prompt = len(self.asked.prompt_ids)
        self.so_far = said if self.so_far is None else joined(self.so_far, said, prompt)

    def next_turn(self, given: list[int]) -> Request:
        """What to ask an engine after an answer of these tokens; its random numbers hang on the turn's start."""
        self.given, told = given, self.told + given
        seed = sampling_seed(self.asked.seed, len(told))
        return replace(self.asked, prompt_ids=told, seed=seed, max_tokens=self.room - len(given))

    def ended(self, reason: str) -> Completion:
        """What came of `asked`, as the end of the response or, for "abort", of an asking."""
        said = self.so_far or Completion.not_begun(self.asked, 0)
        outcome = None if reason == "abort" else Outcome(self.reward, self.problem, self.seconds)
        return replace(said, finish_reason=reason, outcome=outcome)


def after(given: Sequence[int], said: Completion) -> Completion:
    """What was sampled after an environment's tokens, with those in front."""
    ids = np.array(given, np.int32)
    return replace(
        said,
        token_ids=np.concatenate([ids, said.token_ids]),
        logp=np.concatenate([np.zeros(len(ids), np.float32), said.logp]),
        given=((0, len(ids)),) if len(ids) else (),
    )


class Episodes:
    """All episodes that are under way."""

    def __init__(
        self, environments: EnvironmentPool, frame: Frame, decode: Callable[[Sequence[int]], str], max_turns: int
    ) -> None:
        self.environments, self.frame, self.decode, self.max_turns = environments, frame, decode, max_turns
        self._open: dict[str, Episode] = {}

    def ask(self, request: Request) -> bool:
        """A response, or the rest of one that was interrupted, is asked for. Whether an answer has to come first."""
        episode = self._open.get(request.id)
        if episode is not None and episode.told == request.prompt_ids:
            episode.asked, episode.so_far = request, None
            return episode.answer is not None
        if episode is not None:  # its tokens were given up
            self._close(episode)
        self._open[request.id] = Episode(request)
        return False

    def for_engine(self, request: Request) -> Request:
        """The request as an engine needs it: with what ends a turn, and how much of the turn is there already."""
        if request.prompt is None:
            return request
        episode = self._open[request.id]
        begun = len(episode.turn) if episode.answer is None else 0
        return replace(request, prompt=None, stop_strings=self.environments.stop_strings, begun=begun)

    async def go_on(self, name: str, said: Completion | None, hush: asyncio.Event) -> Request | Completion:
        """The next turn to ask for, or the response: finished, or as it is when it was interrupted or `hush` is set.

        Args:
            name: the request's id.
            said: what an engine has answered; None: an answer of the environment's has to come first.
        """
        episode = self._open[name]
        if said is not None:
            episode.hear(said)
            if said.finish_reason != "stop":
                return episode.ended("abort") if not said.finished else self._finish(episode, said.finish_reason)
        if episode.answer is None:
            episode.answer = asyncio.create_task(self._step(episode))
        if not await _done(episode.answer, hush):
            return episode.ended("abort")
        text, _ = episode.answer.result()
        if text is None or episode.turns >= self.max_turns:
            return self._finish(episode, "stop")
        given = self.frame.around(text, ended=episode.ended_by is None)
        return episode.next_turn(given) if len(given) < episode.room else self._finish(episode, "length")

    async def _step(self, episode: Episode) -> Answer:
        """Shows the model's turn to the environment. One that fails has ended its episode."""
        request, start = episode.asked, time.perf_counter()
        try:
            if episode.remote is None:
                assert request.prompt is not None
                seed = sampling_seed(request.seed, "environment")
                episode.remote = await self.environments.begin(request.prompt.columns or {}, seed)
            text, reward = await episode.remote.step(self.decode(episode.turn), episode.ended_by)
        except EnvironmentFailure as failure:
            episode.problem, text, reward = str(failure), None, None
        episode.seconds += time.perf_counter() - start
        episode.turns += 1
        if reward is not None:
            episode.reward = (episode.reward or 0.0) + reward
        return text, reward

    def _finish(self, episode: Episode, reason: str) -> Completion:
        del self._open[episode.asked.id]
        self._close(episode)
        return episode.ended(reason)

    def _close(self, episode: Episode) -> None:
        if episode.answer is not None:
            episode.answer.cancel()
        if episode.remote is not None:
            episode.remote.end()


async def _done(answer: "asyncio.Task[Answer]", hush: asyncio.Event) -> bool:
    """Waits for the answer; False: it is not there, and there shall be quiet."""
    hushed = asyncio.create_task(hush.wait())
    await asyncio.wait({answer, hushed}, return_when=asyncio.FIRST_COMPLETED)
    hushed.cancel()
    return answer.done()


@contextlib.contextmanager
def make_episodes(
    recipe: Environment | None, frame: Frame | None, decode: Callable[[Sequence[int]], str]
) -> Iterator[Episodes | None]:
    """What plays a recipe's episodes; None where it has no environment."""
    if recipe is None or frame is None:
        yield None
        return
    with make_environments(recipe) as environments:
        yield Episodes(environments, frame, decode, recipe.max_turns)
