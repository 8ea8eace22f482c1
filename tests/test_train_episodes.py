"""Episodes on a real engine and a real trainer: what was sampled over all turns is what the trainer scores."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from live_run import live_cluster, on

from beam_rl.cluster import Cluster
from beam_rl.episodes import make_episodes
from beam_rl.flight import Flight
from beam_rl.inputs import Inputs, prepare
from beam_rl.recipe.load import load
from beam_rl.run import read_metrics
from beam_rl.sampling import sample_of
from beam_rl.step import Quiet

TURNS = Path(__file__).parents[1] / "recipes" / "tiny_cpu_turns.yaml"
SMALL = ["environment.name=second_try", "environment.max_turns=2", "rollout.max_response_tokens=40"]
SMALL += ["rollout.max_num_seqs=16", "trainer.deterministic=true", "logging.samples_per_step=32"]
Started = tuple[Cluster, Inputs, list[str], Path]


@pytest.fixture(scope="module")
def cluster(ray_here: str, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """With what it was started with, and a checkpoint of the weights that it started from."""
    folder, overrides = tmp_path_factory.mktemp("episodes"), [f"model.path={tiny_folder}", *SMALL]
    recipe = load(TURNS, overrides)
    with live_cluster(folder / "logs", *overrides) as cluster:
        inputs = prepare(recipe, Quiet())
        (folder / "start").mkdir()
        cluster.policy.save(folder / "start")
        with make_episodes(recipe.environment, inputs.frame, inputs.decode) as cluster.engines.episodes:
            yield cluster, inputs, overrides, folder / "start"


def go(started: Started, folder: Path, steps: int, *overrides: str) -> tuple[list[dict], list[dict]]:
    """Trains from the start; the metrics of each step, and all samples."""
    cluster, _, common, start = started
    cluster.policy.load(start)
    with on(cluster, folder, *common, *overrides) as live:
        for _ in range(steps):
            live.loop.step()
        live.nothing_lost()
    files = [folder / "samples" / f"step_{step + 1}.jsonl" for step in range(steps)]
    rows = [row for row in read_metrics(folder) if row["step"]]
    return rows, [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_run_with_episodes_repeats_bit_for_bit_and_its_turns_are_scored_as_sampled(
    cluster: Started, tmp_path: Path
) -> None:
    rows, samples = go(cluster, tmp_path / "one", 2)
    again, samples_again = go(cluster, tmp_path / "two", 2)
    assert samples == samples_again
    for name in ("reward/mean", "rollout/tokens", "parity/abs_logprob_diff_max", "loss/policy", "optim/grad_norm"):
        assert [row[name] for row in rows] == [row[name] for row in again], name
    several = [s for s in samples if "turns" in s]
    assert 8 < len(several) < 56 and {len(s["turns"]) for s in several} == {3}
    assert all(s["turns"][1][1] == s["prompt"] for s in several), "the problem again"
    for row in rows:
        assert row["parity/abs_logprob_diff_max"] < 1e-4 and row["parity/abs_logprob_diff_mean"] < 1e-6
        assert row["replay/missing_rows"] == row["rollout/environment_failures"] == row["rollout/continued"] == 0
        assert row["replay/route_agreement"] > 0.999 and 1 < row["rollout/turns_mean"] < 2


def test_turns_that_were_interrupted_are_scored_as_sampled(cluster: Started) -> None:
    playing, inputs, common, start = cluster
    playing.policy.load(start)
    recipe = load(TURNS, [*common, "rollout.prompts_per_step=8", "rollout.samples_per_prompt=4"])
    with playing.turns.to_engines():
        playing.sync.bring(0)
    flights = [Flight.start(inputs.prompts.at(i), recipe) for i in range(8)]
    askings = 0
    while unfinished := [f for f in flights if not f.complete]:
        done = playing.engines.generate([f.requests(recipe) for f in unfinished], enough=1)
        askings += 1
        for f in unfinished:
            f.add(done)
    assert askings > 1
    samples = [sample_of(f.prompt, part, inputs.decode) for f in flights for part in f.parts if part]
    several = [s for s in samples if s.episode]
    assert len(several) > 4 and all(len(s.completion.routes) == s.model_tokens for s in samples)  # type: ignore[arg-type]
    scores = playing.policy.score([several])
    assert len(scores.logp) == sum(s.sampled_tokens for s in several)
    np.testing.assert_allclose(scores.logp, scores.logp_engine, atol=1e-4, rtol=0)
    assert scores.routes_agree > 0.999 * scores.routes_total


def test_episodes_go_on_under_new_weights(cluster: Started, tmp_path: Path) -> None:
    pace = ("rollout.pace=asynchronous", "algorithm.staleness=2", "rollout.prompts_per_step=16")
    rows, samples = go(cluster, tmp_path / "run", 4, *pace)
    assert max(row["rollout/staleness"] for row in rows) == 2
    assert all(row["replay/missing_rows"] == row["rollout/environment_failures"] == 0 for row in rows)
    assert {len(s.get("turns", [1])) for s in samples} == {1, 3}
