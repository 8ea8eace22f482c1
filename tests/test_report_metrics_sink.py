"""One dict a step reaches metrics.jsonl and W&B under the same names, and W&B can't stop a run."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2

from beam_rl.report.metric_names import UnknownMetric
from beam_rl.report.metrics_sink import MetricsSink
from beam_rl.run import MetricsError, Run, read_metrics

RECIPE = {"name": "toy", "trainer": {"steps": 50}, "checkpoint": {"keep_last": 1, "keep_best": True}}

# Arguments: the run's folder, W&B's mode, and "break" for two more steps after W&B's run was ended behind our back.
TRAIN = """
import sys
from pathlib import Path
from beam_rl.report.metrics_sink import MetricsSink
from beam_rl.run import Run
recipe = {"name": "toy", "trainer": {"steps": 50}, "checkpoint": {"keep_last": 1, "keep_best": True}}
with Run.open(Path(sys.argv[1]), recipe, "auto") as run:
    first = run.resumed.step + 1 if run.resumed else 1
    sink = MetricsSink(run, sys.argv[2], "beam-rl", lambda line: print("WARNING", line))
    for step in (first, first + 1):
        sink.log(step, {"reward/mean": step / 10, "optim/lr": 1e-6})
    run.checkpoint(first, lambda folder: (folder / "weights").touch(), {})
    if sys.argv[3:] == ["break"]:
        import wandb
        wandb.run.finish()
        sink.log(first + 2, {"reward/mean": 0.0})
        sink.log(first + 3, {"reward/mean": 0.0})
    sink.close()
"""


def train(folder: Path, mode: str, *more: str) -> subprocess.CompletedProcess:
    """Trains in a process of its own, as W&B keeps one state a process; without anybody's key or settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(folder.parent), "NETRC": str(folder.parent / "none")}
    return subprocess.run(
        [sys.executable, "-c", TRAIN, str(folder), mode, *more],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def wandb_history(path: Path) -> tuple[str, list[dict]]:
    """The run's id and its steps in an offline .wandb file: LevelDB's log format after a header of 7 bytes."""
    data, at, parts, run_id, steps = path.read_bytes(), 7, b"", "", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind not in (1, 4):  # first or middle part of a record
            continue
        record = wandb_internal_pb2.Record.FromString(parts)
        parts = b""
        if record.WhichOneof("record_type") == "run":
            run_id = record.run.run_id
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            steps.append({name: value for name, value in items.items() if not name.startswith("_")})
    return run_id, steps


def test_wandb_gets_the_same_steps_offline_and_a_resume_continues_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    outputs = [train(folder, "offline") for _ in range(2)]
    assert [output.stdout + output.stderr for output in outputs] == ["", ""]
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    (first_id, first), (second_id, second) = (wandb_history(path) for path in files)
    assert first_id == second_id == (folder / "wandb" / "run_id").read_text()
    assert first == [{"step": s, "reward/mean": s / 10, "optim/lr": 1e-6} for s in (1, 2)]
    assert (
        second
        == list(read_metrics(folder))[1:]
        == [{"step": s, "reward/mean": s / 10, "optim/lr": 1e-6} for s in (2, 3)]
    )


def test_online_without_a_key_is_one_warning_and_offline_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    output = train(folder, "online")
    assert output.stdout.count("\n") == 1 and output.stderr == ""
    assert output.stdout.startswith("WARNING W&B: No API key configured") and "wandb sync" in output.stdout
    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    assert wandb_history(path)[1] == list(read_metrics(folder))


def test_a_failure_in_the_middle_is_one_warning_and_the_file_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    output = train(folder, "offline", "break")
    assert output.stdout.count("WARNING") == 1 and "going on without it" in output.stdout
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 3, 4]


def test_disabled_starts_nothing(tmp_path: Path) -> None:
    with Run.open(tmp_path / "toy", RECIPE) as run:
        sink = MetricsSink(run, "disabled", "beam-rl", pytest.fail)
        sink.log(1, {"reward/mean": 0.5})
        sink.close()
        assert not (run.folder / "wandb").exists()
        assert list(read_metrics(run.folder)) == [{"step": 1, "reward/mean": 0.5}]


def test_unlisted_names_and_broken_values_reach_nobody(tmp_path: Path) -> None:
    with Run.open(tmp_path / "toy", RECIPE) as run:
        sink = MetricsSink(run, "disabled", "beam-rl", pytest.fail)
        with pytest.raises(UnknownMetric):
            sink.log(1, {"reward/mean": 0.5, "reward/std": 0.1})
        with pytest.raises(MetricsError, match="loss/kl = nan"):
            sink.log(1, {"loss/kl": float("nan")})
        assert list(read_metrics(run.folder)) == []
