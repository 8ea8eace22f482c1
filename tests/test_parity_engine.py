"""A real engine computes what transformers computes, sub-layer by sub-layer."""

import numpy as np
import pytest
import ray
from rollout_fixtures import Engines, RunningEngine

from beam_rl.parity.compare import Side, compare
from beam_rl.parity.record import AFTER, BEFORE, LAYER, MARGIN
from beam_rl.parity.reference import Reference
from beam_rl.samples import Request

pytest_plugins = ["rollout_fixtures"]

TOKENS = 130  # more than one step of the engine takes: chunked prefill


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return np.random.default_rng(0).integers(3, 64, TOKENS).tolist()


@pytest.fixture(scope="module")
def routes() -> np.ndarray:
    """Some experts for every token and MoE layer, not those that the routers would choose."""
    rng = np.random.default_rng(1)
    return np.array([[rng.permutation(16)[:4] for _ in range(4)] for _ in range(TOKENS - 1)], np.uint8)


@pytest.fixture(scope="module")
def reference(engines: Engines) -> Reference:
    return Reference(str(engines.fp32.checkpoint), "fp32", rounded_logits=True, temperature=0.7)


@pytest.mark.parametrize("replayed", [False, True])
def test_engine_agrees_with_transformers_at_every_sublayer(
    engines: Engines,
    reference: Reference,
    token_ids: list[int],
    routes: np.ndarray,
    replayed: bool,
) -> None:
    given = routes if replayed else None
    ours = engines.fp32.call("probe", token_ids, given, 0.7)
    theirs = reference.probe(np.array(token_ids), given)
    assert {place for place in theirs if place[1] != MARGIN} == set(ours)
    assert {name for _, name in ours} == {*BEFORE, *LAYER, *AFTER}
    sides = {n: Side(r, r[None, "log_probabilities"][:, 0]) for n, r in (("reference", theirs), ("engine", ours))}
    found = compare(sides, replayed=replayed, sublayer_bound=1e-5, logprob_mean_bound=1e-5)
    assert found.within_bounds
    assert max(found.errors["engine_reference"].values()) < 1e-5


def test_replayed_experts_change_what_the_engine_computes(
    engines: Engines,
    token_ids: list[int],
    routes: np.ndarray,
) -> None:
    free, forced = (engines.fp32.call("probe", token_ids, r, 1.0) for r in (None, routes))
    assert np.array_equal(free[3, "experts"], forced[3, "experts"])  # the router's own choice, in both
    assert np.abs(free[3, "mlp"] - forced[3, "mlp"]).max() > 0.1


def test_an_engine_samples_after_a_probe_as_before(engines: Engines, token_ids: list[int]) -> None:
    def sampled(engine: RunningEngine) -> list[int]:
        request = Request("r", token_ids[:20], seed=1, max_tokens=30, temperature=1.0)
        return engine.sample([request])["r"].token_ids.tolist()

    before = sampled(engines.fp32)
    engines.fp32.call("probe", token_ids, None, 1.0)
    assert sampled(engines.fp32) == before
    assert engines.fp32.call("counters").routes_held == 0


def test_a_probe_that_fails_leaves_the_engine_usable(engines: Engines, token_ids: list[int]) -> None:
    too_few = np.zeros((5, 4, 4), np.uint8)
    with pytest.raises(ray.exceptions.RayTaskError, match="routes"):
        engines.fp32.call("probe", token_ids, too_few, 1.0)
    assert (3, "mlp") in engines.fp32.call("probe", token_ids, None, 1.0)
