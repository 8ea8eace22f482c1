"""A trainer whose state leaves its device between two calls goes on as if it had stayed, bit for bit."""

from typing import Any

import megatron_tiny as tiny
import pytest
import torch

from beam_rl.lora import ALL_TARGETS, Adapter
from beam_rl.megatron.offload import Offload
from beam_rl.recipe.tree import Optimizer

ADAPTER = Adapter(rank=8, alpha=16.0, expert_rank=2, expert_alpha=4.0, targets=ALL_TARGETS)
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "whole_optimizer": {"optimizer": Optimizer(lr=1e-3, distributed=False)},
    "lora": {"precision": "bf16", "adapter": ADAPTER},
}


def train(changes: dict[str, Any], turns: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """Scores and metrics of three updates; weights and optimizer's state afterwards."""
    trainer = tiny.trainer(**changes)
    offload, log = Offload(trainer.held()), []
    for seed in range(3):
        batch = tiny.micro_batch([9, 14], seed=seed)
        log.append([score.logp.tolist() for score in trainer.score([batch])])
        log.append(trainer.update([batch], tiny.squared_objective, 1e-3))
        if turns:
            offload.put("weights")
            assert all(not t.untyped_storage().nbytes() for t in trainer.held().gradients)
            log.append({name: tensor.double().sum().item() for name, tensor in trainer.sync_tensors()})
            offload.put("nothing")
            assert not any(t.untyped_storage().nbytes() for _, t in trainer._weights())
            offload.put("all")
        else:
            log.append({name: tensor.double().sum().item() for name, tensor in trainer.sync_tensors()})
    held = trainer.held()
    return log, [t.clone() for t in (*held.frozen, *held.weights, *held.rest)]


@pytest.mark.parametrize("case", CASES)
def test_trainer_goes_on_with_the_same_bits(case: str) -> None:
    stayed, turned = train(CASES[case], turns=False), train(CASES[case], turns=True)
    assert stayed[0] == turned[0] and len(stayed[0]) == 9
    assert all(torch.equal(one, two) for one, two in zip(stayed[1], turned[1], strict=True))


def test_host_memory_is_taken_for_what_is_kept_alone() -> None:
    trainer = tiny.trainer()
    held = trainer.held()
    kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*held.weights, *held.rest)}
    gradients = sum(t.nbytes for t in held.gradients)
    room = len(Offload(held).host)
    assert sum(kept.values()) <= room < sum(kept.values()) + 256 * len(kept)
    assert gradients > 0.9 * sum(p.numel() * 4 for p in trainer.model.parameters())
