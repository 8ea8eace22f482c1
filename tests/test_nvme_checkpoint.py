"""A checkpoint takes the optimizer's state in files by reference: nothing is copied, and no update gets into it."""

import errno
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import megatron_layouts as layouts
import megatron_tiny as tiny
import nvme_steps as steps
import pytest
import torch
from test_nvme_optimizer import close, everything, same, trainer, update
from test_nvme_store import forked_from_a_process_that_has_torch, made
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from beam_rl.errors import InputError
from beam_rl.megatron.nvme.disk import DiskError
from beam_rl.megatron.nvme.snapshot import SUFFIX, SavedBy, SavedState, _reflink
from beam_rl.megatron.nvme.store import FileStore, read_manifest
from beam_rl.megatron.optimizer import get_step

KILLS = 24


@pytest.fixture(params=["hard link", "copy"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, SavedBy]]:
    """A checkpoint's folder, and how a file of this test's own folder gets into it."""
    if request.param == "hard link":
        (tmp_path / "checkpoint").mkdir()
        yield tmp_path / "checkpoint", "hard link"
        return
    elsewhere = Path(tempfile.mkdtemp(dir="/dev/shm"))
    assert elsewhere.stat().st_dev != tmp_path.stat().st_dev, "this needs two file systems"
    yield elsewhere, "copy"
    shutil.rmtree(elsewhere)


def state_file(folder: Path) -> Path:
    (found,) = folder.glob(f"rank_*{SUFFIX}")
    return found


def saved(folder: Path) -> list[Tensor]:
    """What a snapshot holds, in the order of `Training.state`."""
    of = steps.layout()
    with SavedState(folder, state_file(folder).name) as state:
        return [
            state.read(of.place(kind, i), shard.numel * 4, torch.float32).clone()
            for i, shard in enumerate(of.shards)
            for kind in of.kinds(True)
        ]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def disk_bytes(*folders: Path) -> int:
    """Of the state's files; one with two names counts once."""
    files = [f.stat() for folder in folders for f in folder.iterdir() if f.name.startswith(("gen", "rank", "saving"))]
    return sum({one.st_ino: one.st_blocks * 512 for one in files if one.st_size > 100_000}.values())


# --- a store's snapshots -----------------------------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", [0, 1, 4])
def test_a_snapshot_has_the_bits_of_its_moment_whatever_updates_follow(
    meanwhile: int, target: tuple[Path, SavedBy], tmp_path: Path
) -> None:
    """meanwhile: updates before it is in the checkpoint; two write both generations."""
    training = steps.Training(made(tmp_path / "rank_0"))
    for _ in range(2):
        training.update()
    snapshot = training.store.snapshot("rank_0")
    for _ in range(meanwhile):
        training.update()
    assert snapshot.put(target[0]) == target[1]
    for _ in range(3):
        training.update()
    assert equal(saved(target[0]), steps.expected(2))
    assert equal(training.state(), steps.expected(2 + meanwhile + 3))
    assert not snapshot.link.exists()
    training.store.close()


def test_a_snapshot_takes_no_room_until_the_update_that_would_write_to_it(tmp_path: Path) -> None:
    folder, kept = tmp_path / "rank_0", tmp_path / "checkpoint"
    kept.mkdir()
    training = steps.Training(made(folder))
    both = disk_bytes(folder)
    before = training.store.write_bytes
    training.store.snapshot("rank_0").put(kept)
    assert training.store.write_bytes == before
    source = training.store.path(training.store.generation)
    assert state_file(kept).stat().st_ino == source.stat().st_ino and source.stat().st_nlink == 2
    assert disk_bytes(folder, kept) == both
    training.update()
    assert disk_bytes(folder, kept) == both, "this update has written the other generation"
    training.update()
    assert disk_bytes(folder, kept) == both * 3 // 2 and source.stat().st_nlink == 1
    training.store.snapshot("rank_0").drop()
    shutil.rmtree(kept)
    inodes = {training.store.path(g).stat().st_ino for g in (0, 1)}
    for _ in range(2):
        training.update()
    assert {training.store.path(g).stat().st_ino for g in (0, 1)} == inodes, "no checkpoint holds them any more"
    training.store.close()


def test_a_state_that_is_rewritten_leaves_the_checkpoint_that_has_its_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    store = made(tmp_path / "rank_0")
    store.snapshot("rank_0").put(tmp_path / "checkpoint")
    store.rewrite()
    for i in range(len(store.layout.shards)):
        for kind in store.layout.kinds(True):
            store.view(kind, i).fill_(7.0)
    store.rewritten(5)
    assert bool((store.view("exp_avg", 0) == 7).all())
    assert equal(saved(tmp_path / "checkpoint"), steps.expected(0))
    store.close()


