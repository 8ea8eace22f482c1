"""A run's folder: what is refused, what a resume restores, and that nothing is ever half."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from beam_rl.errors import SaveError
from beam_rl.run import (
    MetricsError,
    Run,
    RunError,
    checkpoints,
    read_checkpoint,
    read_metrics,
    write_file,
)

RECIPE = {
    "name": "toy",
    "seed": 0,
    "model": {"path": "tiny"},
    "trainer": {"steps": 10, "optimizer": {"lr": 1e-6}},
    "checkpoint": {"every": 1, "keep_last": 2, "keep_best": True},
    "eval": {"every": 5},
    "logging": {"wandb": "offline"},
    "cluster": {"address": "local"},
}


def recipe(**changes: object) -> dict:
    """RECIPE with dotted keys changed: `trainer__steps=20`."""
    tree = json.loads(json.dumps(RECIPE))
    for name, value in changes.items():
        *parents, leaf = name.split("__")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return tree


def save(run: Run, step: int, score: float | None = None) -> None:
    run.log_metrics(step, {"reward/mean": step / 10})
    run.checkpoint(step, lambda folder: write_weights(folder, step), {"rng": step}, score)


def write_weights(folder: Path, step: int) -> None:
    (folder / "rank_0").mkdir()
    (folder / "rank_0" / "weights.bin").write_bytes(bytes([step]) * 1000)
    (folder / "tokenizer.json").write_text("{}")


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints(folder)]


def logged(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "toy"


def test_a_new_run_has_its_recipe_and_nothing_to_resume(folder: Path) -> None:
    with Run.open(folder, RECIPE) as run:
        assert run.resumed is None and run.latest() is None and run.best() is None
    assert yaml.safe_load((folder / "recipe.yaml").read_text()) == RECIPE


def test_a_folder_whose_run_never_took_a_step_is_free_for_a_corrected_recipe(folder: Path) -> None:
    Run.open(folder, RECIPE).close()
    other = {**RECIPE, "seed": 7}
    with Run.open(folder, other) as run:
        assert run.recipe == other and run.set_aside is None


def test_a_folder_with_a_run_is_refused_without_resume(folder: Path) -> None:
    with Run.open(folder, RECIPE) as run:
        run.log_metrics(0, {"reward/mean": 0.5})
    with pytest.raises(
        RunError,
        match=r"toy holds a run already: continue it with --resume, or give --out",
    ):
        Run.open(folder, RECIPE)


@pytest.mark.parametrize("resume", [None, "auto"])
def test_another_recipes_run_is_refused_and_the_keys_named(folder: Path, resume) -> None:
    with Run.open(folder, RECIPE) as run:
        run.log_metrics(0, {"reward/mean": 0.5})
    other = recipe(
        trainer__optimizer={"lr": 2e-6, "beta1": 0.9},
        seed=1,
        model__path="big",
        checkpoint__every=3,
    )
    with pytest.raises(RunError) as caught:
        Run.open(folder, other, resume)
    assert str(caught.value).count("\n") == 0
    for words in (
        "model.path ('tiny' there, 'big' here), seed (0 there, 1 here), "
        "trainer.optimizer.beta1 (absent there, 0.9 here) and 1 more",
        "--out",
        "--resume",
    ):
        assert words in str(caught.value)
    assert "checkpoint.every" not in str(caught.value)
    assert yaml.safe_load((folder / "recipe.yaml").read_text()) == RECIPE


def test_what_does_not_change_a_step_may_change_on_resume(folder: Path) -> None:
    with Run.open(folder, RECIPE) as run:
        save(run, 1)
    longer = recipe(
        trainer__steps=99,
        checkpoint__keep_last=7,
        eval__every=1,
        logging__wandb="disabled",
    )
    longer["cluster"] = {"address": "auto", "nodes": 2}
    with Run.open(folder, longer, "auto") as run:
        assert run.resumed is not None and run.resumed.step == 1
    assert yaml.safe_load((folder / "recipe.yaml").read_text()) == longer


def test_a_folder_with_other_files_is_refused(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        Run.open(folder, RECIPE, "auto")
    assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == ["thesis.tex"]


def test_a_file_in_the_folders_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"can't open .*file: File exists"):
        Run.open(tmp_path / "file", RECIPE)


def test_two_processes_cannot_train_into_one_folder(folder: Path) -> None:
    with (
        Run.open(folder, RECIPE),
        pytest.raises(RunError, match="another process is training in"),
    ):
        Run.open(folder, RECIPE, "auto")
    Run.open(folder, RECIPE, "auto").close()


def test_auto_starts_where_there_is_nothing_to_resume(folder: Path) -> None:
    with Run.open(folder, RECIPE, "auto") as run:
        assert run.resumed is None
        run.log_metrics(1, {"reward/mean": 0.5})
        run.log_samples(1, [{"text": "a"}])


def test_auto_sets_the_steps_of_a_run_without_checkpoint_aside(folder: Path) -> None:
    for attempt in range(3):
        with Run.open(folder, RECIPE, "auto") as run:
            assert run.resumed is None and logged(folder) == [] and not list((folder / "samples").iterdir())
            assert run.set_aside == (folder / "earlier" / str(attempt) if attempt else None)
            run.log_metrics(1, {"reward/mean": attempt})
            run.log_samples(1, [{"text": "a"}])
    kept = [json.loads((folder / "earlier" / n / "metrics.jsonl").read_text())["reward/mean"] for n in "12"]
    assert kept == [0, 1] and (folder / "earlier" / "1" / "samples" / "step_1.jsonl").exists()


def test_resume_restores_state_and_forgets_later_steps(folder: Path) -> None:
    with Run.open(folder, RECIPE) as run:
        save(run, 1)
        save(run, 2)
        for step in (2, 3):
            run.log_samples(step, [{"text": "ü", "reward": 1.0}])
        run.log_metrics(3, {"reward/mean": 0.3})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # killed in the middle of a line
    with Run.open(folder, RECIPE, "auto") as run:
        assert run.resumed is not None
        assert (run.resumed.step, run.resumed.state, run.resumed.path.name) == (
            2,
            {"rng": 2},
            "step_2",
        )
        assert logged(folder) == [1, 2]
        assert [path.name for path in (folder / "samples").iterdir()] == ["step_2.jsonl"]
        save(run, 3)
    assert logged(folder) == [1, 2, 3]
    assert json.loads((folder / "samples" / "step_2.jsonl").read_text()) == {
        "text": "ü",
        "reward": 1.0,
    }
    log = (folder / "log.txt").read_text()
    assert "started" in log and "resumed from" in log


def test_a_checkpoints_step_that_was_not_reported_yet_is_reported_after_the_resume(folder: Path) -> None:
    with Run.open(folder, RECIPE) as run:
        save(run, 1)
        run.checkpoint(2, lambda folder: write_weights(folder, 2), {})
    with Run.open(folder, RECIPE, "auto") as run:
        run.log_metrics(2, {"reward/mean": 0.2})
        with pytest.raises(MetricsError, match="metrics of step 2 after those of step 2"):
            run.log_metrics(2, {"reward/mean": 0.2})
    assert logged(folder) == [1, 2]


def test_adapters_of_lost_steps_and_removed_checkpoints_go_too(folder: Path) -> None:
    def write(target: Path) -> None:
        (target / "adapter_model.safetensors").write_text("x")

    def adapters() -> list[str]:
        return sorted(path.name for path in (folder / "adapters").iterdir())

    with Run.open(folder, RECIPE) as run:
        for step in (1, 2, 3, 4):
            save(run, step)
            run.adapter(step, write)
        assert adapters() == [path.name for path in sorted((folder / "checkpoints").iterdir())] != []
        run.adapter(9, write)
    with Run.open(folder, RECIPE, "auto"):
        assert "step_9" not in adapters() and "step_4" in adapters()


def test_resume_from_a_path_must_be_the_latest_or_branch_off(folder: Path, tmp_path: Path) -> None:
    with Run.open(folder, RECIPE) as run:
        save(run, 1)
        save(run, 2)
    first, second = (folder / "checkpoints" / f"step_{step}" for step in (1, 2))
    with pytest.raises(RunError, match=r"has a newer checkpoint, step_2; give --out another folder"):
        Run.open(folder, RECIPE, first)
    Run.open(folder, RECIPE, second).close()
    with pytest.raises(RunError, match="no complete checkpoint there"):
        Run.open(folder, RECIPE, folder / "checkpoints" / "step_9")
    branch = tmp_path / "runs" / "branch"
    with pytest.raises(RunError, match=r"differs in seed \(0 there, 5 here\)"):
        Run.open(branch, recipe(name="branch", seed=5), first)
    with Run.open(branch, recipe(name="branch"), first) as run:
        assert run.resumed is not None and run.resumed.path == first and logged(branch) == [1]
        save(run, 2)
        save(run, 3)
        save(run, 4)
    assert steps(folder) == [1, 2] and steps(branch) == [3, 4]
    with pytest.raises(RunError, match="holds a run of its own; continue that with --resume auto"):
        Run.open(branch, recipe(name="branch"), first)


def test_keep_last_and_keep_best(folder: Path) -> None:
    with Run.open(folder, RECIPE) as run:
        for step, score in [
            (1, 0.2),
            (2, 0.9),
            (3, None),
            (4, 0.9),
            (5, 0.1),
            (6, 0.3),
            (7, None),
        ]:
            save(run, step, score)
        assert steps(folder) == [
            4,
            6,
            7,
        ]  # the later of the equal best, and the last two
        best = run.best()
        assert best is not None and (best.step, best.score) == (4, 0.9)
    with Run.open(folder, recipe(checkpoint__keep_best=False, checkpoint__keep_last=1), "auto") as run:
        assert steps(folder) == [
            4,
            6,
            7,
        ]  # nothing is removed before something newer is complete
        save(run, 8)
        assert steps(folder) == [8]


def test_the_same_step_is_not_saved_twice(folder: Path) -> None:
    with Run.open(folder, RECIPE) as run:
        save(run, 1, 0.5)
        again = run.checkpoint(1, lambda _: pytest.fail("written again"), {"rng": "other"})
        assert (again.score, again.state) == (0.5, {"rng": 1})


@pytest.mark.parametrize("damage", ["manifest", "missing", "short"])
def test_a_damaged_checkpoint_is_not_resumed_from_and_can_be_replaced(folder: Path, damage: str) -> None:
    with Run.open(folder, RECIPE) as run:
        save(run, 1)
        save(run, 2)
    path = folder / "checkpoints" / "step_2"
    if damage == "manifest":
        (path / "state.json").write_text('{"step": 2, "fil')
    elif damage == "missing":
        (path / "tokenizer.json").unlink()
    else:
        os.truncate(path / "rank_0" / "weights.bin", 999)
    with Run.open(folder, RECIPE, "auto") as run:
        assert run.resumed is not None and run.resumed.step == 1
        save(run, 2)
        assert steps(folder) == [1, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_is_refused_by_name(folder: Path, value: float) -> None:
    with Run.open(folder, RECIPE) as run:
        with pytest.raises(MetricsError, match=rf"step 1: loss/kl = {value}"):
            run.log_metrics(1, {"reward/mean": 1.0, "loss/kl": value})
        run.log_metrics(1, {"reward/mean": np.float32(0.5), "rollout/tokens": np.int64(7)})
        with pytest.raises(MetricsError, match="metrics of step 1 after those of step 1"):
            run.log_metrics(1, {"reward/mean": 1.0})
    assert list(read_metrics(folder)) == [{"step": 1, "reward/mean": 0.5, "rollout/tokens": 7}]


def test_a_failure_in_the_writer_itself_is_passed_on(folder: Path) -> None:
    def broken(target: Path) -> None:
        write_weights(target, 2)
        raise ConnectionError("rank 3 is gone")

    with Run.open(folder, RECIPE) as run:
        save(run, 1)
        with pytest.raises(ConnectionError, match="rank 3 is gone"):
            run.checkpoint(2, broken, {})
        assert sorted(os.listdir(folder / "checkpoints")) == ["step_1"]


def test_messages_of_the_package_go_to_the_log_until_the_run_is_closed(
    folder: Path,
) -> None:
    with Run.open(folder, RECIPE):
        logging.getLogger("beam_rl.anything").warning("engine 2 was slow")
    logging.getLogger("beam_rl.anything").warning("too late")
    log = (folder / "log.txt").read_text()
    assert "engine 2 was slow" in log and "too late" not in log


# A full disk -------------------------------------------------------------------------------------------------------

BIG = torch.zeros(500_000)
WRITERS = {
    "bytes": lambda folder: (folder / "x").write_bytes(bytes(2_000_000)),
    "torch": lambda folder: torch.save({"x": BIG}, folder / "x.pt"),
    "safetensors": lambda folder: save_file({"x": BIG}, folder / "x.safetensors"),
}


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory) -> Path:
    """A file system of 1 MiB; where mounting is not allowed the tests use a limit on the size of a file instead."""
    place = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root; test_a_write_that_the_system_refuses covers the rest")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(small_disk: Path, kind: str) -> None:
    folder = small_disk / kind
    with Run.open(folder, RECIPE) as run:
        save(run, 1)
        message = ""
        try:
            run.checkpoint(2, WRITERS[kind], {})
        except SaveError as error:  # not kept: PyTorch's writer would keep its deleted file open with it
            message = str(error)
        assert "full" in message and f"the last complete checkpoint is {folder}" in message and "\n" not in message
        assert os.listdir(folder / "checkpoints") == ["step_1"]
        save(run, 3)  # there is room again: the half-written files are gone
        assert steps(folder) == [1, 3]


REPORTS = {
    "samples": lambda run: run.log_samples(1, [{"text": "x" * 2_000_000}]),
    "metrics": lambda run: [run.log_metrics(step, {"loss" * 1000: 0.5}) for step in range(2, 1000)],
    "an evaluation": lambda run: run.log_evaluation(1, [{"text": "x" * 1000 * lines} for lines in range(100)]),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_a_disk_filled_by_anything_else_says_what_is_kept_too(
    small_disk: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever write meets the full disk first; what log.txt can't hold any more is not told on the screen."""
    folder = small_disk / f"{kind} of a run"
    with pytest.raises(SaveError) as caught, Run.open(folder, RECIPE) as run:
        save(run, 1)
        try:
            REPORTS[kind](run)
        finally:
            logging.getLogger("beam_rl.anything").warning("step 1 was slow: %s", "x" * 2_000_000)
    kept = folder / "checkpoints" / "step_1"
    where = f"a file, most likely in {folder}"  # Python does not say which
    assert str(caught.value) == f"can't write {where}: the disk is full; the last complete checkpoint is {kept}"
    assert "Logging error" not in capfd.readouterr().err
    assert steps(folder) == [1]
    shutil.rmtree(folder)


