"""Plans of other models than Beam: their tensors, what ranks hold, and activations are those of built models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import other_tiny as other
import pytest
from live_bytes import LivePeak
from safetensors import safe_open
from test_cli import refused
from transformers import OlmoeConfig
from typer.testing import CliRunner

from beam_rl.cli import app
from beam_rl.inputs import adapter_for, check_built
from beam_rl.model_config import full_config
from beam_rl.plan import activations, command, gpu, model_shapes
from beam_rl.plan.case import Case, case_of
from beam_rl.plan.description import describe
from beam_rl.plan.other_activations import other_parts
from beam_rl.plan.plan import make_plan
from beam_rl.plan.simulate import draw_lengths, simulate
from beam_rl.plan.suggest import suggest
from beam_rl.plan.tensors import NotCounted
from beam_rl.plan.times import Shares, sync_size
from beam_rl.recipe.load import load
from beam_rl.recipe.tree import Recipe

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
KINDS = ("moe", "dense", "glm")


def recipe(kind: str, *overrides: str) -> Recipe:
    return load(TINY, [f"model.path={other.checkpoint(kind)}", *overrides])


def stored(kind: str) -> dict[str, tuple[int, ...]]:
    with safe_open(other.checkpoint(kind) / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> tuple[str, Case]:
    return request.param, case_of(recipe(request.param))


@pytest.mark.parametrize("kind", other.FAMILIES)
def test_the_tensors_are_those_of_a_checkpoint(kind: str) -> None:
    assert {name: tensor.shape for name, tensor in describe(recipe(kind)).tensors.items()} == stored(kind)


def test_a_rank_holds_what_the_trainer_does(case: tuple[str, Case]) -> None:
    kind, planned = case
    trainer = other.trainer(kind)
    held = {name: parameter.numel() for name, parameter in trainer.model.named_parameters()}
    (shape,) = planned.shapes
    assert shape.parameters == sum(held.values()) and shape.largest == max(held.values())
    assert shape.count(expert=True) == sum(count for name, count in held.items() if ".experts." in name)
    elements = sum(tensor.count for tensor in planned.model.tensors.values())
    biases = sum(tensor.count for tensor in planned.model.tensors.values() if tensor.fp32)  # of routers: buffers here
    assert shape.parameters + biases == elements and shape.buffers >= biases
    assert sync_size(planned) == (4 * elements, len(stored(kind)))
    assert planned.engine.weights == 4 * elements
    expert = sum(tensor.count for name, tensor in planned.model.tensors.items() if ".experts.0." in name)
    head = 0 if kind == "dense" else planned.model.tensors["lm_head.weight"].count
    others = sum(t.count for name, t in planned.model.tensors.items() if ".experts." not in name)
    embedding = planned.model.tensors["model.embed_tokens.weight"].count
    assert planned.work.active == others - (embedding if head else 0) + (other.TOP_K * expert)


def test_ranks_of_a_layout_hold_the_model_between_them() -> None:
    layout = ["trainer.parallel.tp=2", "trainer.parallel.sp=true", "trainer.parallel.ep=2", "trainer.parallel.pp=2"]
    planned = case_of(recipe("moe", *layout))
    experts = sum(tensor.count for name, tensor in planned.model.tensors.items() if ".experts." in name)
    assert [shape.count(expert=True) for shape in planned.shapes] == [experts // 4] * 4
    assert len({shape.parameters for shape in planned.shapes}) == 2, "the last stage has one norm more"


def test_an_adapter_is_counted_on_another_model() -> None:
    asked = load(TINY.with_name("tiny_cpu_lora.yaml"), [f"model.path={other.checkpoint('moe')}", "model.lora.rank=8"])
    folder = other.checkpoint("moe")
    trainer = other.trainer("moe", adapter=adapter_for(asked, folder))
    (shape,) = case_of(asked).shapes
    assert shape.adapter == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_of_an_update_are_as_planned(case: tuple[str, Case], precision: str, recompute: str) -> None:
    kind, planned = case
    trainer = other.trainer(kind, precision=precision, recompute=recompute)
    value = 2 if precision == "bf16" else 4
    sizes = replace(gpu.sizes(planned), value_bytes=value)
    for lengths in ([100] * 10, [50] * 40):
        batch = [other.micro_batch(lengths)]
        trainer.update(batch, tiny.squared_objective, lr=1e-4)  # what is made once
        with LivePeak() as alive:
            trainer.update(batch, tiny.squared_objective, lr=1e-4)
        tokens = sum(lengths)
        there = activations.Tokens(tokens, tokens, tokens * sizes.top_k, tokens)
        kinds = planned.stage_kinds(0)
        stage = activations.Stage(kinds.count("dense"), kinds.count("sparse"), in_flight=1, last=True)
        found = activations.peak(
            other_parts(sizes, there), sizes, there, stage, recompute, 1024, True, 14 if value == 2 else 8
        )
        assert found == pytest.approx(alive.peak, rel=0.06)


def test_a_window_bounds_the_kv_cache_where_the_model_has_one() -> None:
    full, windowed = (case_of(recipe(kind)).engine for kind in ("dense", "window"))
    layer = 2 * 2 * 32 * 4  # keys and values of two heads in FP32
    assert full.kv_of(100) == 100 * other.LAYERS * layer
    assert windowed.kv_of(100) == 8 * other.LAYERS * layer and windowed.kv_of(5) == 5 * other.LAYERS * layer


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_the_whole_plan_is_there_on_a_cpu_and_on_gpus(kind: str) -> None:
    done = CliRunner().invoke(app, ["plan", str(TINY), f"model.path={other.checkpoint(kind)}", "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["fits"] is True
    on_gpus = case_of(recipe(kind, "cluster.gpu=H200", "trainer.parallel.dp=2", "trainer.precision=bf16"))
    assert make_plan(on_gpus.recipe, case=on_gpus).fits
    lengths = draw_lengths(64, 16, 0)
    assert len(simulate(on_gpus, Shares(), lengths)) == 3
    assert suggest(on_gpus, Shares(), lengths, tries=2)


def test_a_model_that_only_crashes_without_memory_has_no_plan_and_may_be_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crash(order: str) -> str:
        raise RuntimeError("Traceback\nNotImplementedError: Cannot copy out of meta tensor")

    monkeypatch.setattr(model_shapes, "_answer", crash)
    asked, folder = recipe("dense"), other.checkpoint("dense")
    check_built(asked, folder, full_config(folder))
    with pytest.raises(NotCounted, match="no plan .NotImplementedError: Cannot copy out of meta tensor.$"):
        case_of(asked)


def test_what_can_not_be_counted_is_said_in_a_line_and_keeps_no_run_from_starting(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_experts=4)
    OlmoeConfig(**settings, num_attention_heads=4, architectures=["OlmoeForCausalLM"]).save_pretrained(tmp_path)
    asked = load(TINY, [f"model.path={tmp_path}", "cluster.gpu=H200"])
    with pytest.raises(NotCounted, match="need Transformer Engine and so a GPU; plans are made without one"):
        case_of(asked)
    command.refuse_if_too_large(asked)
    config = full_config(other.checkpoint("dense")) | {"layer_types": ["chunked_attention"] * other.LAYERS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "has chunked_attention layers, and plans know" in refused("plan", TINY, f"model.path={tmp_path}")
