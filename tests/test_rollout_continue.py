"""A real engine whose requests are interrupted: they keep what they have, and what continues them is right.

Shares the engines of test_rollout_engine.py, which kills them at its end: this file comes first.
"""

import time
from typing import Any

import numpy as np
import ray
from rollout_fixtures import VOCABULARY, Engines, Reference, RunningEngine

from beam_rl.flight import joined
from beam_rl.samples import Completion, Request

pytest_plugins = ["rollout_fixtures"]

LOGP_TOLERANCE = 2e-5


def requests(count: int, prompt: int, response: int, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    draw = lambda: rng.integers(3, VOCABULARY, prompt).tolist()  # noqa: E731
    return [Request(f"cut{seed}-{i}", draw(), 1000 * seed + i, response, 1.0) for i in range(count)]


def begin(engine: RunningEngine, asked: list[Request]) -> Any:
    return engine.actor.generate.options(num_returns="streaming").remote(asked)


def rest(stream: Any) -> dict[str, Completion]:
    return {c.id: c for c in (ray.get(ref, timeout=60) for ref in stream)}


def rest_after_interrupt(engine: RunningEngine, asked: list[Request], after_s: float) -> dict[str, Completion]:
    stream = begin(engine, asked)
    time.sleep(after_s)
    engine.call("interrupt")
    got = rest(stream)
    engine.call("release")
    return got


def test_interrupted_requests_keep_what_they_have_and_go_on(engines: Engines, references: dict[str, Reference]) -> None:
    asked = requests(40, prompt=30, response=60, seed=40)  # more than the KV cache holds: some have not begun
    got = rest_after_interrupt(engines.fp32, asked, 0.6)
    assert set(got) == {r.id for r in asked}
    cut = [r for r in asked if not got[r.id].finished]
    assert any(len(got[r.id].token_ids) for r in cut)
    going_on = [
        Request(
            r.id,
            [*r.prompt_ids, *got[r.id].token_ids.tolist()],
            r.seed + 1,
            r.max_tokens - len(got[r.id].token_ids),
            1.0,
        )
        for r in cut
    ]
    later = engines.fp32.sample(going_on)
    for request in asked:
        done = got[request.id]
        if not done.finished:
            done = (
                joined(done, later[request.id], len(request.prompt_ids)) if len(done.token_ids) else later[request.id]
            )
        logp, routes = references["old"].score(request.prompt_ids, done.token_ids)
        np.testing.assert_allclose(done.logp, logp, atol=LOGP_TOLERANCE, rtol=0)
        assert done.finished and done.routes is not None
        np.testing.assert_array_equal(np.sort(done.routes, -1), routes)
    assert engines.fp32.call("counters").in_flight == 0


def test_nothing_begins_between_interrupt_and_release(engines: Engines) -> None:
    asked = requests(3, prompt=8, response=8, seed=41)
    engines.fp32.call("interrupt")
    none = engines.fp32.sample(asked)
    assert {(c.finish_reason, len(c.token_ids)) for c in none.values()} == {("abort", 0)}
    engines.fp32.call("release")
    assert all(c.finished for c in engines.fp32.sample(asked).values())


def test_an_interrupted_engine_keeps_no_routes_and_takes_new_weights(engines: Engines) -> None:
    rest_after_interrupt(engines.fp32, requests(20, prompt=30, response=60, seed=42), 0.3)
    engines.fp32.sample(requests(2, prompt=8, response=4, seed=43))
    counters = engines.fp32.call("counters")
    assert counters.in_flight == counters.routes_held == 0
    engines.fp32.call("alive")