@pytest.mark.parametrize("reason", [SaveError("first"), RunError("first"), KeyboardInterrupt("first"), None])
def test_what_ended_a_run_is_told_though_the_disk_stays_full(small_disk: Path, reason: BaseException | None) -> None:
    """Also log.txt's last lines find no room when it is closed; a run that ends well has failed then."""
    folder = small_disk / "still full"
    told = pytest.raises(type(reason or SaveError("")), match="first" if reason else "the disk is full")
    with told, Run.open(folder, RECIPE) as run:
        with pytest.raises(OSError):
            (folder / "filler").write_bytes(bytes(2_000_000))
        run._metrics.write("x" * 5000)  # as a line that was cut off
        logging.getLogger("beam_rl.anything").warning("x" * 5000)
        if reason:
            raise reason
    shutil.rmtree(folder)


REFUSED = """
import resource, sys
from pathlib import Path
from beam_rl.errors import SaveError
from beam_rl.run import Run
run = Run.open(Path(sys.argv[1]), {"checkpoint": {"keep_last": 2, "keep_best": True}})
run.checkpoint(1, lambda folder: (folder / "x").write_bytes(b"x" * 99), {})
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
try:
    run.checkpoint(2, lambda folder: (folder / "x").write_bytes(b"x" * 4000), {"note": "y" * 9000})
except SaveError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [2000, 6000], ids=["in the files", "in the manifest"])
def test_a_write_that_the_system_refuses(folder: Path, limit: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", REFUSED, folder, str(limit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "step_2: file too large; the last complete checkpoint is" in result.stdout, result.stderr
    assert os.listdir(folder / "checkpoints") == ["step_1"]


# A kill -9 ---------------------------------------------------------------------------------------------------------

# For k = 0, 1, 2, … a child saves a checkpoint and kills itself at the k-th call to the file system, until one lives.
KILLED = """
import os, signal, sys
from pathlib import Path
from beam_rl.run import Run
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir", "os.listdir"}
def write(folder):
    (folder / "a").write_bytes(b"a" * 10)
    (folder / "sub").mkdir()
    (folder / "sub" / "b").write_bytes(b"b" * 10)
