"""An optimizer state in files survives a kill at any moment, and what is not the state that was written is refused."""

import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import nvme_steps as steps
import pytest
import torch

from beam_rl.errors import InputError
from beam_rl.megatron.nvme import store as store_module
from beam_rl.megatron.nvme.disk import DiskError, aligned
from beam_rl.megatron.nvme.layout import KINDS, UNIT, Shard, plan
from beam_rl.megatron.nvme.pipeline import HOST_SLOTS, Pipeline
from beam_rl.megatron.nvme.store import MANIFEST, FileStore, HostStore, read_manifest

KILLS = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds a state after two updates."""
    training = steps.Training(made(tmp_path / "rank_0"))
    training.update()
    training.update()
    training.store.close()
    return tmp_path / "rank_0"


def made(folder: Path) -> FileStore:
    return FileStore.create(folder, steps.layout(), steps.fill(steps.layout()))


def forked_from_a_process_that_has_torch() -> Any:
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # the server's way to nvme_steps
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nvme_steps"])
    return context


def test_a_file_system_without_hard_links_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints take the state by a second name of its file."""

    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(InputError, match=r"has no hard links \(operation not permitted\); name a local disk"):
        made(tmp_path / "rank_0")
    monkeypatch.undo()
    made(tmp_path / "rank_0").close()  # nothing keeps the folder locked


def test_blocks_cover_every_element_once_and_lie_as_direct_io_wants() -> None:
    draw = random.Random(0)
    for moments in (torch.float32, torch.bfloat16):
        shards = [Shard(f"p{i}", (n,), 0, n, i % 3, i % 2 == 0) for i in range(40) if (n := draw.randint(1, 90_000))]
        layout = plan(shards, 65536, moments)
        seen = [torch.zeros(shard.numel) for shard in layout.shards]
        ends = {kind: set() for kind in KINDS}
        for block in layout.blocks:
            assert block.start % UNIT == block.numel % UNIT == 0
            assert sum(nbytes for _, _, nbytes in layout.extents(block)) <= 65536
            for kind, offset, nbytes in layout.extents(block):
                assert offset % 4096 == nbytes % 4096 == 0 and offset + nbytes <= layout.nbytes
                ends[kind].add((offset, offset + nbytes))
            for piece in block.pieces:
                shard = layout.shards[piece.shard]
                assert (shard.group, shard.has_main) == (block.group, block.has_main)
                assert layout.positions[piece.shard] + piece.begin == block.start + piece.at
                seen[piece.shard][piece.begin : piece.begin + piece.numel] += 1
        assert all(bool((count == 1).all()) for count in seen)
        flat = sorted(end for kind in KINDS for end in ends[kind])
        assert all(a[1] == b[0] for a, b in pairwise(flat)) and flat[-1][1] == layout.nbytes


@pytest.mark.parametrize("slots", [1, 2, 3, HOST_SLOTS, 50])
def test_files_and_host_memory_hold_the_same_state_however_many_blocks_are_under_way(
    slots: int, tmp_path: Path
) -> None:
    training = steps.Training(made(tmp_path), slots)
    for _ in range(4):
        training.update()
    state = training.store.layout.nbytes
    assert (training.store.read_bytes, training.store.write_bytes) == (4 * state, 5 * state)
    for ours, theirs in zip(training.state(), steps.expected(4), strict=True):
        assert torch.equal(ours, theirs)
    training.store.close()


def test_a_state_goes_on_where_it_was_when_its_folder_is_opened_again(folder: Path) -> None:
    store = FileStore.open(folder, steps.layout())
    assert store.updates == 2
    training = steps.Training(store)
    training.update()
    assert all(torch.equal(a, b) for a, b in zip(training.state(), steps.expected(3), strict=True))
    store.close()


