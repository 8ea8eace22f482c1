"""A prompt's responses while they are being sampled: what each has so far, and what is still to ask for.

A response that was interrupted goes on as prompt + tokens so far, under the weights of that time; each of its tokens
keeps the log-probability and the routes of the weights that sampled it. What an environment answered goes on the same
way. Pure; knows nothing about engines and environments.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from beam_rl.recipe.tree import Recipe
from beam_rl.samples import Completion, Outcome, Prompt, Request, sampling_seed


@dataclass
class Flight:
    """One group under way. `parts[k]` is what sample k has so far; None: nothing."""

    prompt: Prompt
    parts: list[Completion | None]

    @classmethod
    def start(cls, prompt: Prompt, recipe: Recipe) -> "Flight":
        return cls(prompt, [None] * recipe.rollout.samples_per_prompt)

    @property
    def complete(self) -> bool:
        return all(part is not None and part.finished for part in self.parts)

    @property
    def version(self) -> int | None:
        """Of the oldest weights that sampled a token of it."""
        return min((part.version for part in self.parts if part is not None), default=None)

    def requests(self, recipe: Recipe) -> list[Request]:
        """What is still to sample. A sample's random numbers hang on the seed, the prompt, its number and its start."""
        wanted = []
        for k, part in enumerate(self.parts):
            if part is None or not part.finished:
                so_far = [] if part is None else part.token_ids.tolist()
                wanted.append(_request(self.prompt, k, so_far, recipe))
        return wanted

    def add(self, completions: Mapping[str, Completion]) -> None:
        """Takes what came back, by the requests' ids; an interrupted request that gave no token leaves no trace."""
        for k, part in enumerate(self.parts):
            new = completions.get(request_id(self.prompt, k))
            if new is not None and (part is None or not part.finished) and (len(new.token_ids) or new.finished):
                self.parts[k] = new if part is None else joined(part, new, len(self.prompt.token_ids))

    def restarted(self) -> "Flight":
        """The same prompt with nothing sampled."""
        return Flight(self.prompt, [None] * len(self.parts))

    def without_unfinished(self) -> "Flight":
        """The same with nothing of the responses that are not finished."""
        return Flight(self.prompt, [part if part is not None and part.finished else None for part in self.parts])


def request_id(prompt: Prompt, k: int) -> str:
    return f"train-{prompt.position}-{k}"


def _request(prompt: Prompt, k: int, so_far: list[int], recipe: Recipe) -> Request:
    r = recipe.rollout
    start = [len(so_far)] if so_far else []
    return Request(
        id=request_id(prompt, k),
        prompt_ids=prompt.token_ids + so_far,
        seed=sampling_seed(recipe.seed, "train", prompt.position, k, *start),
        max_tokens=r.max_response_tokens - len(so_far),
        temperature=r.temperature,
        top_p=r.top_p,
        prompt=prompt if recipe.environment else None,
    )


def joined(first: Completion, rest: Completion, prompt_tokens: int) -> Completion:
    """One response from an interrupted part, or a turn, and what came after it, asked for as prompt + that part.

    The later part's routes begin with rows for tokens that the first part has rows for already: those of the weights
    that sampled are kept.
    """
    routes = None
    if not len(rest.token_ids):
        routes = first.routes
    elif first.routes is not None and rest.routes is not None:
        known = prompt_tokens + len(first.token_ids) - 1
        routes = np.concatenate([first.routes[:known], rest.routes[known:]])
    start = len(first.token_ids)
    served = first.later[-1][1] if first.later else first.version
    newer = len(rest.token_ids) and rest.version != served
    return replace(
        rest,
        token_ids=np.concatenate([first.token_ids, rest.token_ids]),
        logp=np.concatenate([first.logp, rest.logp]),
        routes=routes,
        version=first.version,
        later=(*first.later, (start, rest.version)) if newer else first.later,
        given=(*first.given, *((start + a, start + b) for a, b in rest.given)),
    )


def save(flights: Sequence[Flight], folder: Path) -> None:
    """Writes flights as flights.json and flights.npz; `load` reads them back."""
    arrays: dict[str, Any] = {}
    index = []
    for flight in flights:
        parts: list[dict[str, Any] | None] = []
        for k, part in enumerate(flight.parts):
            if part is None:
                parts.append(None)
                continue
            found = {"token_ids": part.token_ids, "logp": part.logp, "routes": part.routes}
            name = request_id(flight.prompt, k)
            arrays |= {f"{name}/{key}": array for key, array in found.items() if array is not None}
            said = {"finish_reason": part.finish_reason, "version": part.version, "later": part.later}
            parts.append(said | {"given": part.given, "outcome": asdict(part.outcome) if part.outcome else None})
        index.append({"position": flight.prompt.position, "parts": parts})
    (folder / "flights.json").write_text(json.dumps(index), encoding="utf-8")
    np.savez(folder / "flights.npz", **arrays)


def load(folder: Path, prompt_at: Callable[[int], Prompt]) -> list[Flight]:
    """What `save` wrote; none where it wrote nothing. prompt_at: the prompt at a position of the run's order."""
    if not (folder / "flights.json").exists():
        return []
    flights = []
    with np.load(folder / "flights.npz", allow_pickle=False) as arrays:
        for entry in json.loads((folder / "flights.json").read_text(encoding="utf-8")):
            prompt = prompt_at(entry["position"])
            parts = [_part(request_id(prompt, k), part, arrays) for k, part in enumerate(entry["parts"])]
            flights.append(Flight(prompt, parts))
    return flights


def _part(name: str, part: dict[str, Any] | None, arrays: Mapping[str, Any]) -> Completion | None:
    if part is None:
        return None
    return Completion(
        id=name,
        token_ids=arrays[f"{name}/token_ids"],
        logp=arrays[f"{name}/logp"],
        routes=arrays.get(f"{name}/routes"),
        finish_reason=part["finish_reason"],
        version=part["version"],
        later=tuple((start, version) for start, version in part["later"]),
        given=tuple((start, end) for start, end in part.get("given", ())),
        outcome=Outcome(**part["outcome"]) if part.get("outcome") else None,
    )
