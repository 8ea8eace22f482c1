"""Adam's state in host memory or in files trains as the state that stays, bit for bit, and moves between them."""

from pathlib import Path
from typing import Any, Literal

import megatron_layouts as layouts
import megatron_tiny as tiny
import pytest
import torch
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.layout import cut_routes
from beam_rl.loop import StepError, nvme_metrics
from beam_rl.lora import ALL_TARGETS, Adapter
from beam_rl.megatron.nvme.disk import DiskError
from beam_rl.megatron.nvme.store import FileStore, read_manifest
from beam_rl.megatron.optimizer import get_step, parameter_state, state_tensors, streamed_state
from beam_rl.recipe.load import RecipeError, load
from beam_rl.recipe.tree import Nvme, Optimizer, Parallel

Kind = Literal["none", "cpu", "nvme"]
ADAPTER = Adapter(rank=8, alpha=16.0, expert_rank=2, expert_alpha=4.0, targets=ALL_TARGETS)
CLIP = 0.002
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # updates, and what the trainer is besides
    "fp32": (20, {}),
    "bf16": (20, {"precision": "bf16"}),
    "fp32, whole on every rank": (4, {"distributed": False}),
    "bf16, whole on every rank": (4, {"precision": "bf16", "distributed": False}),
    "bf16, adapter": (4, {"precision": "bf16", "adapter": ADAPTER}),
}


def trainer(kind: Kind, folder: Path, moments: str = "fp32", distributed: bool = True, **changes: Any) -> tiny.Trainer:
    """Blocks are small, so that there are a hundred; gradients are always clipped."""
    nvme = Nvme(path=str(folder), block_bytes=65536, moments=moments)
    optimizer = Optimizer(lr=1e-3, weight_decay=0.1, clip_grad=CLIP, distributed=distributed, offload=kind, nvme=nvme)
    return tiny.trainer(optimizer=optimizer, nvme_folder=str(folder), **changes)


def update(of: tiny.Trainer, seeds: range) -> list[dict[str, float]]:
    found = [of.update([tiny.micro_batch([9, 14], seed=seed)], tiny.squared_objective, 1e-3) for seed in seeds]
    return [{name: value for name, value in one.items() if not name.startswith("nvme/")} for one in found]


def everything(of: tiny.Trainer) -> dict[str, Tensor]:
    """On the CPU."""
    weights = {name: tensor.cpu().clone() for name, tensor in of.sync_tensors()}
    state = parameter_state(of.model, of.optimizer)
    return weights | {f"{kind} {name}": flat.float().cpu() for kind, name, flat, _ in state}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def close(of: tiny.Trainer) -> None:
    state = streamed_state(of.optimizer)
    if state:
        state.close()


@pytest.mark.parametrize("case", CASES)
def test_updates_have_the_bits_of_the_optimizer_that_keeps_its_state(case: str, tmp_path: Path) -> None:
    updates, changes = CASES[case]
    stayed = trainer("none", tmp_path, **changes)
    metrics, expected = update(stayed, range(updates)), everything(stayed)
    assert all(one["optim/grad_norm"] > CLIP for one in metrics)
    for kind in ("cpu", "nvme"):
        streamed = trainer(kind, tmp_path, **changes)
        assert update(streamed, range(updates)) == metrics
        assert same(everything(streamed), expected) and get_step(streamed.optimizer) == updates
        close(streamed)


def test_nothing_but_weights_and_gradients_has_memory_of_its_own(tmp_path: Path) -> None:
    streamed, stayed = trainer("nvme", tmp_path, precision="bf16"), trainer("none", tmp_path, precision="bf16")
    weights = {p.untyped_storage().data_ptr() for p in streamed.model.parameters()}

    def own(of: tiny.Trainer) -> int:
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in state_tensors(of.optimizer, of.device)}
        return sum(s.nbytes() for s in storages.values() if s.data_ptr() not in weights)

    assert own(streamed) == 0 and own(stayed) > 12 * 0.9 * sum(p.numel() for p in stayed.model.parameters())
    close(streamed)


@pytest.mark.parametrize("distributed", [True, False])
def test_megatron_still_copies_main_parameters_after_the_step(distributed: bool, tmp_path: Path) -> None:
    """Which `compat.replace_adam` stops, since they have no memory; on the day that it does not, that can go."""
    stayed = trainer("none", tmp_path, distributed=distributed, precision="bf16")
    parts, calls = getattr(stayed.optimizer, "chained_optimizers", [stayed.optimizer]), []
    for part in parts:
        copy = part._copy_main_params_to_model_params
        part._copy_main_params_to_model_params = lambda copy=copy: (calls.append(copy), copy())
    update(stayed, range(1))
    assert len(calls) == len(parts) > 0


