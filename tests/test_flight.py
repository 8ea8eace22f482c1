"""Responses under way: what is asked for next, how interrupted parts become one response, and what a checkpoint keeps."""

from pathlib import Path

import numpy as np
import pytest

from beam_rl import flight
from beam_rl.flight import Flight
from beam_rl.recipe.load import load
from beam_rl.samples import Completion, Prompt

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
RECIPE = load(TINY, ["rollout.samples_per_prompt=3", "rollout.max_response_tokens=10"])
PROMPT = Prompt(position=7, row=3, token_ids=[1, 2, 3], answer="a")


def completion(k: int, tokens: list[int], reason: str, version: int, read: int = 3, routes: bool = True) -> Completion:
    """As an engine returns it for a request of `read` tokens; rows of routes hold the version that made them."""
    rows = np.full((read + len(tokens) - 1, 2, 4), version, np.uint8) if routes and tokens else None
    logp = -np.arange(1, len(tokens) + 1, dtype=np.float32) - 100 * version
    return Completion(f"train-7-{k}", np.array(tokens, np.int32), logp, rows, reason, version)


def by_id(*completions: Completion) -> dict[str, Completion]:
    return {c.id: c for c in completions}


def test_an_interrupted_response_goes_on_where_it_stopped():
    f = Flight.start(PROMPT, RECIPE)
    first = f.requests(RECIPE)
    f.add(by_id(completion(0, [5, 6], "stop", 1), completion(1, [7, 8, 9], "abort", 1), completion(2, [], "abort", 1)))
    assert not f.complete and f.version == 1
    one, two = f.requests(RECIPE)
    assert (one.id, one.prompt_ids, one.max_tokens) == ("train-7-1", [1, 2, 3, 7, 8, 9], 7)
    assert one.seed != first[1].seed  # the same random numbers would repeat the same draws
    assert two == first[2]  # nothing was sampled of it
    f.add(by_id(completion(1, [4, 0], "stop", 3, read=6), completion(2, [1] * 10, "length", 3)))
    assert f.complete and f.requests(RECIPE) == []
    whole = f.parts[1]
    assert whole is not None and whole.token_ids.tolist() == [7, 8, 9, 4, 0]
    assert (whole.version, whole.later, whole.finish_reason) == (1, ((3, 3),), "stop")
    assert whole.logp.tolist() == [-101, -102, -103, -301, -302]  # of the weights that sampled each
    assert whole.routes is not None and whole.routes[:, 0, 0].tolist() == [1] * 5 + [3] * 2


def test_a_part_without_routes_leaves_the_response_without():
    f = Flight(PROMPT, [completion(0, [7], "abort", 1, routes=False)])
    f.add(by_id(completion(0, [0], "stop", 2, read=4)))
    assert f.parts[0] is not None and f.parts[0].routes is None


def test_what_comes_back_twice_counts_once():
    f = Flight(PROMPT, [completion(0, [7, 0], "stop", 1)])
    f.add(by_id(completion(0, [9, 9, 9], "stop", 2)))
    assert f.parts[0] is not None and f.parts[0].token_ids.tolist() == [7, 0]


def test_flights_come_back_from_a_checkpoint_as_they_were(tmp_path: Path):
    parts = [completion(0, [5], "stop", 1), None, completion(2, [7, 8], "abort", 2, routes=False)]
    saved = [Flight(PROMPT, parts), Flight(Prompt(9, 1, [4], "b"), [None])]
    flight.save(saved, tmp_path)
    back = flight.load(tmp_path, {7: PROMPT, 9: Prompt(9, 1, [4], "b")}.__getitem__)
    assert [f.prompt for f in back] == [f.prompt for f in saved]
    for one, two in zip(back[0].parts, parts, strict=True):
        if one is None or two is None:
            assert one is two is None
            continue
        assert (one.id, one.finish_reason, one.version, one.later) == (
            two.id,
            two.finish_reason,
            two.version,
            two.later,
        )
        for name in ("token_ids", "logp", "routes"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert flight.load(tmp_path / "none", pytest.fail) == []
