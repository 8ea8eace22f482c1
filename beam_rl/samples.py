"""What flows through a step: prompts, sampled responses, and the batch the trainer sees.

Plain numpy, so that it travels through Ray without copies. Knows nothing about Megatron, vLLM or Ray.
"""

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, ready to sample from."""

    position: int  # place in the run's endless, seeded order: names the prompt in requests and logs
    row: int  # row of the data set
    token_ids: list[int]
    answer: str
    columns: Mapping[str, Any] | None = None  # the row itself, kept where an environment is to see it


@dataclass(frozen=True)
class Request:
    """One response to sample. `seed` alone decides the random numbers, whatever else the engine is running."""

    id: str
    prompt_ids: list[int]
    seed: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    prompt: Prompt | None = None  # where an environment answers what is sampled, and there may be more turns
    stop_strings: tuple[str, ...] = ()  # texts that end it too; the tokens that complete one are kept
    begun: int = 0  # last tokens of the prompt that are part of what is sampled, where such a text may begin


def sampling_seed(*parts: object) -> int:
    """A 63-bit seed from the parts' text: stable over processes and versions of Python."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class Outcome:
    """What an environment made of a response."""

    reward: float | None = None  # the sum of what it gave; None: it gave nothing
    problem: str | None = None  # why it could not go on
    seconds: float = 0.0  # that it took for its answers


@dataclass(frozen=True)
class Completion:
    """What an engine returns for a request.

    With an environment it holds all turns: the tokens in `given` are the environment's, which nobody sampled.

    `logp` is the engine's natural-log probability of each sampled token under the distribution it was drawn from
    (temperature applied). `routes` has one row for each token that went through the model, prompt tokens + response
    tokens − 1, for the model's MoE layers in order: global layer number `moe_layers[j]` for column j; expert ids are
    logical, in the model's own order. None where the engine was not asked to record routes.
    """

    id: str
    token_ids: NDArray[np.int32]  # (response,)
    logp: NDArray[np.float32]  # (response,) 0 where nobody sampled
    routes: NDArray[np.uint8] | NDArray[np.uint16] | None  # (prompt + response - 1, moe layers, top-k)
    finish_reason: str  # "stop" or "length"; "abort" where it was interrupted and can go on
    version: int  # of the weights that sampled its first token
    later: tuple[tuple[int, int], ...] = ()  # (first token, version) of each part that later weights sampled
    given: tuple[tuple[int, int], ...] = ()  # (first token, end) of each answer of an environment's
    outcome: Outcome | None = None  # of an environment, when it is finished
    ended_by: str | None = None  # the stop string that ended it; None: a stop token did, or it has not stopped

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """(response,) True where the engine sampled."""
        mask = np.ones(len(self.token_ids), np.bool_)
        for start, end in self.given:
            mask[start:end] = False
        return mask

    @property
    def turns(self) -> list[slice]:
        """Of the token ids: what was sampled at a stretch, an environment's answers between."""
        edges = [0, *(edge for part in self.given for edge in part), len(self.token_ids)]
        return [slice(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]

    @property
    def finished(self) -> bool:
        return self.finish_reason != "abort"

    @classmethod
    def not_begun(cls, request: Request, version: int) -> "Completion":
        """Of a request that was interrupted before it had a token, or whose tokens are given up."""
        return cls(request.id, np.empty(0, np.int32), np.empty(0, np.float32), None, "abort", version)


@dataclass
class Sample:
    """A response with everything the trainer needs to learn from it."""

    prompt: Prompt
    completion: Completion
    text: str = ""  # the decoded response, without special tokens; of several turns the last one's
    reward: float = 0.0  # what the advantage is computed from (the score, overlong punishment included)
    score: float = 0.0  # the verifier's score alone, or what the environment gave
    advantage: float = 0.0
    weight: float = 0.0  # of each sampled token in the mini-batch's loss; a mini-batch's loss is Σ weight · token loss

    episode: Sequence[tuple[str, str]] = ()  # of several turns: ("model" or "environment", what it said)

    @property
    def response_tokens(self) -> int:
        """All that follows the prompt, an environment's tokens included."""
        return len(self.completion.token_ids)

    @property
    def sampled_tokens(self) -> int:
        return int(self.completion.sampled.sum())

    @property
    def model_tokens(self) -> int:
        """Tokens the model reads to score the response: all but the last."""
        return len(self.prompt.token_ids) + self.response_tokens - 1

    def record(self, prompt_text: str) -> dict[str, object]:
        """What a person wants to read of it, as JSON."""
        return {
            "prompt": prompt_text,
            "position": self.prompt.position,
            "row": self.prompt.row,
            "text": self.text,
            "answer": self.prompt.answer,
            "score": self.score,
            "reward": self.reward,
            "advantage": self.advantage,
            "finish_reason": self.completion.finish_reason,
            "version": self.completion.version,
            "later_versions": [list(part) for part in self.completion.later],
            "token_ids": self.completion.token_ids.tolist(),
        } | self._episode_record()

    def _episode_record(self) -> dict[str, object]:
        """What there is to say of several turns, and of an environment that could not go on."""
        turns = {"turns": [list(turn) for turn in self.episode]} if self.episode else {}
        problem = self.completion.outcome.problem if self.completion.outcome else None
        return turns | ({"environment_problem": problem} if problem else {})


@dataclass
class Group:
    """The samples of one prompt; the advantage is relative to them."""

    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True)