def test_a_file_system_without_direct_io_is_told_apart_and_works(tmp_path: Path, monkeypatch: Any) -> None:
    direct = made(tmp_path / "direct")
    assert direct.direct, "this needs a file system that has direct I/O"
    direct.close()
    real = os.open

    def refusing(path: Any, flags: int, *args: Any) -> int:
        handle = real(path, flags & ~os.O_DIRECT, *args)
        if flags & os.O_DIRECT:  # as Linux does it: the file is there when the call fails
            os.close(handle)
            raise OSError(errno.EINVAL, "Invalid argument")
        return handle

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        training = steps.Training(made(tmp_path / "buffered"))
    assert not training.store.direct
    training.update()
    assert all(torch.equal(a, b) for a, b in zip(training.state(), steps.expected(1), strict=True))
    training.store.close()


def test_a_kill_at_any_write_leaves_a_state_from_which_the_same_bits_follow(folder: Path, tmp_path: Path) -> None:
    """Each process goes on from what the killed one before left, and is killed at another of its writes."""
    context = forked_from_a_process_that_has_torch()
    draw, layout = random.Random(7), steps.layout()
    writes = (
        sum(len(layout.extents(block)) for block in layout.blocks) + 4
    )  # of an update: blocks, three syncs, a rename
    expected = {n: steps.expected(n) for n in range(2, 40)}
    # The end is where it is decided; the others are blocks' writes.
    moments, seen = [*draw.sample(range(1, writes - 3), KILLS - 4), *range(writes - 3, writes + 1)], []
    for moment in moments:
        before = read_manifest(folder)["updates"]
        process = context.Process(target=steps.killed_at, args=(folder, moment))
        process.start()
        process.join(60)
        assert process.exitcode == -9
        store = FileStore.open(folder, layout)
        assert store.updates in (before, before + 1)
        seen.append(store.updates - before)
        training = steps.Training(store)
        assert all(torch.equal(a, b) for a, b in zip(training.state(), expected[store.updates], strict=True))
        if store.updates == before:
            training.update()  # it can also be finished
            assert all(torch.equal(a, b) for a, b in zip(training.state(), expected[before + 1], strict=True))
        store.close()
    assert seen[-1] == 1, "killed after the rename: the update counts"
    assert not any(seen[:-1])


