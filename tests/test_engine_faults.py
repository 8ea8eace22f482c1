"""Engines killed in the middle of a run: replaced, given the weights of now, their prompts asked for again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from live_run import in_the_next_sync, kill, live_cluster, on, while_sampling
from runs import SOON_LOST

ROUTER = "model.layers.4.mlp.gate.weight"


@pytest.mark.timeout(400)
def test_engines_killed_while_sampling_and_in_a_sync_cost_time_alone(
    ray_here: str, tiny_folder: Path, tmp_path: Path
) -> None:
    overrides = [f"model.path={tiny_folder}", "rollout.engines=2", "rollout.pace=asynchronous"]
    with live_cluster(tmp_path / "logs", *overrides) as cluster, on(cluster, tmp_path / "run", *overrides) as live:
        engines = live.loop.engines
        live.step_until(lambda: live.loop.state.step >= 2)
        before = [live.pids(i) for i in (0, 1)]
        while_sampling(live, 0, lambda: kill(before[0][0]), seed=0)  # the actor
        live.step_until(lambda: engines.slots[0].restarts == 1)
        in_the_next_sync(live, lambda: kill(before[1][1]))  # vLLM's own process, under an actor that lives
        live.step_until(lambda: engines.slots[1].restarts == 1)  # now there is none: the run waits for the first
        live.step_until(live.all_serve)
        live.loop.step()
        assert [live.pids(i) != before[i] for i in (0, 1)] == [True, True]
        live.nothing_lost()
        weights = [live.weights_of(i, ROUTER) for i in (0, 1)]
        np.testing.assert_array_equal(*weights)
        live.loop.check_engines()
        assert [s.restarts for s in engines.slots] == [1, 1] and engines.version == live.loop.state.step


@pytest.mark.timeout(400)
def test_an_engine_whose_node_is_lost_starts_on_another_one(tiny_folder: Path, tmp_path: Path) -> None:
    program = Path(__file__).with_name("node_loss.py")
    command = [sys.executable, program, tiny_folder, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, env=os.environ | SOON_LOST)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["before"] == ["127.0.0.1", "127.0.0.2"]
    assert found["alone"] == [0], "the run went on with the engine of the other node"
    assert found["after"] == ["127.0.0.1", "127.0.0.3"]
    assert found["restarts"][0] == 0 < found["restarts"][1] and found["equal"]
