"""Models other than Beam: the same numbers as transformers and one process, replay, resume, and what is refused."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import numpy as np
import other_tiny as other
import pytest
import runs
import torch
from other_tiny import Layout
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_cli import refused
from torch import Tensor
from transformers import AutoModelForCausalLM, OlmoeConfig

from beam_rl.checkpoint_shapes import stored_names
from beam_rl.errors import InputError
from beam_rl.inputs import check_built, check_config, check_config_for
from beam_rl.layout import check_layout
from beam_rl.megatron.compat import bridge_module
from beam_rl.megatron.probe import probe
from beam_rl.megatron.trainer import Trainer
from beam_rl.model_config import experts_of, full_config, layer_kinds
from beam_rl.other_models import fitted, unadapted, unknown
from beam_rl.parity.compare import Side, compare
from beam_rl.parity.reference import Reference
from beam_rl.parity.table import show
from beam_rl.plan import command as plan_command
from beam_rl.policy import Policy
from beam_rl.recipe.load import load
from beam_rl.recipe.tree import Parallel
from beam_rl.rollout.compat import knows_architecture
from beam_rl.samples import MicroBatch

RECIPES = Path(__file__).parent.parent / "recipes"
KINDS = ("moe", "dense")
BOUND = 1e-5


@pytest.fixture(scope="module", params=KINDS)
def learner(request: pytest.FixtureRequest) -> Iterator[tuple[str, Trainer]]:
    trainer = other.trainer(request.param)
    yield request.param, trainer


def reference(kind: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(other.checkpoint(kind), dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None  # or the padding token, which the samples have, gets no gradient
    return model


def reference_logp(model: Any, batch: MicroBatch) -> Tensor:
    """Sample by sample: positions begin anew at each."""
    found = []
    for start, end in zip(batch.cu_tokens[:-1], batch.cu_tokens[1:], strict=True):
        logits = model(torch.tensor(batch.tokens[start:end])[None]).logits[0]
        found.append(logits.log_softmax(-1)[torch.arange(end - start), torch.tensor(batch.targets[start:end])])
    return torch.cat(found)


def test_packed_samples_have_transformers_log_probabilities_and_gradients(learner: tuple[str, Trainer]) -> None:
    kind, trainer = learner
    batch, model = other.micro_batch([11, 7, 20, 3]), reference(kind)
    (score,) = trainer.score([batch])
    expected = reference_logp(model, batch)
    np.testing.assert_allclose(score.logp, expected.detach(), atol=BOUND)
    weight = torch.tensor(batch.weight)
    (-(weight * expected).sum()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    metrics = trainer.update([batch], lambda i: dataclasses.replace(tiny.squared_objective(i), loss=-i.logp), 0.0)
    assert metrics["optim/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    if kind == "moe":
        routers = [p.grad for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]
        assert metrics["optim/router_grad_norm"] == pytest.approx(
            float(torch.nn.utils.get_total_norm(routers)), rel=1e-4
        )


@pytest.mark.parametrize("kind", [kind for kind in other.FAMILIES if kind not in KINDS])
def test_further_families_have_transformers_log_probabilities(kind: str) -> None:
    trainer, batch = other.trainer(kind), other.micro_batch([11, 7, 20, 3])
    with torch.no_grad():
        np.testing.assert_allclose(trainer.score([batch])[0].logp, reference_logp(reference(kind), batch), atol=BOUND)
    stored = load_file(other.checkpoint(kind) / "model.safetensors")
    exported = dict(trainer.hf_tensors())
    assert exported.keys() == stored.keys() and all(torch.equal(exported[name], stored[name]) for name in stored)


def test_parity_sees_the_log_probabilities_of_another_model() -> None:
    trainer, batch = other.trainer("moe"), other.micro_batch([15])
    whole = Reference(str(other.checkpoint("moe")), "fp32", False, 1.0)
    tokens = np.append(batch.tokens, batch.targets[-1])
    shifted = dataclasses.replace(batch, targets=tokens[1:])
    (seen,) = probe(trainer, [shifted]).values()
    assert seen.keys() == {(None, "log_probabilities")}
    expected = whole.probe(tokens, None)[None, "log_probabilities"]
    np.testing.assert_allclose(seen[None, "log_probabilities"], expected, atol=BOUND)


def test_an_agreement_of_routes_that_nobody_measured_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    sides = {name: Side({}, np.full(3, -1.0, np.float32)) for name in ("reference", "trainer", "engine")}
    found = compare(sides, replayed=False, sublayer_bound=1e-5, logprob_mean_bound=1e-5)
    assert found.within_bounds and '"route_agreement": null' in json.dumps(found.record())
    show(found)
    show(dataclasses.replace(found, route_agreement=0.5))
    assert capsys.readouterr().out.count("choose the same experts in 50.00% of") == 1
    show(found)
    assert "choose the same experts" not in capsys.readouterr().out


def test_a_checkpoint_that_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    shutil.copytree(other.checkpoint("dense"), tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    more = stored | {"model.layers.0.self_attn.sinks": torch.zeros(4), "model.layers.4.enorm.weight": torch.zeros(4)}
    save_file(more, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    problem = r"has no place for model.layers.0.self_attn.sinks \(1 such"
    with pytest.raises(InputError, match=problem):
        Trainer(str(tmp_path / "model"), tiny.settings(), 0, 1, tiny.meeting_point())
    with pytest.raises(InputError, match=problem):
        check_as_a_run_does(tmp_path / "model")


@pytest.mark.parametrize("indexed", [False, True])
def test_the_same_weights_in_another_form_beside_the_checkpoint_are_no_part_of_it(
    indexed: bool, tmp_path: Path
) -> None:
    folder, batch = tmp_path / "model", other.micro_batch([11, 7])
    shutil.copytree(other.checkpoint("window"), folder)
    stored = load_file(folder / "model.safetensors")
    if indexed:
        file = "model-00001-of-00001.safetensors"
        (folder / "model.safetensors").rename(folder / file)
        index = {"metadata": {}, "weight_map": dict.fromkeys(stored, file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"layers.0.attention.wq.weight": torch.zeros(4)}, folder / "consolidated.safetensors")
    assert stored_names(folder, config("window")) == stored.keys()
    trainer = Trainer(str(folder), tiny.settings(), 0, 1, tiny.meeting_point())
    np.testing.assert_array_equal(trainer.score([batch])[0].logp, other.trainer("window").score([batch])[0].logp)


def test_a_rope_that_megatron_gets_wrong_is_refused(tmp_path: Path) -> None:
    shutil.copytree(other.checkpoint("llama"), tmp_path / "model")
    changed = config("llama")
    changed["rope_parameters"]["original_max_position_embeddings"] = 64
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match="its RoPE is llama3"):
        Trainer(str(tmp_path / "model"), tiny.settings(), 0, 1, tiny.meeting_point())
    overrides = [f"model.path={tmp_path / 'model'}", f"data.train.path={tmp_path / 'model' / 'train.jsonl'}"]
    line = refused("train", RECIPES / "tiny_cpu.yaml", *overrides, "--out", tmp_path / "run")
    assert "its RoPE is llama3 with parameters" in line and not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="its RoPE is llama3"):
        plan_command.show_for(load(RECIPES / "tiny_cpu.yaml", overrides))  # the dry run


def test_a_run_looks_for_the_tensors_of_every_expert(tmp_path: Path) -> None:
    check_as_a_run_does(other.checkpoint("moe"))
    shutil.copytree(other.checkpoint("moe"), tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    del stored["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(stored, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"the checkpoint lacks model.layers.2.mlp.experts.5.up_proj.weight \(1 such"):
        check_as_a_run_does(tmp_path / "model")


def check_as_a_run_does(folder: Path) -> None:
    """In a layout of more than one rank."""
    overrides = ["trainer.parallel.tp=2", "trainer.parallel.sp=true", "trainer.parallel.pp=2"]
    check_built(load(RECIPES / "tiny_cpu.yaml", overrides), folder, full_config(folder))


def test_what_a_gpu_may_do_is_not_refused_where_there_may_be_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_experts=4)
    OlmoeConfig(**settings, num_attention_heads=4, architectures=["OlmoeForCausalLM"]).save_pretrained(tmp_path)
    recipe = load(RECIPES / "tiny_cpu.yaml")
    with pytest.raises(InputError, match="need Transformer Engine and so a GPU"):
        check_built(recipe, tmp_path, full_config(tmp_path))
    check_built(load(RECIPES / "tiny_cpu.yaml", ["cluster.gpu=H200"]), tmp_path, full_config(tmp_path))


def test_an_export_is_what_transformers_loads(learner: tuple[str, Trainer], tmp_path: Path) -> None:
    kind, trainer = learner
    batch = other.micro_batch([9, 12])
    trainer.update([batch], tiny.squared_objective, 1e-3)
    with torch.no_grad():
        start = reference_logp(reference(kind), batch)
    np.testing.assert_allclose(trainer.score_reference([batch])[0].logp, start, atol=BOUND)
    trainer.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference_logp(model, batch)
    np.testing.assert_allclose(trainer.score([batch])[0].logp, expected, atol=BOUND)
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["architectures"] == json.loads((other.checkpoint(kind) / "config.json").read_text())["architectures"]


def test_replayed_experts_are_used_and_counted_and_pass_their_gradient() -> None:
    trainer = other.trainer("moe")
    tokens = 24
    free, own = other.micro_batch([tokens]), own_routes(tokens)
    told = dataclasses.replace(free, routes=own)
    (as_chosen,), (replayed,) = trainer.score([free]), trainer.score([told])
    np.testing.assert_allclose(replayed.logp, as_chosen.logp, atol=1e-6)
    assert (replayed.routes_agree, replayed.routes_total) == (tokens * other.LAYERS,) * 2
    wrong = dataclasses.replace(free, routes=other.random_routes(tokens))
    (elsewhere,) = trainer.score([wrong])
    assert elsewhere.routes_agree < elsewhere.routes_total / 2 and np.abs(elsewhere.logp - as_chosen.logp).max() > 1e-3
    assert trainer.update([wrong], tiny.squared_objective, 0.0)["optim/router_grad_norm"] > 0


def own_routes(tokens: int) -> Any:
    """What transformers' routers choose for `micro_batch([tokens])`."""
    model, batch, found = reference("moe"), other.micro_batch([tokens]), []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda m, i, out: found.append(out[-1])) for layer in model.model.layers
    ]
    with torch.no_grad():
        reference_logp(model, batch)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy().astype(np.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_adds_in_peft_what_it_adds_here(kind: str, tmp_path: Path) -> None:
    recipe = load(RECIPES / "tiny_cpu_lora.yaml", ["model.lora.rank=8"])
    adapter, _ = check_config_for(recipe, config(kind))
    trainer, batch, before = other.trainer(kind, adapter=adapter), other.micro_batch([11, 7]), reference(kind)
    for _ in range(2):
        trainer.update([batch], tiny.squared_objective, 1e-2)
    (score,) = trainer.score([batch])
    trainer.export(tmp_path / "adapter", "adapter")
    with torch.no_grad():
        assert (reference_logp(before, batch) - torch.tensor(score.logp)).abs().max() > 0.1
        expected = reference_logp(PeftModel.from_pretrained(before, tmp_path / "adapter"), batch)
    np.testing.assert_allclose(score.logp, expected, atol=BOUND)
    base = load_file(other.checkpoint(kind) / "model.safetensors")
    assert all(torch.equal(tensor, base[name]) for name, tensor in trainer.hf_tensors())


def test_a_run_replays_syncs_and_agrees_with_the_engine_at_every_step(ray_here: str, tmp_path: Path) -> None:
    data = {part: f"data.{part}.path={other.checkpoint('moe') / f'{part}.jsonl'}" for part in ("train", "eval")}
    reward = Path(__file__).with_name("other_reward.py")
    overrides = [f"model.path={other.checkpoint('moe')}", *data.values(), f"verifier.name={reward}:digits"]
    overrides += ["rollout.prompts_per_step=8", "trainer.steps=2", "eval.every=0", "checkpoint.every=0"]
    overrides += ["logging.wandb=disabled", f"cluster.address={ray_here}"]
    runs.run(RECIPES / "tiny_cpu.yaml", overrides, tmp_path / "run")
    rows = runs.metrics(tmp_path / "run")[1:]
    assert [row["sync/version"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["parity/abs_logprob_diff_mean"] < BOUND and row["optim/grad_norm"] > 0
        assert row["replay/missing_rows"] == 0 and row["replay/rows"] > 0 and row["replay/route_agreement"] > 0.99


LAYOUTS = (
    Layout("moe", Parallel(tp=2, sp=True, ep=2)),
    Layout("moe", Parallel(pp=2), "selective"),
    Layout("dense", Parallel(pp=2), "full"),
)


def test_layouts_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    alone = {}
    for i, layout in enumerate((*(Layout(kind, Parallel()) for kind in KINDS), *LAYOUTS)):
        ranks = other.run(layout, tmp_path / str(i))
        for name, values in ranks[0]["weights"].items():
            np.testing.assert_array_equal(values, ranks[0]["resumed"][name])
        first = alone.setdefault(layout.kind, ranks[0])
        (told,) = [rank for rank in ranks if rank["place"].reports]
        for one, many in zip(first["logp"], told["logp"], strict=True):
            np.testing.assert_allclose(many, one, atol=BOUND)
        assert told["agreement"] == first["agreement"]
        for one, many in zip(first["metrics"], ranks[0]["metrics"], strict=True):
            assert many == pytest.approx(one, rel=1e-4)
        for name, values in first["weights"].items():
            np.testing.assert_allclose(ranks[0]["weights"][name], values, atol=BOUND)


# --- what is refused, or off ------------------------------------------------------------------------------


def config(kind: str) -> dict[str, Any]:
    return json.loads((other.checkpoint(kind) / "config.json").read_text())


@pytest.mark.parametrize(
    ("key", "kind"), [("trainer.precision=mxfp8", "moe"), ("trainer.parallel.ep=2 trainer.parallel.dp=2", "dense")]
)
def test_what_does_not_fit_the_model_is_refused_by_its_key(key: str, kind: str) -> None:
    recipe = load(RECIPES / "tiny_cpu.yaml", key.split())
    with pytest.raises(InputError, match=key.split("=")[0]):
        check_config_for(recipe, config(kind))


def test_an_adapter_that_finds_no_projections_is_refused(tmp_path: Path) -> None:
    adapter, _ = check_config_for(load(RECIPES / "tiny_cpu_lora.yaml"), config("dense"))
    assert unadapted(adapter, config("dense"), other.checkpoint("dense")) is None
    stored = load_file(other.checkpoint("dense") / "model.safetensors")
    save_file({name.replace("q_proj", "query"): t for name, t in stored.items()}, tmp_path / "model.safetensors")
    problem = unadapted(adapter, config("dense"), tmp_path)
    assert problem and problem.startswith("model.lora: Qwen3ForCausalLM") and "layers.0.self_attn.q_proj" in problem


@pytest.mark.parametrize(
    ("architecture", "who"),
    [
        ("GPT2LMHeadModel", "Megatron-Bridge"),
        ("KimiK2ForCausalLM", "vLLM"),
        *((name, "transformers") for name in ("BailingMoeV2ForCausalLM", "DeciLMForCausalLM", "MiMoForCausalLM")),
    ],
)
def test_a_model_that_a_library_does_not_know_is_named(architecture: str, who: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("moe") | {"architectures": [architecture]}))
    with pytest.raises(InputError, match=f"model.path = .*{architecture}.*{who}"):
        check_config(tmp_path)


def test_the_libraries_know_the_models_of_these_tests() -> None:
    for kind in other.FAMILIES:
        (architecture,) = config(kind)["architectures"]
        assert bridge_module(architecture) and knows_architecture(architecture)
        assert unknown(config(kind)) is None


def test_replay_is_off_for_a_model_without_experts_and_says_so() -> None:
    recipe = load(RECIPES / "tiny_cpu.yaml")
    off, notes = fitted(recipe, config("dense"))
    assert not off.rollout.routing_replay and "rollout.routing_replay is off" in notes[0]
    assert fitted(recipe, config("moe")) == (recipe, [])


def test_what_a_config_leaves_out_is_what_its_models_class_says(tmp_path: Path) -> None:
    short = config("glm")
    assert short.pop("first_k_dense_replace") == 1  # the class's own
    (tmp_path / "config.json").write_text(json.dumps(short))
    kinds = ["dense", "sparse", "sparse", "sparse"]
    assert layer_kinds(short) != kinds and layer_kinds(full_config(tmp_path)) == kinds
    (place,) = Policy(load(RECIPES / "tiny_cpu.yaml"), tmp_path, tmp_path).places
    assert len(place.moe_columns) == 3
    (tmp_path / "config.json").write_text(json.dumps(short | {"hidden_size": "wide"}))
    with pytest.raises(InputError, match="config.json: transformers can't read it") as refused:
        full_config(tmp_path)
    assert len(str(refused.value).splitlines()) == 1


def test_beams_config_is_what_its_file_says() -> None:
    written = json.loads((tiny.checkpoint() / "config.json").read_text())
    assert full_config(tiny.checkpoint()) == written


def test_layers_with_experts_are_read_from_each_familys_names() -> None:
    assert layer_kinds(config("moe")) == ["sparse"] * 4 and layer_kinds(config("dense")) == ["dense"] * 4
    every_second = config("moe") | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert layer_kinds(every_second) == ["dense", "sparse", "dense", "dense"]
    deepseek = {"num_hidden_layers": 3, "n_routed_experts": 4, "first_k_dense_replace": 1}
    assert layer_kinds(deepseek) == ["dense", "sparse", "sparse"] and experts_of(deepseek) == 4
    assert not check_layout(config("dense"), Parallel(tp=2)) and check_layout(config("dense"), Parallel(tp=3))