def test_without_room_for_a_new_file_the_state_and_the_checkpoint_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kept = tmp_path / "rank_0", tmp_path / "checkpoint"
    kept.mkdir()
    training = steps.Training(made(folder))
    training.store.snapshot("rank_0").put(kept)
    training.update()

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            DiskError, match=r"^trainer.*generation_\d.new: the disk is full .*; a checkpoint holds .*generation_\d"
        ):
            training.update()
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "generation_0", "generation_1", "manifest.json"]
    assert equal(training.state(), steps.expected(1)) and equal(saved(kept), steps.expected(0))
    training.update()
    assert equal(training.state(), steps.expected(2))
    training.store.close()


def test_a_kill_between_a_snapshot_and_the_updates_after_it_loses_nothing(tmp_path: Path) -> None:
    """Each process goes on from what the killed one before left, and saves after every second update."""
    folder, kept = tmp_path / "rank_0", tmp_path / "checkpoints"
    kept.mkdir()
    made(folder).close()
    context, draw, of = forked_from_a_process_that_has_torch(), random.Random(3), steps.layout()
    seen: set[str] = set()
    whole = 0
    # Names and syncs, which are where it is decided, in each of their turns; and blocks' writes.
    moments = [(name, turn) for name in ("fsync", "rename", "link", "posix_fallocate") for turn in (1, 2, 4, 5)]
    moments += [("pwritev", draw.randint(1, 300)) for _ in range(KILLS - len(moments))]
    for number, (name, turn) in enumerate(moments):
        before = read_manifest(folder)["updates"]
        process = context.Process(target=steps.killed_while_saving, args=(folder, kept / str(number), name, turn))
        process.start()
        process.join(60)
        assert process.exitcode == -9, (name, turn)
        seen |= {path.name for path in folder.iterdir()}
        store = FileStore.open(folder, of)
        assert store.updates >= before
        assert equal(steps.Training(store).state(), steps.expected(store.updates)), (name, turn)
        names = {path.name for path in folder.iterdir()}
        assert names == {".lock", "generation_0", "generation_1", "manifest.json"}, "what the kill left is gone"
        store.close()
        for complete in (kept / str(number)).glob("[0-9]*"):
            whole += 1
            assert equal(saved(complete), steps.expected(int(complete.name))), (name, turn)
    assert whole > KILLS / 2
    assert {"saving", "generation_0.new"} <= seen, "kills have come while a file had no place of its own"


def test_a_file_that_is_not_what_was_saved_is_one_line(tmp_path: Path) -> None:
    training = steps.Training(made(tmp_path / "rank_0"))
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        training.update()
        training.store.snapshot("rank_0").put(folder)
    training.store.close()
    first, second = (state_file(folder) for folder in folders)
    about = first.with_suffix(".json")
    good, text = first.read_bytes(), about.read_text()

    def refused(match: str) -> None:
        with pytest.raises(InputError, match=match) as caught:
            saved(folders[0])
        assert "\n" not in str(caught.value)
        first.unlink(missing_ok=True)
        first.write_bytes(good)
        about.write_text(text)
        assert equal(saved(folders[0]), steps.expected(1))

    damage = bytearray(good)
    damage[-5000] ^= 1
    first.unlink()  # which is the store's, too
    first.write_bytes(damage)
    refused(rf"{re.escape(str(first))} is damaged: block \d+ is not what was saved there")
    first.write_bytes(second.read_bytes())
    refused(f"{re.escape(str(first))} is damaged: block 0")
    first.write_bytes(good[:-4096])
    refused(rf"{first.name} has \d+ bytes, should have {len(good)}: the checkpoint is torn")
    about.write_text(second.with_suffix(".json").read_text())
    refused(f"{re.escape(str(about))} is torn or of another checkpoint")
    about.unlink()
    refused(f"can't read {re.escape(str(about))}: no such file")
    first.unlink()
    with pytest.raises(InputError, match=f"can't read {re.escape(str(first))}: no such file"):
        SavedState(folders[0], first.name)
    with pytest.raises(InputError, match="is not one of our checkpoints: its index names the file '../rank_0"):
        SavedState(folders[0], f"../{first.name}")


def test_a_reflink_is_its_own_file_with_the_same_bytes(tmp_path: Path) -> None:
    source, clone = tmp_path / "source", tmp_path / "clone"
    source.write_bytes(os.urandom(100_000))
    if not _reflink(source, clone):
        assert clone.read_bytes() == b""
        pytest.skip("no reflinks in this file system (XFS and Btrfs have them)")
    assert clone.read_bytes() == source.read_bytes() and clone.stat().st_ino != source.stat().st_ino


