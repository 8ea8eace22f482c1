"""What of a layer's experts is handed to vLLM's loader at once, and what is left; what it loads: test_rollout_compat.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beam_rl.rollout import compat
from beam_rl.rollout.compat import ExpertLayer
from beam_rl.rollout.expert_stacks import ExpertStacks

LAYER = "model.layers.1.mlp.experts"


class Experts(nn.Module):
    """As a worker has them that holds experts 3 and 1 of four, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[str, str, int, Tensor]] = []
        self.takes = True
        for name, shape in (("w13_weight", (2, 8, 3)), ("w2_weight", (2, 3, 4))):
            parameter: Any = nn.Parameter(torch.zeros(shape))
            parameter.weight_loader = self._load
            setattr(self, name, parameter)

    def _load(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool,
    ) -> bool:
        self.loaded.append((weight_name, shard_id, expert_id, loaded_weight))
        return self.takes


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Experts:
    held = Experts()
    monkeypatch.setattr(compat, "expert_layers", lambda model: {LAYER: ExpertLayer(model, {3: 0, 1: 1})})
    return held


def weight(value: float, shape: tuple[int, ...] = (4, 3), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


def test_a_stack_is_loaded_once_all_of_its_experts_have_come(experts: Experts) -> None:
    stacks = ExpertStacks(experts)
    first = [(f"{LAYER}.{e}.{name}_proj.weight", weight(e)) for e in (0, 1, 2) for name in ("gate", "up")]
    assert list(stacks.others(first)) == [] and experts.loaded == []
    more = [(f"{LAYER}.3.up_proj.weight", weight(3)), ("model.norm.weight", weight(0))]
    assert [name for name, _ in stacks.others(more)] == ["model.norm.weight"]
    [(name, shard, expert, stacked)] = experts.loaded
    assert (name, shard, expert) == ("experts.w13_weight", "w3", 3)
    assert torch.equal(stacked, torch.stack([weight(3), weight(1)]))  # in the order in which the worker holds them
    with pytest.raises(ValueError, match=r"mlp.experts.3.gate_proj.weight did not come as the others did"):
        stacks.check_whole()
    stacks.begin()
    stacks.check_whole()
    assert list(stacks.others([(f"{LAYER}.3.gate_proj.weight", weight(3))])) == [] and len(experts.loaded) == 1


@pytest.mark.parametrize("wrong", [weight(1), weight(3, (1, 3))], ids=["twice", "another shape"])
def test_an_expert_that_does_not_fit_its_stack_fails_the_update(experts: Experts, wrong: Tensor) -> None:
    expert = 1 if wrong.shape == (4, 3) else 3
    name = f"{LAYER}.{expert}.gate_proj.weight"
    with pytest.raises(ValueError, match=f"{name} came twice, or in another shape"):
        list(ExpertStacks(experts).others([(f"{LAYER}.1.gate_proj.weight", weight(1)), (name, wrong)]))


def test_a_loader_that_does_not_take_a_stack_fails_the_update(experts: Experts) -> None:
    experts.takes = False
    both = [(f"{LAYER}.{expert}.down_proj.weight", weight(expert, (3, 4))) for expert in (1, 3)]
    with pytest.raises(RuntimeError, match="did not load a stack of experts into w2_weight"):
        list(ExpertStacks(experts).others(both))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.1.mlp.experts.1.gate_proj.weight", weight(1, dtype=torch.bfloat16)),
        ("model.layers.1.mlp.experts.1.gate_proj.weight_scale", weight(1)),
        ("model.layers.1.mlp.experts.gate_up_proj.weight", weight(1, (4, 8, 3))),
        ("model.layers.2.mlp.experts.1.gate_proj.weight", weight(1)),
        ("model.layers.1.mlp.shared_experts.gate_proj.weight", weight(1)),
        ("model.layers.1.mlp.router.weight", weight(1)),
    ],
    ids=["other dtype", "no such parameter", "stacked already", "other layer", "shared", "router"],
)
def test_what_is_no_expert_of_a_known_parameter_is_left_to_the_model(
    experts: Experts, name: str, tensor: Tensor
) -> None:
    stacks = ExpertStacks(experts)
    [(left, same)] = stacks.others([(name, tensor)])
    assert left == name and same is tensor and not stacks.coming
