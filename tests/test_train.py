"""The whole of it as a user runs it: `beam-rl train` in a process of its own, Megatron, vLLM and Ray included.

One run of four steps is the measure of all others: interrupted and resumed, exported, out of disk.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from rollout_fixtures import Reference
from runs import finish, left_behind, metrics, samples, wait_for_step
from safetensors.torch import load_file

from beam_rl.run import checkpoints, read_checkpoint

ROOT = Path(__file__).parents[1]
TINY = ROOT / "recipes" / "tiny_cpu.yaml"
STEPS = 4
OVERRIDES = [
    f"trainer.steps={STEPS}",
    "trainer.deterministic=true",
    "checkpoint.every=2",
    "eval.every=4",
    "data.eval.limit=16",
    "logging.samples_per_step=1000",
    "trainer.profile.steps=[3]",
    "rollout.profile.steps=[3]",
    "rollout.profile.engine_steps=4",
]
UNTRACED = ["trainer.profile.steps=[]", "rollout.profile.steps=[]"]  # traces take seconds, and change no number

start, run = partial(runs.start, TINY, OVERRIDES), partial(runs.run, TINY, OVERRIDES)


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run that nobody disturbed."""
    out, _ = run(folder / "whole")
    assert f"{STEPS} of {STEPS}" in out
    return folder / "whole"


def test_a_step_that_the_recipe_names_is_traced(whole: Path) -> None:
    of_engine, engines_table, trace, table = sorted((whole / "profile").iterdir())
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert trace.name == "step_3_rank_0.json"
    parts = {"score", "forward and backward", "layers", "log-probabilities", "optimizer", "sync"}
    assert parts <= names
    rows = table.read_text()
    assert "optimizer" in rows and "aten::mm" in rows and "Self CPU time total" in rows
    names = [str(event.get("name")) for event in json.loads(of_engine.read_text())["traceEvents"]]
    assert of_engine.name == "step_3_engine_0.json" and sum("generation" in name for name in names) == 4
    assert engines_table.name == "step_3_engine_0.txt" and "cpu_attention" in engines_table.read_text()
    assert not list((whole / "logs").glob("*trace*"))


def test_the_plan_foresaw_the_trainers_memory(whole: Path) -> None:
    from beam_rl.plan.plan import make_plan
    from beam_rl.recipe.load import load

    before_the_trace = next(row for row in metrics(whole) if row["step"] == 2)
    planned = make_plan(load(whole / "recipe.yaml")).ranks[0].peak.total
    assert planned == pytest.approx(before_the_trace["memory/host_peak_bytes"], rel=0.1)


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Iterator[Path]:
    """A run that was told to end after step 1, whose trainer was killed after step 2, and that went on both times."""
    out, disk = folder / "resumed", folder / "disk"
    on_nvme = ["trainer.optimizer.offload=nvme", f"trainer.optimizer.nvme.path={disk}"]
    process = start(out, *UNTRACED)
    wait_for_step(out, 1, process)
    for member in runs.members(out):
        open_to = {c.laddr.ip for c in member.net_connections("inet") if c.status in ("LISTEN", "NONE")}
        assert open_to <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, f"{member.name()} listens on {open_to}"
    process.send_signal(signal.SIGTERM)  # as a scheduler does
    asked = time.monotonic()
    _, err = finish(process, out, code=0)
    assert time.monotonic() - asked < 30
    assert "interrupted by SIGTERM; --resume" in err
    assert read_checkpoint(out / "checkpoints" / f"step_{metrics(out)[-1]['step']}"), (
        "the last whole step was to be saved"
    )

    reported = metrics(out)[-1]["step"]
    process = start(out, "--resume", *UNTRACED, *on_nvme)
    wait_for_step(out, reported + 1, process)
    runs.kill_rank(out, 0)
    asked = time.monotonic()
    _, err = finish(process, out, code=1)
    assert time.monotonic() - asked < 30
    assert len(err.splitlines()) == 1 and "trainer rank 0 died at" in err and "trainer-0.log" in err, err
    (left,) = disk.glob("resumed-*/rank_0/manifest.json")
    assert json.loads(left.read_text())["updates"] >= 2 * (reported + 1)
    run(out, "--resume", *UNTRACED, *on_nvme, "cluster.placement=disaggregated")  # where they are changes no number
    return out