# --- a trainer's checkpoints -------------------------------------------------------------------------------


def copied(of: tiny.Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in everything(of).items()}


@pytest.mark.parametrize(("precision", "moments"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_checkpoint_has_the_state_of_its_moment_and_the_host_no_copy_of_it(
    precision: str, moments: str, target: tuple[Path, SavedBy], tmp_path: Path
) -> None:
    changes = {"precision": precision, "moments": moments}
    streamed = trainer("nvme", tmp_path / "nvme", **changes)
    update(streamed, range(2))
    streamed.stage()
    assert {key.split(".")[0] for key, _ in streamed._host_copy._buffers} == {"model"}
    expected = copied(streamed)
    update(streamed, range(2, 5))
    assert streamed.write(target[0]) == target[1]
    update(streamed, range(5, 7))
    later = copied(streamed)
    assert not same(later, expected)
    written = sum(path.stat().st_size for path in target[0].glob("*.distcp"))
    weights = sum(p.nbytes for p in streamed.model.parameters())
    assert written < 2 * weights + 100_000, "the optimizer's state is not in torch's files"
    for kind in ("none", "nvme"):
        other = trainer(kind, tmp_path / f"other {kind}", **changes | ({"moments": "fp32"} if kind == "none" else {}))
        other.load(target[0])
        assert get_step(other.optimizer) == 2 and same(everything(other), expected), kind
        close(other)
    streamed.load(target[0])  # in the place of the state whose file it may be
    assert same(everything(streamed), expected)
    update(streamed, range(2, 7))
    assert same(everything(streamed), later)
    close(streamed)


def test_a_damaged_state_is_one_line_and_the_trainer_does_not_go_on_with_half_of_it(tmp_path: Path) -> None:
    streamed = trainer("nvme", tmp_path / "nvme")
    update(streamed, range(1))
    assert streamed.save(tmp_path / "saved") == "hard link"
    update(streamed, range(1, 3))  # which leaves the file to the checkpoint
    file = state_file(tmp_path / "saved")
    with file.open("r+b") as bytes_:
        bytes_.seek(file.stat().st_size // 2)
        byte = bytes_.read(1)[0]
        bytes_.seek(-1, 1)
        bytes_.write(bytes([byte ^ 1]))
    with pytest.raises(InputError, match=rf"^{re.escape(str(file))} is damaged: block \d+ is not") as caught:
        streamed.load(tmp_path / "saved")
    assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="loading a checkpoint failed half-way"):
        update(streamed, range(1))
    close(streamed)


def test_an_update_without_room_for_a_new_file_changes_nothing_and_the_trainer_can_still_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed = trainer("nvme", tmp_path / "nvme")
    streamed.save(tmp_path / "saved")
    update(streamed, range(1))
    expected = copied(streamed)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskError, match="the disk is full"):
            update(streamed, range(1, 2))
    assert same(everything(streamed), expected)
    streamed.save(tmp_path / "again")
    (other := trainer("none", tmp_path)).load(tmp_path / "again")
    assert same(everything(other), expected)
    close(streamed)


def test_a_copy_that_does_not_fit_is_told_and_leaves_nothing_beside_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed, elsewhere = trainer("nvme", tmp_path / "nvme"), Path(tempfile.mkdtemp(dir="/dev/shm"))

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    streamed.stage()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        with pytest.raises(CheckpointException, match="No space left on device"):
            streamed.write(elsewhere)
    names = {path.name for path in (tmp_path / "nvme" / "rank_0").iterdir()}
    assert names == {".lock", "generation_0", "generation_1", "manifest.json"}
    update(streamed, range(2))
    assert streamed.save(elsewhere / "again") == "copy"
    (other := trainer("none", tmp_path)).load(elsewhere / "again")
    assert same(everything(other), everything(streamed))
    close(streamed)
    shutil.rmtree(elsewhere)


def test_what_every_rank_holds_a_copy_of_is_saved_by_one(tmp_path: Path) -> None:
    """Without the distributed optimizer. A state in host memory has no file: its checkpoint is as it was."""
    for kind in ("nvme", "cpu"):
        one = trainer(kind, tmp_path / kind, distributed=False)
        assert one.save(tmp_path / f"saved {kind}") == ("hard link" if kind == "nvme" else None)
        close(one)
    ours, theirs = (layouts.read_checkpoint(tmp_path / f"saved {kind}") for kind in ("nvme", "cpu"))
    assert same(ours, theirs) and not list((tmp_path / "saved cpu").glob("rank_*"))