class MicroBatch:
    """Samples packed end to end; the model reads `tokens` and predicts `targets`.

    For sample i of the pack the slice `cu_tokens[i]:cu_tokens[i + 1]` of every (tokens,) array is its prompt and
    response without the last token. Positions, attention and loss masks restart at each slice.
    """

    tokens: NDArray[np.int64]  # (tokens,)
    targets: NDArray[np.int64]  # (tokens,) the next token of the same sample
    cu_tokens: NDArray[np.int32]  # (samples + 1,) starts at 0
    response: NDArray[np.bool_]  # (tokens,) True where the target is a token that was sampled: the loss mask
    logp_engine: NDArray[np.float32]  # (tokens,) as sampled; 0 outside the mask
    advantage: NDArray[np.float32]  # (tokens,) the sample's, repeated
    weight: NDArray[np.float32]  # (tokens,) loss weight; 0 outside the mask
    sample: NDArray[np.int32]  # (tokens,) index of the sample in the list that was packed
    routes: NDArray[np.uint8] | NDArray[np.uint16] | None  # (tokens, moe layers, top-k)
    logp_old: NDArray[np.float32] | None = None  # (tokens,) the trainer's own, before the step's first update
    logp_reference: NDArray[np.float32] | None = None  # (tokens,) the frozen starting policy's, for the KL term


def pack_one(samples: Sequence[Sample], indices: Sequence[int]) -> MicroBatch:
    """Packs `samples[i] for i in indices` into one micro-batch, in that order."""
    tokens, targets, response, logp, advantage, weight, which = ([] for _ in range(7))
    routes: list[Any] = []
    for i in indices:
        s = samples[i]
        ids = np.concatenate([np.asarray(s.prompt.token_ids, np.int64), s.completion.token_ids.astype(np.int64)])
        n, first = s.model_tokens, len(s.prompt.token_ids) - 1
        mask = np.concatenate([np.zeros(first, np.bool_), s.completion.sampled])
        spread = np.zeros(n, np.float32)
        spread[first:] = s.completion.logp
        tokens.append(ids[:-1])
        targets.append(ids[1:])
        response.append(mask)
        logp.append(spread)
        advantage.append(np.full(n, s.advantage, np.float32))
        weight.append(np.where(mask, np.float32(s.weight), np.float32(0)))
        which.append(np.full(n, i, np.int32))
        routes.append(s.completion.routes)
    has_routes = routes[0] is not None
    return MicroBatch(
        tokens=np.concatenate(tokens),
        targets=np.concatenate(targets),
        cu_tokens=np.cumsum([0, *(len(t) for t in tokens)], dtype=np.int32),
        response=np.concatenate(response),
        logp_engine=np.concatenate(logp),
        advantage=np.concatenate(advantage),
        weight=np.concatenate(weight),
        sample=np.concatenate(which),
        routes=np.concatenate(routes) if has_routes else None,
    )


def plan_packs(lengths: Sequence[int], token_budget: int, ranks: int) -> list[list[list[int]]]:
    """Deals samples out to the micro-batches of data-parallel ranks, balanced by tokens.

    Every rank gets the same number of micro-batches, the fewest with which none exceeds `token_budget`: longest sample
    first, each into the micro-batch with the fewest tokens so far. The plan hangs on the lengths alone.

    Returns:
        for each rank, for each micro-batch, indices of samples, ascending; a micro-batch may be empty.
    Raises:
        ValueError: a sample alone exceeds the budget.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > token_budget:
        raise ValueError(f"trainer.token_budget = {token_budget}: a sample has {lengths[order[0]]} tokens")
    count = max(1, -(-sum(lengths) // (token_budget * ranks)))
    while True:
        loads = [(0, b) for b in range(count * ranks)]
        packs: list[list[int]] = [[] for _ in loads]
        for i in order:
            tokens, b = heapq.heappop(loads)
            packs[b].append(i)
            heapq.heappush(loads, (tokens + lengths[i], b))
        if max(loads)[0] <= token_budget:
            return [[sorted(packs[m * ranks + rank]) for m in range(count)] for rank in range(ranks)]
        count += 1