def test_a_folder_without_a_whole_state_is_refused(folder: Path, tmp_path: Path) -> None:
    layout = steps.layout()
    with pytest.raises(InputError, match="holds no optimizer state"):
        FileStore.open(tmp_path / "nowhere", layout)
    text = (folder / MANIFEST).read_text()
    for torn in (text[: len(text) // 2], "", "[]", text.replace('"updates": 2', '"updates": 3')):
        (folder / MANIFEST).write_text(torn)
        with pytest.raises(InputError, match="is torn"):
            FileStore.open(folder, layout)
    (folder / MANIFEST).unlink()
    with pytest.raises(InputError, match="holds no optimizer state"):
        FileStore.open(folder, layout)
    (folder / MANIFEST).write_text(text)
    os.truncate(folder / "generation_0", layout.nbytes - 4096)
    with pytest.raises(InputError, match=r"generation_0 has \d+ bytes, should have \d+: .* torn"):
        FileStore.open(folder, layout)


def test_another_models_state_is_refused_and_the_difference_named(folder: Path) -> None:
    other = plan([Shard("w0", (5000,), 0, 5000, 0, True)], 65536, torch.float32)
    with pytest.raises(InputError, match=r"another model or layout \(elements 58115 there, 5000 here\)"):
        FileStore.open(folder, other)
    renamed = [Shard(s.name + "x", s.shape, s.start, s.numel, s.group, s.has_main) for s in steps.layout().shards]
    with pytest.raises(InputError, match=r"another model or layout \(layout "):
        FileStore.open(folder, plan(renamed, 65536, torch.float32))
    with pytest.raises(InputError, match=r"moments float32 there, bfloat16 here"):
        FileStore.open(folder, steps.layout(torch.bfloat16))
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["layout"] == steps.layout().fingerprint()


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_found_when_its_block_is_read(kind: str, folder: Path) -> None:
    layout = steps.layout()
    block = len(layout.blocks) // 2
    offset = dict((k, o) for k, o, _ in layout.extents(layout.blocks[block]))[kind] + 1001
    with (folder / f"generation_{read_manifest(folder)['generation']}").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    training = steps.Training(FileStore.open(folder, layout))
    with pytest.raises(DiskError, match=rf"block {block} of .*generation_\d is not what was written there"):
        training.update()
    training.store.close()
    assert read_manifest(folder)["updates"] == 2


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    store = made(tmp_path)
    for again in (lambda: made(tmp_path), lambda: FileStore.open(tmp_path, steps.layout())):
        with pytest.raises(InputError, match="another process keeps its optimizer state in"):
            again()
    store.close()
    made(tmp_path).close()


def test_a_new_state_takes_the_place_of_an_old_one_and_starts_at_zero(folder: Path) -> None:
    kept = folder.parent / "kept"
    os.link(folder / "generation_0", kept)
    before = kept.read_bytes()
    store = made(folder)
    assert store.updates == 0 and not store.view("exp_avg", 0).any()
    assert kept.read_bytes() == before, "another name of the old file is not written to"
    store.close()


def test_a_file_that_may_not_be_so_large_is_one_line_at_the_start(tmp_path: Path) -> None:
    """As a full disk: the space is reserved before anything else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (steps.layout().nbytes // 2, hard))
    try:
        with pytest.raises(DiskError, match=r"^trainer.optimizer.nvme.path: can't make .*generation_0: files of .* GB"):
            made(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / MANIFEST).exists() and not (tmp_path / "generation_0").exists()


def test_a_full_disk_is_one_line_at_the_start_and_nobody_else_meets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is taken that does not fit: it would leave others no room for a while."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: pytest.fail("takes what there is"))
    free = shutil.disk_usage(tmp_path).free
    numel = free // 12 + 2**30
    too_large = plan([Shard("w", (numel,), 0, numel, 0, True)], 2**30, torch.float32)
    with pytest.raises(DiskError, match=r"generation_0: the disk is full \(.* GB are needed for this file\)$"):
        FileStore.create(tmp_path, too_large, lambda index, sections: None)
    assert not (tmp_path / "generation_0").exists()


def test_a_disk_with_room_for_one_generation_keeps_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And both old ones are gone before room is taken for the first new one."""
    there: list[list[str]] = []

    def one_only(*args: int) -> None:
        there.append(sorted(path.name for path in folder.iterdir()))
        if len(there) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", one_only)
    with pytest.raises(DiskError, match="generation_1: the disk is full"):
        made(folder)
    assert there[0] == [".lock", "generation_0"] and [path.name for path in folder.iterdir()] == [".lock"]


def test_an_update_that_can_not_be_written_leaves_the_last_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, calls = steps.Training(FileStore.open(folder, steps.layout())), []

    def failing(*args: object) -> int:
        calls.append(args)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        with pytest.raises(DiskError, match=r"can't write .*generation_\d: Input/output error$"):
            training.update()
    assert calls
    training.store.close()
    training = steps.Training(FileStore.open(folder, steps.layout()))
    training.update()
    assert all(torch.equal(a, b) for a, b in zip(training.state(), steps.expected(3), strict=True))
    training.store.close()


def test_staging_is_a_few_blocks_whatever_the_size_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def counted(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return aligned(nbytes)

    monkeypatch.setattr(store_module, "aligned", counted)
    peaks = []
    for numel in (2_000_000, 8_000_000):
        layout = plan([Shard("w", (numel,), 0, numel, 0, True)], 2**20, torch.float32)
        store = FileStore.create(tmp_path / str(numel), layout, lambda index, sections: None)
        taken.clear()
        pipeline = Pipeline(store, torch.device("cpu"))
        pipeline.run(lambda index, sections: sections["main"].add_(1.0))
        store.commit(1)
        assert bool((store.view("main", 0) == 1).all())
        peaks.append(sum(taken))
        store.close()
    assert peaks[0] == peaks[1] <= HOST_SLOTS * 2**20


def test_host_memory_is_the_state_itself_and_no_staging() -> None:
    store = HostStore(steps.layout(), steps.fill(steps.layout()))
    assert store.staging(5) == []
    assert store.view("main", 0).untyped_storage().nbytes() < store.layout.nbytes + 8192
