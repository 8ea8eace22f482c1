"""The adapter's shape: ranks, scales and names, worked out by hand."""

import json

import pytest
from pydantic import ValidationError

from beam_rl.lora import ALL_TARGETS, adapter_modules, adapter_of, adapter_tensors, repeated_tensors
from beam_rl.recipe.tree import Lora, Recipe
from beam_rl.tiny.checkpoint import tiny_config

BASE = {"name": "x", "model": {"path": "tiny"}, "data": {"train": {"path": "tiny"}}}


@pytest.fixture(scope="module")
def config():
    return json.loads(tiny_config().to_json_string(use_diff=False))


def test_an_experts_rank_is_rank_over_top_k_and_its_scale_that_of_a_dense_module():
    adapter = adapter_of(Lora(rank=16, alpha=32), 4)
    assert (adapter.expert_rank, adapter.expert_alpha) == (4, 8)


def test_a_named_expert_alpha_is_taken_and_without_normalizing_experts_are_like_the_rest():
    assert adapter_of(Lora(rank=16, alpha=32, expert_alpha=32), 4).expert_alpha == 32
    adapter = adapter_of(Lora(rank=6, alpha=12, normalize_moe_lora=False), 4)
    assert (adapter.expert_rank, adapter.expert_alpha) == (6, 12)


@pytest.mark.parametrize(("rank", "top_k", "would_do"), [(6, 4, "4 or 8"), (3, 8, "8")])
def test_a_rank_that_does_not_divide_says_which_would(rank, top_k, would_do):
    with pytest.raises(ValueError, match=rf"model\.lora\.rank = {rank}: .* top-k is {top_k}; .* such as {would_do}$"):
        adapter_of(Lora(rank=rank), top_k)


def test_every_projection_has_its_adapter_and_no_router_or_norm(config):
    names = {m.name.split(".", 3)[3] for m in adapter_modules(adapter_of(Lora(rank=16), 4), config)}
    dense = {n for n in names if ".experts." not in n}
    assert dense == set(ALL_TARGETS[:8])
    assert names - dense == {f"mlp.experts.{e}.{part}_proj" for e in range(16) for part in ("gate", "up", "down")}


def test_shapes_are_the_matrices_and_ranks(config):
    shapes = adapter_tensors(adapter_of(Lora(rank=16), 4), config)
    attention, experts = "model.layers.0.self_attn.", "model.layers.3.mlp.experts.15."
    assert shapes[attention + "k_proj.lora_A.weight"] == (16, 64)
    assert shapes[attention + "k_proj.lora_B.weight"] == (32, 16)
    assert shapes[attention + "o_proj.lora_A.weight"] == (16, 64)
    assert shapes["model.layers.0.mlp.down_proj.lora_A.weight"] == (16, 128)
    assert shapes[experts + "up_proj.lora_B.weight"] == (32, 4)
    assert shapes[experts + "down_proj.lora_A.weight"] == (4, 32)


def test_a_repeated_a_is_named_with_the_one_it_equals(config):
    adapter = adapter_of(Lora(rank=16), 4)
    repeated = repeated_tensors(adapter, config)
    first = "model.layers.1.self_attn.q_proj.lora_A.weight"
    assert {n for n, of in repeated.items() if of == first} == {
        first.replace("q_proj", f"{p}_proj") for p in ("k", "v", "gate")
    }
    shapes = adapter_tensors(adapter, config)
    assert all(shapes[name] == shapes[of] and of not in repeated for name, of in repeated.items())


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (["self_attn.q_prj"], "did you mean self_attn.q_proj?"),
        (["mlp.gate"], "did you mean mlp.gate_proj?"),
        (["q_proj"], "did you mean self_attn.q_proj?"),
        (["self_attn.q_proj", "self_attn.v_proj"], "lacks self_attn.k_proj, self_attn.gate_proj"),
        (["mlp.experts.down_proj"], "lacks mlp.experts.gate_proj, mlp.experts.up_proj"),
        ([], "name at least one"),
    ],
)
def test_targets_that_cannot_work_are_refused_with_what_would_do(targets, says):
    with pytest.raises(ValidationError, match=r"model\.lora\.targets") as error:
        Recipe(**(BASE | {"model": {"path": "tiny", "lora": {"targets": targets}}}))
    assert says in str(error.value)
