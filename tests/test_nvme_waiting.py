"""A trainer's state that waits in a file comes back bit for bit or not at all, and what can't leave stays usable."""

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.megatron.nvme.disk import DiskError
from beam_rl.megatron.nvme.waiting import SLOTS, FilePlace
from beam_rl.megatron.offload import Held, Offload
from beam_rl.recipe.load import RecipeError, load

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
BLOCK = 65536


def held() -> Held:
    """Storages smaller than a block, as large as several, and of odd sizes; a view of one; gradients."""
    torch.manual_seed(0)
    frozen = [torch.randn(n) for n in (7, 40_000, 1)]
    weights = [torch.randn(n, dtype=torch.bfloat16) for n in (200_001, 3, 32_768)]
    return Held(frozen, weights, [torch.randn(1000)], [weights[0][5:90], torch.randn(50_000)])


def kept(of: Held) -> list[Tensor]:
    return [*of.frozen, *of.weights, *of.rest]


def copies(of: Held) -> list[Tensor]:
    return [tensor.clone() for tensor in kept(of)]


def same(of: Held, before: list[Tensor]) -> bool:
    return all(torch.equal(now, then) for now, then in zip(kept(of), before, strict=True))


def waiting(of: Held, folder: Path) -> tuple[Offload, FilePlace]:
    offload = Offload(of, partial(FilePlace, folder=folder, block_bytes=BLOCK))
    assert isinstance(offload.place, FilePlace)
    return offload, offload.place


def failing(real: Callable[..., int], after: int, code: int) -> Callable[..., int]:
    calls: list[int] = []

    def call(*args: object) -> int:
        calls.append(1)
        if len(calls) > after:
            raise OSError(code, os.strerror(code))
        return real(*args)

    return call


def test_what_waits_in_a_file_comes_back_bit_for_bit_and_views_stay_views(tmp_path: Path) -> None:
    of = held()
    before, (offload, place) = copies(of), waiting(of, tmp_path)
    assert place.host_bytes == SLOTS * BLOCK
    for turn in range(3):
        offload.put("weights")
        assert all(torch.equal(a, b) for a, b in zip(of.weights, before[3:6], strict=True))
        offload.put("nothing")
        assert not any(t.untyped_storage().nbytes() for t in (*kept(of), *of.gradients))
        offload.put("all")
        assert same(of, before) and of.gradients[0].untyped_storage().nbytes() == 4000
        of.rest[0].fill_(turn)
        assert bool((of.weights[0][5:90] == turn).all())
        of.rest[1].mul_(3)
        before = copies(of)
    place.close()


def test_the_file_has_no_name_and_its_space_is_back_when_it_is_closed(tmp_path: Path) -> None:
    of = held()
    offload, place = waiting(of, tmp_path / "new")
    offload.put("nothing")
    assert not list((tmp_path / "new").iterdir())
    file = place._file._fd
    there = os.fstat(file)
    assert there.st_nlink == 0 and there.st_blocks * 512 >= sum(t.untyped_storage().nbytes() for t in of.frozen)
    place.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    place.close()


def test_a_byte_that_the_disk_has_lost_is_one_line_and_the_rest_can_still_be_read(tmp_path: Path) -> None:
    of = held()
    before, (offload, place) = copies(of), waiting(of, tmp_path)
    offload.put("nothing")
    at = place._starts["weights"] + 3 * BLOCK + 17
    with open(f"/proc/self/fd/{place._file._fd}", "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
    with pytest.raises(DiskError, match=r"block 3 of the trainer's weights in .* is not what was written") as refused:
        offload.put("all")
    assert "\n" not in str(refused.value) and offload.on_gpu == "nothing"
    assert not any(t.untyped_storage().nbytes() for t in kept(of)), "half of a state is none"
    with open(f"/proc/self/fd/{place._file._fd}", "r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))
        os.fsync(file.fileno())
    offload.put("all")
    assert same(of, before)
    place.close()


def test_a_file_that_was_cut_is_one_line(tmp_path: Path) -> None:
    of = held()
    offload, place = waiting(of, tmp_path)
    offload.put("nothing")
    os.truncate(place._file._fd, place._starts["weights"] + BLOCK)
    with pytest.raises(DiskError, match=r"can't read .*: it ends at byte \d+ of \d+; the file was cut$"):
        offload.put("weights")
    place.close()


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error")])
def test_what_can_not_be_written_stays_where_it_is_and_leaves_the_next_time(
    code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = held()
    before, (offload, place) = copies(of), waiting(of, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(os.pwritev, 6, code))
        with pytest.raises(DiskError, match=f"can't write .*: {reason}"):
            offload.put("nothing")
    assert offload.on_gpu == "all" and same(of, before) and of.gradients[0].numel() == 1000
    of.weights[1].fill_(5)  # training goes on, also with what had been written already
    of.rest[1].fill_(6)
    before = copies(of)
    offload.put("nothing")
    offload.put("all")
    assert same(of, before)
    place.close()


def test_a_part_that_was_written_before_another_one_failed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = held()
    offload, place = waiting(of, tmp_path)
    real = place.take

    def all_but_the_rest(part: str, pieces: list) -> None:
        if part == "rest":
            raise DiskError("can't write")
        real(part, pieces)

    monkeypatch.setattr(place, "take", all_but_the_rest)
    with pytest.raises(DiskError):
        offload.put("nothing")
    monkeypatch.undo()
    of.weights[2].fill_(7)
    assert offload.put("nothing") == sum(t.nbytes for t in (*of.weights, of.rest[1])), (
        "the frozen ones have been written"
    )
    offload.put("all")
    assert bool((of.weights[2] == 7).all())
    place.close()


def test_an_error_on_the_way_back_frees_what_had_come_and_the_next_time_all_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = held()
    before, (offload, place) = copies(of), waiting(of, tmp_path)
    offload.put("nothing")
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(os.preadv, 6, errno.EIO))
        with pytest.raises(DiskError, match=r"can't read .*: Input/output error$"):
            offload.put("all")
    assert not any(t.untyped_storage().nbytes() for t in (*kept(of), *of.gradients))
    offload.put("all")
    assert same(of, before)
    place.close()


def test_a_full_disk_is_one_line_at_the_start_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: pytest.fail("takes what there is"))
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(DiskError, match=r"waiting_\w+: the disk is full \(.* GB are needed for this file\)$"):
        FilePlace({"rest": free + 2**32}, tmp_path, BLOCK)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"trainer.optimizer.nvme.path: can't use .*file/below: not a directory$"):
        FilePlace({"rest": 1}, tmp_path / "file" / "below", BLOCK)


PATH = "trainer.optimizer.nvme.path=/nvme"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"trainer.optimizer.nvme.path is missing: with trainer.wait_in = nvme, name a folder"),
        ([PATH, "cluster.placement=disaggregated"], "nvme: with cluster.placement = disaggregated the trainer keeps"),
        ([PATH, "rollout.pace=asynchronous"], "with rollout.pace = asynchronous, so cluster.placement = disaggregated"),
    ],
)  # fmt: skip
def test_a_recipe_that_can_not_wait_on_nvme_is_refused_by_its_keys(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load(TINY, ["trainer.wait_in=nvme", *overrides])
    load(TINY, ["trainer.wait_in=nvme", PATH, "trainer.optimizer.offload=none"])
