"""Routing replay where it matters: routers whose experts are nearly tied, in BF16, so that noise flips the choice."""

import dataclasses
from pathlib import Path

import pytest
import ray
import torch
from rollout_fixtures import make_checkpoint

from beam_rl.engines import Engines
from beam_rl.loop import parity_metrics
from beam_rl.policy import Policy, Scores
from beam_rl.recipe.load import load
from beam_rl.samples import Prompt, Request, Sample

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"


@pytest.fixture(scope="module")
def near_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BF16 Beam with 256 experts, top-8, as the large one: their scores lie so close that rounding decides."""
    folder = tmp_path_factory.mktemp("near") / "tied"
    experts = {"num_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
    return make_checkpoint(folder, 0, torch.bfloat16, **experts)


@pytest.fixture(scope="module")
def scores(ray_here: str, near_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Scores, Scores]:
    """The trainer's view of 128 sampled responses: replaying the engine's routes, and routing freely."""
    recipe = load(TINY, ["trainer.precision=bf16"])
    logs = tmp_path_factory.mktemp("logs")
    prompts = [Prompt(i, i, [1, 3 + i % 10, 13 + i % 20, 17, 32, 22, 20, 33], "5") for i in range(16)]
    groups = [[Request(f"{p.position}-{k}", p.token_ids, k, 16, 1.0) for k in range(8)] for p in prompts]
    with (
        Policy(recipe, near_tied, logs) as policy,
        Engines(recipe, near_tied, logs) as engines,
    ):
        ray.get([*policy.starting, *engines.starting])
        engines.serve(0, [0])
        done = engines.generate(groups)
        samples = [Sample(p, done[r.id], weight=1.0) for p, g in zip(prompts, groups, strict=True) for r in g]
        replayed = policy.score([samples])
        for sample in samples:
            sample.completion = dataclasses.replace(sample.completion, routes=None)
        return replayed, policy.score([samples])


def test_replay_shrinks_the_gap_at_least_threefold_where_routers_are_near_tied(scores):
    replayed, free = scores
    assert replayed.routes_total > 4000 and free.routes_total == 0
    flipped = 1 - replayed.routes_agree / replayed.routes_total
    assert flipped > 0.02, "the routers are not near-tied enough for the test to mean anything"
    with_replay = parity_metrics(replayed)["parity/abs_logprob_diff_mean"]
    without = parity_metrics(free)["parity/abs_logprob_diff_mean"]
    print(f"mean |Δlogp| {with_replay:.2e} with replay, {without:.2e} without; {flipped:.1%} of the choices flip")
    assert with_replay < without / 3