def child(folder, k):
    run = Run.open(folder, {"checkpoint": {"keep_last": 1, "keep_best": False}})
    run.log_metrics(1, {"reward/mean": 1.0})
    run.checkpoint(1, write, {"rng": 1})
    count = 0
    def hook(event, arguments):
        nonlocal count
        if event in EVENTS:
            if count == k:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
    sys.addaudithook(hook)
    run.log_metrics(2, {"reward/mean": 2.0})
    run.checkpoint(2, write, {"rng": 2})
    os._exit(0)
for k in range(1000):
    pid = os.fork()
    if pid == 0:
        child(Path(sys.argv[1]) / str(k), k)
    if os.waitpid(pid, 0)[1] == 0:
        break
"""


def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_checkpoint(
    tmp_path: Path,
) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=120, check=True)
    small = {"checkpoint": {"keep_last": 1, "keep_best": False}}
    resumed = []
    for folder in sorted(tmp_path.iterdir(), key=lambda path: int(path.name)):
        with Run.open(folder, small, "auto") as run:
            assert run.resumed is not None and run.resumed.state == {"rng": run.resumed.step}
            assert (run.resumed.path / "sub" / "b").read_bytes() == b"b" * 10
            assert not [path for path in (folder / "checkpoints").iterdir() if not read_checkpoint(path)]
            assert logged(folder) == list(range(1, run.resumed.step + 1))
            resumed.append(run.resumed.step)
    assert len(resumed) > 20 and resumed == sorted(resumed) and set(resumed) == {1, 2}


STEADY = """
import sys
from pathlib import Path
from beam_rl.run import Run
run = Run.open(Path(sys.argv[1]), {"checkpoint": {"keep_last": 2, "keep_best": False}}, "auto")
step = run.resumed.step if run.resumed else 0
while True:
    step += 1
    run.log_metrics(step, {"reward/mean": step})
    content = bytes([step % 256]) * 2**20
    run.checkpoint(step, lambda folder: [(folder / f"{i}").write_bytes(content) for i in range(8)], {})
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_killed_from_outside_goes_on_from_its_last_complete_checkpoint(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    step = 0
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", STEADY, folder], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        announced = int(child.stdout.readline())
        time.sleep(rng.uniform(0, 0.1))
        child.send_signal(signal.SIGKILL)
        announced = max([announced, *(int(line) for line in child.stdout)])
        child.wait()
        child.stdout.close()
        with Run.open(folder, {"checkpoint": {"keep_last": 2, "keep_best": False}}, "auto") as run:
            assert run.resumed is not None and run.resumed.step in (
                announced,
                announced + 1,
            )
            assert run.resumed.step > step
            step = run.resumed.step
            assert logged(folder) == list(range(1, step + 1))
            contents = {path.read_bytes() for path in run.resumed.path.glob("[0-9]")}
            assert contents == {bytes([step % 256]) * 2**20}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    write_file(tmp_path / "a", "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(tmp_path / "a", "new \ud800")
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]