def test_moments_in_bf16_are_those_of_fp32_rounded_after_every_update(tmp_path: Path) -> None:
    """As an optimizer that keeps its state and whose moments we round ourselves, to nearest even."""
    rounded = trainer("none", tmp_path, precision="bf16")
    for seed in range(5):
        update(rounded, range(seed, seed + 1))
        for kind, _, flat, _ in parameter_state(rounded.model, rounded.optimizer):
            if kind != "main":
                flat.copy_(flat.bfloat16())
    expected = everything(rounded)
    for kind in ("cpu", "nvme"):
        streamed = trainer(kind, tmp_path, moments="bf16", precision="bf16")
        update(streamed, range(5))
        assert same(everything(streamed), expected)
        close(streamed)


def test_bytes_are_those_of_the_state_and_reading_begins_before_the_backward_pass(tmp_path: Path) -> None:
    streamed = trainer("nvme", tmp_path, precision="bf16")
    state = streamed_state(streamed.optimizer)
    assert state is not None
    seen: list[int] = []

    def objective(inputs: Any) -> Any:
        seen.append(state.store.read_bytes)
        return tiny.squared_objective(inputs)

    metrics = streamed.update([tiny.micro_batch([9])], objective, 1e-3)
    assert metrics["nvme/read_bytes"] == metrics["nvme/write_bytes"] == state.store.layout.nbytes
    assert seen[0] > 0 and metrics["nvme/seconds"] > 0
    numel = sum(p.numel() for p in streamed.model.parameters())
    assert 11 * numel < metrics["nvme/read_bytes"] < 15 * numel
    close(streamed)


def test_an_update_whose_loss_is_not_finite_changes_nothing_and_the_next_one_is_right(tmp_path: Path) -> None:
    def broken(inputs: Any) -> Any:
        token = tiny.squared_objective(inputs)
        return tiny.replace(token, loss=token.loss * float("nan"))

    streamed, stayed = trainer("nvme", tmp_path), trainer("none", tmp_path)
    for one in (streamed, stayed):
        update(one, range(1))
        with pytest.raises(FloatingPointError):
            one.update([tiny.micro_batch([9])], broken, 1e-3)
        update(one, range(1, 2))
    assert same(everything(streamed), everything(stayed))
    close(streamed)


def test_after_a_disk_error_nothing_goes_on_until_a_checkpoint_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed = trainer("nvme", tmp_path / "nvme")
    update(streamed, range(2))
    streamed.save(tmp_path / "saved")
    (expected := trainer("none", tmp_path)).load(tmp_path / "saved")
    update(expected, range(2, 4))

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", full)
        with pytest.raises(DiskError, match="the disk is full"):
            update(streamed, range(1))
    for act in (lambda: update(streamed, range(1)), lambda: streamed.save(tmp_path / "wrong")):
        with pytest.raises(RuntimeError, match="an update failed half-way; start from the last checkpoint"):
            act()
    assert read_manifest(tmp_path / "nvme" / "rank_0")["updates"] == 2
    streamed.load(tmp_path / "saved")
    state = streamed_state(streamed.optimizer)
    assert state is not None and state.take_moved().read_bytes == 0, "what a load moves belongs to no update"
    update(streamed, range(2, 4))
    assert same(everything(streamed), everything(expected))
    close(streamed)


def test_a_load_that_fails_leaves_no_state_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = trainer("nvme", tmp_path / "nvme")
    streamed.save(tmp_path / "saved")

    def broken(*args: object, **kwargs: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("torch.distributed.checkpoint.load", broken)
    with pytest.raises(OSError):
        streamed.load(tmp_path / "saved")
    close(streamed)
    state = streamed_state(streamed.optimizer)
    assert state is not None
    with pytest.raises(InputError, match="holds no optimizer state"):
        FileStore.open(tmp_path / "nvme" / "rank_0", state.store.layout)


def test_a_trainers_folder_is_its_own_and_goes_when_it_is_discarded(tmp_path: Path) -> None:
    first = trainer("nvme", tmp_path / "nvme")
    with pytest.raises(InputError, match="another process keeps its optimizer state"):
        trainer("nvme", tmp_path / "nvme")
    first.discard()
    assert not (tmp_path / "nvme").exists()


# --- ranks ------------------------------------------------------------------------------------------------


SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": CLIP, "eps": 1e-5}
# Each kind goes on from what the one before has saved, and makes two updates.
CHAINS: dict[str, tuple[Parallel, list[Kind]]] = {
    "one": (Parallel(), ["none", "nvme", "cpu", "none"]),
    "dp and ep": (Parallel(dp=2, ep=2), ["nvme", "none", "nvme"]),
    "tp": (Parallel(tp=2, etp=2, sp=True), ["nvme"]),
    "pp": (Parallel(pp=2), ["nvme"]),
}


def chain(rank: int, name: str, folder: Path, start: Path | None, done: int) -> dict[str, list[layouts.Tensors]]:
    """The weights after each of a chain's trainers, "streamed" as it says and "stayed": all of them with `none`.

    start: a checkpoint after `done` updates. States end in `folder / "streamed" / i` and `folder / "stayed" / i`.
    """
    parallel, kinds = CHAINS[name]
    found: dict[str, list[layouts.Tensors]] = {"streamed": [], "stayed": []}
    for way, weights in found.items():
        before = start
        for i, kind in enumerate(kinds):
            offload = kind if way == "streamed" else "none"
            optimizer = Optimizer(**SETTINGS, offload=offload, nvme=Nvme(path=str(folder), block_bytes=65536))
            settings = tiny.settings(parallel=parallel, optimizer=optimizer, nvme_folder=str(folder / "nvme"))
            master = layouts._meeting(folder / f"{way} {i}.address", rank)
            one = tiny.Trainer(str(tiny.checkpoint()), settings, rank, parallel.ranks, master)
            if before is not None:
                one.load(before)
            mine = layouts.shares(layouts.BATCHES, parallel)[one.place.dp]
            for _ in range(2):
                one.update([cut_routes(batch, one.place) for batch in mine], tiny.squared_objective, 1e-3)
            assert get_step(one.optimizer) == done + 2 * (i + 1)
            before = folder / way / str(i)
            one.save(before)
            weights.append(layouts.weights(one))
            one.close()
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[layouts.Tensors]]]:
    """One process: where its last state is, and its weights."""
    folder = tmp_path_factory.mktemp("one")
    (weights,) = tiny.in_new_processes(chain, (0, "one", folder, None, 0))
    return folder / "streamed" / "3", weights


