"""The three paces, and episodes of several turns, on a real trainer of two ranks and two real engines."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from live_run import SMALL, TINY, live_cluster, on

from beam_rl.cluster import Cluster
from beam_rl.episodes import make_episodes
from beam_rl.flight import Flight
from beam_rl.inputs import prepare
from beam_rl.recipe.load import load
from beam_rl.run import read_metrics
from beam_rl.sampling import sample_of
from beam_rl.step import Quiet

LAYOUT = ["trainer.parallel.dp=2", "rollout.engines=2", "trainer.deterministic=true", "checkpoint.keep_last=9"]
LAYOUT += ["rollout.max_num_seqs=32"]  # so that responses begin and end at different times
LAYOUT += ["rollout.max_response_tokens=40"]  # of two turns
TRIES = ["environment.name=second_try", "environment.max_turns=2"]
LARGE = ["rollout.prompts_per_step=32", "rollout.samples_per_prompt=8"]  # more than is sampled while a step trains
TIMES = ("time/", "memory/", "rollout/tokens_per_s", "optim/tflops", "sync/seconds")


@pytest.fixture(scope="module")
def cluster(
    ray_here: str, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, list[str], Path]]:
    """With the overrides that it was started with, and a checkpoint of the weights that it started from."""
    overrides, folder = [f"model.path={tiny_folder}", *LAYOUT], tmp_path_factory.mktemp("paces")
    with live_cluster(folder / "logs", *overrides) as cluster:
        (folder / "start").mkdir()
        cluster.policy.save(folder / "start")
        yield cluster, overrides, folder / "start"


def go(cluster: tuple[Cluster, list[str], Path], folder: Path, steps: int, *overrides: str, resume: Path | None = None):
    """Trains from the start, or from a checkpoint; the metrics of each step, and what was trained on."""
    started, common, start = cluster
    if resume is None:
        started.policy.load(start)
    with on(started, folder, *common, *overrides, resume=resume) as live:
        for _ in range(steps):
            live.loop.step()
        live.nothing_lost()
        done = list(live.trained)
    return {row["step"]: row for row in read_metrics(folder)}, done


def alike(one: dict, two: dict) -> None:
    """Every number of a step but its times."""
    for name, value in one.items():
        if not name.startswith(TIMES):
            assert value == two[name], name


def test_synchronous_samples_are_of_the_weights_that_train(cluster, tmp_path: Path) -> None:
    rows, _ = go(cluster, tmp_path / "run", 3)
    assert [rows[s]["rollout/staleness"] for s in (1, 2, 3)] == [0, 0, 0]
    assert all(rows[s]["parity/abs_logprob_diff_mean"] < 1e-6 for s in (1, 2, 3))


def test_one_step_off_is_one_version_behind(cluster, tmp_path: Path) -> None:
    rows, _ = go(cluster, tmp_path / "run", 4, "rollout.pace=one_step_off")
    assert [rows[s]["rollout/staleness"] for s in (1, 2, 3, 4)] == [0, 1, 1, 1]
    assert rows[1]["parity/abs_logprob_diff_mean"] < 1e-6 < rows[3]["parity/abs_logprob_diff_mean"] < 0.1


def test_one_step_off_resumes_as_if_it_had_not_stopped(cluster, tmp_path: Path) -> None:
    pace = ("rollout.pace=one_step_off", "checkpoint.every=2")
    whole, trained = go(cluster, tmp_path / "whole", 4, *pace)
    resume = tmp_path / "whole" / "checkpoints" / "step_2"
    resumed, again = go(cluster, tmp_path / "again", 2, *pace, resume=resume)
    assert again == trained[-len(again) :]
    for step in (3, 4):
        alike(whole[step], resumed[step])


def test_asynchronous_responses_go_on_under_new_weights(cluster, tmp_path: Path) -> None:
    pace = ("rollout.pace=asynchronous", "algorithm.staleness=2", "algorithm.importance_correction.kind=truncate")
    rows, _ = go(cluster, tmp_path / "run", 5, *pace, *LARGE)
    assert sum(rows[s]["rollout/continued"] for s in range(1, 6)) > 0
    assert max(rows[s]["rollout/staleness"] for s in range(1, 6)) == 2
    assert all(rows[s]["replay/missing_rows"] == 0 for s in range(1, 6))
    assert all(math.isfinite(rows[s]["loss/policy"]) for s in range(1, 6))


def test_over_sampled_responses_are_continued_in_the_next_step(cluster, tmp_path: Path) -> None:
    rows, trained = go(cluster, tmp_path / "run", 3, "rollout.over_sampling=2", *LARGE)
    assert sum(rows[s]["rollout/continued"] for s in (1, 2, 3)) > 0
    assert len(trained) == 3 * 32 * 8


# -- episodes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def playing(cluster) -> Iterator[tuple[Cluster, list[str], Path]]:
    """The cluster with an environment that asks a wrong answer's problem again."""
    started, common, start = cluster
    common = [*common, *TRIES]
    recipe = load(TINY, [*SMALL, *common])
    inputs = prepare(recipe, Quiet())
    with make_episodes(recipe.environment, inputs.frame, inputs.decode) as started.engines.episodes:
        yield started, common, start
    started.engines.episodes = None


