"""The three paces on a real trainer of two ranks and two real engines."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_run import live_cluster, on

from beam_rl.cluster import Cluster
from beam_rl.run import read_metrics

LAYOUT = ["trainer.parallel.dp=2", "rollout.engines=2", "trainer.deterministic=true", "checkpoint.keep_last=9"]
LAYOUT += ["rollout.max_num_seqs=32"]  # so that responses begin and end at different times
LARGE = ["rollout.prompts_per_step=32", "rollout.samples_per_prompt=8"]  # more than is sampled while a step trains
TIMES = ("time/", "memory/", "rollout/tokens_per_s", "sync/seconds")


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
