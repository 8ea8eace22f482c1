"""The doctor says what is wrong with a machine or a recipe's inputs, and what to do about it."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from beam_rl.cli import app
from beam_rl.doctor import Check, disk_rates, examine
from beam_rl.limits import file_limit, needs_of, process_room
from beam_rl.recipe.load import load
from beam_rl.tiny.checkpoint import fresh_model, save_hf

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
H200 = "NVIDIA H200, 580.1, 143771, {used}, 9.0"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One without a GPU; a driver's tool may be put into its `bin`."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def with_gpus(machine: Path, *used_mib: int) -> None:
    """A tool that lists GPUs as the driver's does."""
    tool = machine / "bin" / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{H200.format(used=used)}'\n" for used in used_mib))
    tool.chmod(0o755)


def found(*overrides: str) -> dict[str, Check]:
    return {check.name: check for check in examine(load(TINY, overrides))}


def test_a_machine_as_tested_has_nothing_to_mend(machine: Path) -> None:
    checks = found()
    assert {check.status for check in checks.values()} <= {"ok", "warn"}
    assert checks["torch"].found.startswith("2.13") and checks["gpu"].found.startswith("none")
    assert "tiny" in checks["model.path"].found and "hub" not in checks


def test_gpus_are_told_with_their_driver_and_what_uses_them(machine: Path) -> None:
    with_gpus(machine, 4, 90_000)
    checks = found("trainer.precision=mxfp8")
    assert checks["gpu"].found == "2 × NVIDIA H200, 140 GiB, driver 580.1"
    assert checks["gpu memory"].status == "warn" and checks["gpu memory"].found == "in use on GPU 1"
    assert checks["vllm"].status == "fail" and checks["vllm"].mend == "uv sync --extra gpu"
    assert "trainer.mxfp8.activations=false" in checks["mxfp8"].mend
    assert "mxfp8" not in found("trainer.precision=mxfp8", "trainer.mxfp8.activations=false")


def test_another_version_than_the_tested_one_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beam_rl.doctor._version", lambda name: {"ray": "2.9.0"}.get(name))
    checks = found()
    assert (checks["ray"].status, checks["ray"].found) == ("warn", "2.9.0")
    assert checks["ray"].mend == "tested with 2.60.0: uv sync --extra cpu"
    assert (checks["peft"].status, checks["peft"].found) == ("fail", "not installed")


def test_a_checkpoint_without_all_of_its_files_is_not_whole(machine: Path) -> None:
    save_hf(fresh_model(0), machine, "fp32")
    assert found(f"model.path={machine}")["model.path"].found.endswith("every file there")
    weights = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (machine / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    check = found(f"model.path={machine}")["model.path"]
    assert (check.status, check.found) == ("fail", f"1 of its files are not there, such as {weights['b']}")
    (machine / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert "holds GPT2LMHeadModel" in found(f"model.path={machine}")["model.path"].found


def test_the_nvme_is_measured_and_left_as_it_was(machine: Path) -> None:
    key = "trainer.optimizer.nvme.path"
    before = sorted(machine.iterdir())
    assert all(rate > 1e6 for rate in disk_rates(machine)[:2])
    assert "GB/s" in found(f"{key}={machine}")[key].found and sorted(machine.iterdir()) == before
    missing = found(f"{key}={machine / 'none'}")[key]
    assert missing.status == "fail" and "no folder that can be written to" in missing.found


TURNS = TINY.with_name("tiny_cpu_turns.yaml")


def test_environments_are_compared_with_how_many_processes_and_files_there_may_be(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = load(TURNS, ["rollout.over_sampling=1.5"])
    assert needs_of(turns).episodes == 1.5 * 32 * 8 and needs_of(load(TINY)).episodes == 0
    ahead = load(TURNS, ["rollout.pace=asynchronous", "algorithm.staleness=2", "rollout.unfinished=continue"])
    assert needs_of(ahead).episodes == 3 * 32 * 8
    joined = load(TINY, ["cluster.address=auto", "trainer.parallel.dp=8"])
    assert (
        needs_of(joined).threads
        < needs_of(load(TINY)).threads
        < needs_of(load(TINY, ["trainer.parallel.dp=8"])).threads
    )
    monkeypatch.setattr("beam_rl.doctor.process_room", lambda: (needs_of(turns).processes, "ulimit -u"))
    monkeypatch.setattr("beam_rl.doctor.file_limit", lambda: needs_of(turns).files - 1)
    checks = {check.name: check for check in examine(turns)}
    assert checks["processes"].status == "ok" and ", 384 of them environments" in checks["processes"].found
    assert checks["open files"].status == "warn" and checks["open files"].mend.startswith("raise ulimit -Hn, or fewer")
    monkeypatch.setattr("beam_rl.doctor.process_room", lambda: (100, "the container's limit on processes"))
    check = found()["processes"]
    assert check.status == "fail" and check.mend == "raise the container's limit on processes"
    monkeypatch.setattr("beam_rl.doctor.process_room", lambda: None)
    monkeypatch.setattr("beam_rl.doctor.file_limit", lambda: None)
    assert {found()[name].status for name in ("processes", "open files")} == {"ok"}


def test_the_nearest_limit_on_processes_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    monkeypatch.setattr("resource.getrlimit", lambda which: (4096, 8192))
    monkeypatch.setattr("beam_rl.limits.CGROUP", tmp_path)
    assert process_room() == (4096, "ulimit -u") and file_limit() == 8192
    (tmp_path / "pids.max").write_text("300\n")
    (tmp_path / "pids.current").write_text("100\n")
    assert process_room() == (200, "the container's limit on processes")
    (tmp_path / "pids.max").write_text("max\n")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert process_room() is None, "root is held to none"


def test_nobody_at_an_address_is_told_in_one_line(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    checks = found("cluster.address=127.0.0.1:9", "model.path=someone/beam")
    assert checks["cluster.address"].status == "fail" and "nobody answers" in checks["cluster.address"].found
    assert checks["hub"].status == "fail" and "for someone/beam" in checks["hub"].found


def test_the_command_ends_with_1_where_a_run_could_not_start(machine: Path) -> None:
    good = CliRunner().invoke(app, ["doctor", "--json"])
    assert good.exit_code == 0 and json.loads(good.stdout)["ok"]
    bad = CliRunner().invoke(app, ["doctor", str(TINY), f"trainer.optimizer.nvme.path={machine / 'none'}"])
    assert bad.exit_code == 1 and "1 to mend before a run" in bad.stdout and "→ make it" in bad.stdout
    assert os.listdir(machine) == ["bin"]
