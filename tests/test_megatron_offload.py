"""A trainer whose state leaves its device between two calls goes on as if it had stayed, bit for bit."""

from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import pytest
import torch

from beam_rl.lora import ALL_TARGETS, Adapter
from beam_rl.megatron.nvme.waiting import SLOTS, FilePlace
from beam_rl.megatron.offload import Offload
from beam_rl.megatron.optimizer import parameter_state
from beam_rl.policy import Copied, Policy, PolicyWorker, _settings
from beam_rl.recipe.load import load
from beam_rl.recipe.tree import Nvme, Optimizer

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
ADAPTER = Adapter(rank=8, alpha=16.0, expert_rank=2, expert_alpha=4.0, targets=ALL_TARGETS)
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "whole_optimizer": {"optimizer": {"distributed": False}},
    "optimizer_on_nvme": {"precision": "bf16", "optimizer": {"offload": "nvme"}},
    "lora": {"precision": "bf16", "adapter": ADAPTER},
    "lora_optimizer_on_nvme": {"precision": "bf16", "adapter": ADAPTER, "optimizer": {"offload": "nvme"}},
}


def make_trainer(folder: Path, wait_in: str, case: str = "fp32") -> tiny.Trainer:
    """Blocks are small, so that the state has many."""
    changes = CASES[case]
    nvme = Nvme(path=str(folder), block_bytes=65536)
    optimizer = Optimizer(lr=1e-3, nvme=nvme, **changes.get("optimizer", {}))
    return tiny.trainer(**changes | {"optimizer": optimizer, "nvme_folder": str(folder / "run"), "wait_in": wait_in})


def train(folder: Path, case: str, wait_in: str | None) -> tuple[list[Any], list[torch.Tensor]]:
    """Scores and metrics of three updates; weights and optimizer's state afterwards. wait_in: None: it stays."""
    trainer = make_trainer(folder, wait_in or "host", case)
    offload, log = trainer.offload(), []
    for seed in range(3):
        batch = tiny.micro_batch([9, 14], seed=seed)
        log.append([score.logp.tolist() for score in trainer.score([batch])])
        metrics = trainer.update([batch], tiny.squared_objective, 1e-3)
        log.append({name: value for name, value in metrics.items() if name != "nvme/seconds"})
        if wait_in:
            offload.put("weights")
            assert all(not t.untyped_storage().nbytes() for t in trainer.held().gradients)
            log.append({name: tensor.double().sum().item() for name, tensor in trainer.sync_tensors()})
            offload.put("nothing")
            assert not any(t.untyped_storage().nbytes() for _, t in trainer._weights())
            offload.put("all")
        else:
            log.append({name: tensor.double().sum().item() for name, tensor in trainer.sync_tensors()})
    state = [flat.clone() for _, _, flat, _ in parameter_state(trainer.model, trainer.optimizer)]
    trainer.discard()
    return log, [tensor.clone() for _, tensor in trainer._weights()] + state


@pytest.mark.parametrize("case", CASES)
def test_trainer_goes_on_with_the_same_bits(case: str, tmp_path: Path) -> None:
    stayed = train(tmp_path, case, None)
    assert len(stayed[0]) == 9
    for wait_in in ("host", "nvme"):
        turned = train(tmp_path, case, wait_in)
        assert stayed[0] == turned[0]
        assert all(torch.equal(one, two) for one, two in zip(stayed[1], turned[1], strict=True))


def test_on_nvme_host_memory_is_a_few_blocks_and_the_frozen_base_is_written_once(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "nvme", "lora")
    held, offload = trainer.held(), trainer.offload()
    place, frozen = offload.place, sum(t.nbytes for t in held.frozen)
    assert isinstance(place, FilePlace) and place.host_bytes == SLOTS * 65536 < frozen
    first = offload.put("nothing")
    assert not any(t.untyped_storage().nbytes() for t in (*held.frozen, *held.weights, *held.rest, *held.gradients))
    written = place.write_bytes
    assert first <= written < first + 3 * 4096 + 256 * len([*held.frozen, *held.weights, *held.rest])
    offload.put("all")
    assert place.read_bytes == written
    assert offload.put("weights") + offload.put("nothing") == first - frozen
    assert offload.put("weights") > frozen and offload.put("nothing") == 0, "a sync has changed no weight"
    place.close()


def test_a_rank_tells_bytes_and_seconds_and_the_policy_adds_them_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(TINY, ["trainer.wait_in=nvme", f"trainer.optimizer.nvme.path={tmp_path}"])
    settings = _settings(recipe, tiny.checkpoint(), tmp_path)
    worker = PolicyWorker(recipe.algorithm, 0)
    worker.trainer = tiny.trainer(wait_in=settings.wait_in, optimizer=settings.optimizer)
    out, back = worker.put_on_gpu("nothing"), worker.put_on_gpu("all")
    assert worker.offload is not None and isinstance(worker.offload.place, FilePlace)
    assert out.bytes == back.bytes > 1e6 and out.seconds > 0 < back.seconds
    policy = Policy.__new__(Policy)
    monkeypatch.setattr(policy, "_all", lambda method, what: [Copied(3, 0.5), Copied(4, 0.25)])
    assert policy.put_on_gpu("all") == Copied(7, 0.5)


def test_host_memory_is_taken_for_what_is_kept_alone() -> None:
    trainer = tiny.trainer()
    held = trainer.held()
    kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*held.weights, *held.rest)}
    gradients = sum(t.nbytes for t in held.gradients)
    room = Offload(held).place.host_bytes
    assert sum(kept.values()) <= room < sum(kept.values()) + 256 * len(kept)
    assert gradients > 0.9 * sum(p.numel() * 4 for p in trainer.model.parameters())