def test_trainer_and_engine_agree_at_every_step(whole):
    steps = metrics(whole)[1:]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert line["parity/abs_logprob_diff_mean"] <= 1e-5
        assert line["replay/rows"] > 1000
        assert line["replay/missing_rows"] == 0
        assert line["replay/route_agreement"] == 1.0
        assert line["sync/version"] == line["step"]
        assert line["optim/router_grad_norm"] > 0


def test_every_weight_travels_every_step(whole, tiny_folder):
    from safetensors import safe_open

    with safe_open(tiny_folder / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (not a dict)
    assert {line["sync/bytes"] for line in metrics(whole)} == {stored}
    assert {line["sync/buckets"] for line in metrics(whole)} == {3}


def test_the_loop_evaluates_what_it_starts_from_and_what_it_ends_with(whole):
    evaluated = {line["step"]: line["eval/toy/avg@8"] for line in metrics(whole) if "eval/toy/avg@8" in line}
    assert set(evaluated) == {0, STEPS}
    assert all(0.2 < score < 0.9 for score in evaluated.values())


def test_a_samples_reward_is_its_text_judged(whole):
    rows = samples(whole, 1)
    assert len(rows) == 256
    assert 0.2 < np.mean([row["reward"] for row in rows]) < 0.8
    for row in rows:
        right = row["text"].endswith(f"\\boxed{{ {row['answer']} }}") and row["text"].count("\\boxed{") == 1
        assert row["reward"] == float(right and row["finish_reason"] == "stop")


def test_an_interrupted_run_goes_on_as_the_whole_one_did(whole, resumed):
    for step in range(1, STEPS + 1):
        assert samples(resumed, step) == samples(whole, step)
    assert untimed(metrics(resumed)) == untimed(metrics(whole))


def untimed(lines: list[dict]) -> list[dict]:
    """What two runs must agree on."""
    others = ("time/", "sync/seconds", "rollout/tokens_per_s", "optim/tflops", "memory/", "nvme/")
    return [{k: v for k, v in line.items() if not k.startswith(others)} for line in lines]


def test_optimizer_state_on_nvme_changed_no_number_and_is_gone_after_the_run(whole, resumed, folder):
    """The resumed run had it there in its later steps, across a kill; its numbers are compared above."""
    written = [line["nvme/write_bytes"] for line in metrics(resumed) if "nvme/write_bytes" in line]
    assert len(written) >= 2 and min(written) > 10**6
    assert [line["nvme/read_bytes"] for line in metrics(resumed) if "nvme/read_bytes" in line] == written
    assert not list((folder / "disk").iterdir()), "a run that ends well leaves no state"
    assert (
        "has the optimizer's state as a hard link of the file on NVMe" in (resumed / "logs/trainer-0.log").read_text()
    )


def test_a_runs_folder_keeps_no_secret_of_its_environment(whole):
    for path in (path for path in whole.rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert not [name for name, value in runs.SECRETS.items() if value.encode() in content], path


def test_eval_prints_one_json_object_and_the_runs_own_last_score(whole):
    command = [sys.executable, "-m", "beam_rl.cli", "eval", str(whole), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    found = json.loads(done.stdout)
    assert (found["task"], found["k"], found["prompts"]) == ("toy", 8, 16)
    assert found["avg@k"] == metrics(whole)[-1]["eval/toy/avg@8"]
    assert found["ci95"][0] < found["avg@k"] < found["ci95"][1]


def test_a_run_has_its_page_and_the_scores_of_every_evaluation(whole):
    page = (whole / "report.html").read_text()
    assert f"step {STEPS} of {STEPS}, done" in page and "(95 % interval" in page and "bound of the mean, 1e-05" in page
    for step in (0, STEPS):
        rows = [json.loads(line) for line in (whole / "samples" / "eval" / f"step_{step}.jsonl").open()]
        line = metrics(whole)[step]
        assert np.mean([row["scores"] for row in rows]) == pytest.approx(line["eval/toy/avg@8"])
        assert line["eval/toy/low@8"] < line["eval/toy/avg@8"] < line["eval/toy/high@8"] and rows[0]["text"]
    rewards = np.array([row["reward"] for row in samples(whole, 1)]).reshape(32, 8).mean(1)
    assert metrics(whole)[1]["reward/stderr"] == pytest.approx(rewards.std(ddof=1) / 32**0.5, rel=1e-6)


def test_what_is_kept_of_the_checkpoints(whole):
    kept = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert kept == ["step_2", "step_4"]


def test_a_run_that_is_done_is_not_started_again(whole):
    _, err = run(whole, code=2)
    assert "holds a run already" in err and "--resume" in err


def test_resuming_a_run_that_is_done_starts_nothing_and_says_so(whole):
    before = (whole / "metrics.jsonl").read_bytes()
    out, _ = run(whole, "--resume")
    assert "the run is done" in out and (whole / "metrics.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def exported(whole: Path, folder: Path, tiny_folder: Path) -> Path:
    command = [sys.executable, "-m", "beam_rl.cli", "export", str(whole / "checkpoints/step_4"), str(folder / "hf")]
    subprocess.run(command, check=True, timeout=300)
    shutil.copy(tiny_folder / "eval.jsonl", folder)
    return folder / "hf"


def test_the_export_has_the_checkpoints_names_and_types_and_a_trained_router(exported, tiny_folder):
    before, after = load_file(tiny_folder / "model.safetensors"), load_file(exported / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    routers = [name for name in after if name.endswith("mlp.gate.weight")]
    assert len(routers) == 4
    for name in routers:
        assert after[name].dtype == torch.float32
        assert not torch.equal(after[name], before[name]), f"{name} was not trained"


def test_eval_of_the_exported_folder_needs_no_trainer_and_gives_the_runs_last_score(whole, exported):
    data = [f"data.eval.{key}" for key in (f"path={exported.parent}/eval.jsonl", "limit=16", "task=toy")]
    lengths = ["data.max_prompt_tokens=16", "rollout.max_response_tokens=16", "rollout.kv_cache_gib=0.5"]
    command = [sys.executable, "-m", "beam_rl.cli", "eval", str(exported), *data, "verifier.name=toy", *lengths]
    done = subprocess.run([*command, "--k", "2", "--json"], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == ["task", "avg@k", "pass@k", "k", "prompts", "ci95", "samples"] and found["k"] == 2
    assert found["avg@k"] == pytest.approx(metrics(whole)[-1]["eval/toy/avg@8"], abs=0.01)
    assert found["avg@k"] < found["pass@k"] < 1 and "starting engines" in done.stderr and "trainer" not in done.stderr


def test_the_export_gives_the_trainers_log_probabilities_in_a_fresh_vllm_and_in_transformers(
    ray_here, whole, exported, tiny_folder, tmp_path
):
    import ray

    from beam_rl.engines import Engines
    from beam_rl.policy import Policy
    from beam_rl.recipe.load import load
    from beam_rl.samples import Prompt, Request, Sample
    from beam_rl.sync import WeightSync

    recipe = load(whole / "recipe.yaml")
    prompt = Prompt(0, 0, [1, 12, 17, 32, 22, 20, 28, 33], "5")
    requests = [Request(f"r{i}", prompt.token_ids, i, 16, 1.0) for i in range(32)]
    with (
        Policy(recipe, tiny_folder, tmp_path) as policy,
        Engines(recipe, exported, tmp_path) as engines,
    ):
        ray.get([*policy.starting, *engines.starting])
        engines.serve(0, [0])
        policy.load(whole / "checkpoints" / "step_4")
        done = engines.generate([requests])
        samples = [Sample(prompt, done[r.id], weight=1.0) for r in requests]
        scores = policy.score([samples])
        WeightSync(policy, engines, recipe.sync).load(version=4)
        router = "model.layers.6.mlp.gate.weight"
        held = ray.get(engines.actors[0].weight.remote(router))
    assert np.abs(scores.logp - scores.logp_engine).max() < 2e-5
    assert scores.routes_agree == scores.routes_total > 0
    assert held.dtype == np.float32
    assert np.array_equal(held, load_file(exported / "model.safetensors")[router].numpy())
    assert not np.array_equal(held, load_file(tiny_folder / "model.safetensors")[router].numpy())
    reference = Reference(exported)
    expected = np.concatenate([reference.score(prompt.token_ids, s.completion.token_ids)[0] for s in samples])
    assert np.abs(scores.logp - expected).max() < 2e-5


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(folder):
    """The run's folder is a file system with room for one checkpoint and a half."""
    mount = folder / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mount)], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        _, err = run(mount / "run", "checkpoint.every=1", "logging.wandb=disabled", *UNTRACED, code=1)
        assert len(err.strip().splitlines()) == 1 and err.startswith("beam-rl: can't write ")
        assert ("the disk is full" in err or "as on a full disk" in err) and "step_1" in err
        assert os.listdir(mount / "run" / "checkpoints") == ["step_1"]
        assert [c.step for c in checkpoints(mount / "run")] == [1]  # whole, as a resume would read it
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_an_engine_that_cannot_start_shows_its_own_last_lines(folder):
    """A KV cache without room for one request, which vLLM finds out by itself."""
    _, err = run(folder / "unstarted", "rollout.kv_cache_gib=0.000001", code=2)
    assert err.startswith("beam-rl: vLLM did not start: ValueError: No available memory for the cache blocks")
    assert "Last lines of" in err and "engine-0.log" in err


def test_a_run_that_is_killed_leaves_no_process(folder):
    """kill -9 while trainer and engine start, when the engine's child has only just been made.

    Two small agents of Ray's own notice it later, on a busy machine after minutes.
    """
    process = start(folder / "killed")
    logs = folder / "killed" / "logs"
    end = time.monotonic() + 200
    while not list(logs.glob("engine-*.log")) and time.monotonic() < end:
        time.sleep(0.1)
    process.kill()
    process.communicate()
    assert not left_behind(folder / "killed", 30, but=["ray::DashboardAgent", "ray::RuntimeEnvAgent"])


def test_two_ranks_two_engines_and_the_switches_together(ray_here, tiny_folder, folder):
    """Data parallelism, BF16, several engines, KL, importance correction, dynamic sampling; in a Ray that was there."""
    switches = [
        f"cluster.address={ray_here}",
        f"model.path={tiny_folder}",
        "trainer.parallel.dp=2",
        "rollout.engines=2",
        "rollout.prompts_per_step=8",
        "trainer.precision=bf16",
        "trainer.steps=2",
        "trainer.profile.steps=[1]",
        "rollout.profile.steps=[1]",
        "algorithm.loss=cispo",
        "algorithm.kl.coefficient=0.01",
        "algorithm.importance_correction.kind=mask",
        "algorithm.dynamic_sampling.enabled=true",
        "algorithm.overlong.buffer_tokens=4",
        "eval.every=0",
    ]
    run(folder / "many", *switches)
    first, second = metrics(folder / "many")[1:]
    for line in (first, second):
        assert line["parity/abs_logprob_diff_mean"] < 0.01
        assert line["replay/rows"] > 100 and line["replay/missing_rows"] == 0
        assert line["sync/version"] == line["step"]
    assert second["loss/kl"] > 0, "the second step's policy has left the reference"
    assert {trace.name for trace in (folder / "many" / "profile").iterdir()} == {
        f"step_1_{who}_{i}.{kind}" for who in ("rank", "engine") for i in (0, 1) for kind in ("json", "txt")
    }
    versions = {row["version"] for row in samples(folder / "many", 2)}
    assert versions == {1}