def play(
    playing, folder: Path, steps: int, *overrides: str, resume: Path | None = None
) -> tuple[dict[int, dict], list[dict]]:
    """Trains from the start or a checkpoint; the metrics of each step, and all samples as a person reads them."""
    rows, _ = go(playing, folder, steps, "logging.samples_per_step=1000", *overrides, resume=resume)
    files = sorted((folder / "samples").glob("step_*.jsonl"))
    return rows, [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_run_with_episodes_repeats_bit_for_bit_and_its_turns_are_scored_as_sampled(playing, tmp_path: Path) -> None:
    rows, samples = play(playing, tmp_path / "one", 2)
    again, samples_again = play(playing, tmp_path / "two", 2)
    assert samples == samples_again
    for step in (1, 2):
        row = {name: value for name, value in rows[step].items() if name != "rollout/environment_s"}
        alike(row, again[step])
        assert row["parity/abs_logprob_diff_max"] < 1e-4 and row["parity/abs_logprob_diff_mean"] < 1e-6
        assert row["replay/missing_rows"] == row["rollout/environment_failures"] == row["rollout/continued"] == 0
        assert row["replay/route_agreement"] > 0.999 and 1 < row["rollout/turns_mean"] < 2
    several = [s for s in samples if "turns" in s]
    assert 8 < len(several) < 56 and {len(s["turns"]) for s in several} == {3}
    assert all(s["turns"][1][1] == s["prompt"] for s in several), "the problem again"


def test_turns_that_were_interrupted_are_scored_as_sampled(playing) -> None:
    started, common, start = playing
    started.policy.load(start)
    with started.turns.to_engines():
        started.sync.bring(0)
    recipe = load(TINY, [*SMALL, *common])
    inputs = prepare(recipe, Quiet())
    flights = [Flight.start(inputs.prompts.at(i), recipe) for i in range(8)]
    askings = 0
    while unfinished := [f for f in flights if not f.complete]:
        done = started.engines.generate([f.requests(recipe) for f in unfinished], enough=1)
        askings += 1
        for f in unfinished:
            f.add(done)
    assert askings > 1
    samples = [sample_of(f.prompt, part, inputs.decode) for f in flights for part in f.parts if part]
    several = [s for s in samples if s.episode]
    assert len(several) > 4 and all(len(s.completion.routes) == s.model_tokens for s in samples)
    scores = started.policy.score([several])
    assert len(scores.logp) == sum(s.sampled_tokens for s in several)
    np.testing.assert_allclose(scores.logp, scores.logp_engine, atol=1e-4, rtol=0)
    assert scores.routes_agree > 0.999 * scores.routes_total


def test_episodes_go_on_under_new_weights_and_after_a_resume(playing, tmp_path: Path) -> None:
    pace = ("rollout.pace=asynchronous", "algorithm.staleness=2", "rollout.prompts_per_step=16", "checkpoint.every=3")
    rows, samples = play(playing, tmp_path / "run", 3, *pace)
    resumed, _ = play(playing, tmp_path / "again", 1, *pace, resume=tmp_path / "run" / "checkpoints" / "step_3")
    for row in (rows[1], rows[2], rows[3], resumed[4]):
        assert row["replay/missing_rows"] == row["rollout/environment_failures"] == 0
        assert row["rollout/staleness"] <= 2 and 1 < row["rollout/turns_mean"] < 2
    assert max(rows[s]["rollout/staleness"] for s in (1, 2, 3)) == 2
    assert {len(s.get("turns", [1])) for s in samples} == {1, 3}