def test_a_checkpoint_moves_between_the_kinds(first: tuple[Path, dict[str, list[layouts.Tensors]]]) -> None:
    streamed, stayed = first[1]["streamed"], first[1]["stayed"]
    assert len(streamed) == 4
    assert all(layouts.same_bits(ours, theirs) for ours, theirs in zip(streamed, stayed, strict=True))


@pytest.mark.parametrize("name", ["dp and ep", "tp", "pp"])
def test_a_checkpoint_moves_between_layouts_and_kinds(
    name: str, first: tuple[Path, dict[str, list[layouts.Tensors]]], tmp_path: Path
) -> None:
    """From one process to two, bit for bit as with a state that stays; and back to one."""
    ranks = tiny.in_new_processes(chain, *[(rank, name, tmp_path, first[0], 8) for rank in range(2)], timeout_s=300)
    for ours, theirs, other in zip(ranks[0]["streamed"], ranks[0]["stayed"], ranks[1]["streamed"], strict=True):
        assert layouts.same_bits(ours, theirs) and layouts.same_bits(ours, other)
    last = str(len(CHAINS[name][1]) - 1)
    assert len(list((tmp_path / "streamed" / last).glob("rank_*.state"))) == 2, "saved by reference"
    expected = layouts.read_checkpoint(tmp_path / "stayed" / last)
    assert same(layouts.read_checkpoint(tmp_path / "streamed" / last), expected)
    alone = trainer("nvme", tmp_path / "alone")
    alone.load(tmp_path / "streamed" / last)
    alone.save(tmp_path / "back")
    assert same(layouts.read_checkpoint(tmp_path / "back"), expected)
    close(alone)


# --- the recipe -------------------------------------------------------------------------------------------

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["offload=nvme"], "trainer.optimizer.nvme.path is missing"),
        (["nvme.block_bytes=100000"], "nvme.block_bytes = 100000: .* multiple of 4096, .*; 98304 would do"),
        (["nvme.block_bytes=4096"], "nvme.block_bytes = 4096: .*; 65536 would do"),
        (["nvme.moments=bf16"], "trainer.optimizer.nvme.moments = bf16: only with .* cpu or nvme"),
        (["offload=disk"], "trainer.optimizer.offload"),
    ],
)
def test_keys_that_can_not_work_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load(TINY, [f"trainer.optimizer.{override}" for override in overrides])
    load(TINY, ["trainer.optimizer.offload=nvme", "trainer.optimizer.nvme.path=/nvme"])


def test_a_steps_bytes_are_its_updates_together_and_none_at_all_stop_the_run() -> None:
    recipe = load(TINY, ["trainer.optimizer.offload=nvme", "trainer.optimizer.nvme.path=/nvme"])
    updates = [{"nvme/read_bytes": 5.0, "nvme/write_bytes": 7.0, "nvme/seconds": 0.5}] * 2
    assert nvme_metrics(updates, recipe, 1) == {"nvme/read_bytes": 10, "nvme/write_bytes": 14, "nvme/seconds": 1.0}
    with pytest.raises(
        StepError, match="step 1: trainer.optimizer.offload is nvme, and the updates have moved no bytes"
    ):
        nvme_metrics([{**updates[0], "nvme/write_bytes": 0.0}], recipe, 1)
    assert nvme_metrics(updates, load(TINY, []), 1) == {}
