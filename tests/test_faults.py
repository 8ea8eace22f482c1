"""What happens when a rank of the trainer dies, hangs or can't save: real processes, killed and stopped."""

import time
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed.checkpoint as dcp
from crew import all_gone, crew, ranks, wait_for

from beam_rl.errors import SaveError
from beam_rl.recipe.tree import Checkpoint
from beam_rl.run import Run, checkpoints
from beam_rl.saver import Saver
from beam_rl.watch import Rank, RankError, operation_of, verdict

LIMIT_S = 4.0
RECIPE = {"checkpoint": {"keep_last": 5, "keep_best": False}}


@pytest.fixture(scope="module")
def session(ray_here: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


def read(folder: Path) -> dict[str, torch.Tensor]:
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(tuple(meta.size), dtype=meta.properties.dtype)
        for name, meta in stored.items()
        if isinstance(meta, dcp.metadata.TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def nothing(folder: Path) -> None:
    pass


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def test_saving_beside_the_training_and_a_rank_that_hangs(session: Path, tiny_folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with crew(tiny_folder, session, [f"trainer.collective_timeout_s={LIMIT_S}", "sync.deadline_s=3"]) as policy:
        with Run.open(tmp_path / "run", RECIPE) as run:
            saver = Saver(run, policy, Checkpoint(), False, said.append)
            policy.save(tmp_path / "first")
            saver.save(1, nothing, {}, None)
            policy.update(0, 1e-3)
            saver.wait()
            policy.save(tmp_path / "second")
            saver.save(2, nothing, {}, None)  # takes the same memory
            policy.update(0, 1e-3)
            saver.wait()
            found = {c.step: read(c.path) for c in checkpoints(run.folder)}
            assert same(found[1], read(tmp_path / "first")) and same(found[2], read(tmp_path / "second"))
            assert not same(found[1], found[2]) and not said
            assert set(saver.take_metrics()) == {"time/save_s", "time/write_s"}

            def refuse(folder: Path) -> None:
                raise OSError(28, "No space left on device")

            saver.policy = type("Full", (), {"stage": lambda *_: None, "write": staticmethod(refuse)})()
            saver.save(3, nothing, {}, None)
            wait_for(lambda: said)
            with pytest.raises(SaveError, match="step_3: the disk is full; the last complete checkpoint is .*step_2"):
                saver.check()
            assert [c.step for c in checkpoints(run.folder)] == [1, 2]
            saver.check()  # told once

        processes = ranks()
        stopped = processes[1]
        stopped.suspend()
        asked = time.monotonic()
        with pytest.raises(RankError) as caught:
            policy.update(0, 1e-3)
        assert LIMIT_S - 1 < time.monotonic() - asked < LIMIT_S + 8
        line = str(caught.value)
        assert "trainer rank 1 (dp 1) did not go on" in line or "trainer rank 0 (dp 0) did not go on" in line
        assert "while updating" in line and "gave up in " in line and ".py, line" in line and "\n" not in line, line
        with pytest.raises(RankError):
            policy.peak_memory()  # at once: nothing can be relied on any more
    assert all_gone(processes)


def test_a_rank_killed_while_it_writes_a_checkpoint_leaves_the_one_before(
    session: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    with crew(tiny_folder, session) as policy, Run.open(tmp_path / "run", RECIPE) as run:
        saver = Saver(run, policy, Checkpoint(), False, print)
        saver.save(1, nothing, {}, None)
        saver.wait()
        saver.save(2, nothing, {}, None)
        wait_for(lambda: list((run.folder / "checkpoints").glob(".step_2.*.tmp/*.distcp")))
        processes = ranks()
        processes[1].kill()
        killed = time.monotonic()
        with pytest.raises(RankError, match=r"trainer rank [01] \(dp [01]\) died at \S+ while .*: killed from outside"):
            policy.update(0, 1e-3)
            saver.wait()
        assert time.monotonic() - killed < 10
        with pytest.raises(RankError):
            saver.wait()
        assert [c.step for c in checkpoints(run.folder)] == [1]
        assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_1"]
    assert all_gone(processes)


def rank(number: int, folder: Path, log: str = "") -> Rank:
    path = folder / f"trainer-{number}.log"
    path.write_text(log)
    return Rank(number, f"dp {number}", path)


WATCHDOG = (
    "[rank0]:[E ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=93, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600027 milliseconds before timing out.\n"
)


def test_of_ranks_that_nccl_ended_the_one_that_kept_them_waiting_is_named(tmp_path: Path) -> None:
    ranks = [rank(0, tmp_path, WATCHDOG), rank(1, tmp_path)]
    line = str(verdict({0: ray.exceptions.ActorDiedError()}, [ranks[1]], ranks, "updating", 600.0))
    assert line.startswith("trainer rank 1 (dp 1) did not go on at ")
    assert "while updating: trainer rank 0 (dp 0) waited 600 s in ALLREDUCE; its log is" in line


def test_a_crash_in_native_code_is_told_by_the_ranks_last_words(tmp_path: Path) -> None:
    log = "Fatal Python error: Segmentation fault\n\nThread 0x00007f (most recent call first):\n  ...\n"
    ranks = [rank(0, tmp_path), rank(1, tmp_path, log)]
    failures = {0: RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")}
    line = str(verdict(failures | {1: ray.exceptions.ActorDiedError()}, [], ranks, "scoring", 600.0))
    assert line.startswith("trainer rank 1 (dp 1) died at ") and "while scoring: Segmentation fault; its log" in line


def test_a_ranks_own_error_is_told_rather_than_what_it_did_to_the_others(tmp_path: Path) -> None:
    ranks = [rank(0, tmp_path), rank(1, tmp_path)]
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    mine = FloatingPointError("the loss is not finite")
    assert operation_of(mine) is None
    assert verdict({0: closed, 1: mine}, [], ranks, "updating", 600.0) is mine
