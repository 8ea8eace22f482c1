"""One adapter folder for stock PEFT and vLLM: what it computes, the forms that would load and be wrong, and bad input."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lora_tiny
import megatron_tiny as tiny
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from safetensors.torch import load_file, save_file

from beam_rl.adapter_files import CONFIG, PREFIX, WEIGHTS, adapter_config, merged, read_adapter, write_adapter
from beam_rl.errors import InputError
from beam_rl.lora import ALL_TARGETS, ATTENTION_INPUTS, ATTENTION_OUTPUT, DENSE_INPUTS, DENSE_OUTPUT, EXPERTS

BATCH = tiny.micro_batch([12, 9], routes=False)
BOUND = 2e-5
SHAPE = lora_tiny.adapter()
Changes = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lora_tiny.folder(tmp_path_factory.mktemp("adapter") / "given", SHAPE)


@pytest.fixture(scope="module")
def trainer(given: Path) -> tiny.Trainer:
    """Has learned a little since it started from `given`."""
    trainer = tiny.trainer(adapter=SHAPE, adapter_folder=str(given))
    trainer.update([tiny.micro_batch([20])], tiny.squared_objective, 1e-3)
    return trainer


@pytest.fixture(scope="module")
def logp(trainer: tiny.Trainer) -> NDArray[np.float32]:
    return trainer.score([BATCH])[0].logp


@pytest.fixture(scope="module")
def exported(trainer: tiny.Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "adapter"
    trainer.export(folder, "adapter")
    return folder


def with_peft(folder: Path) -> NDArray[np.float32]:
    return lora_tiny.logprobs(PeftModel.from_pretrained(tiny.reference_model(), folder), BATCH)


def distance(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    return float(np.abs(ours - theirs).max())


# --- what the folder computes -----------------------------------------------------------------------------


def test_stock_peft_gives_the_trainers_log_probabilities(exported: Path, logp: NDArray[np.float32]) -> None:
    assert distance(logp, lora_tiny.logprobs(tiny.reference_model(), BATCH)) > 0.5
    assert distance(logp, with_peft(exported)) <= BOUND


@pytest.mark.parametrize(
    "targets",
    [
        ATTENTION_INPUTS,
        DENSE_OUTPUT,
        EXPERTS,
        ATTENTION_OUTPUT + EXPERTS,
        DENSE_INPUTS + EXPERTS,
        ATTENTION_INPUTS + DENSE_OUTPUT,
    ],
    ids=lambda targets: f"{len(targets)}-{targets[0]}",
)
def test_stock_peft_takes_any_set_of_targets(targets: tuple[str, ...], tmp_path: Path) -> None:
    shape = lora_tiny.adapter(*targets)
    folder = lora_tiny.folder(tmp_path / "adapter", shape)
    ours = tiny.trainer(adapter=shape, adapter_folder=str(folder)).score([BATCH])[0].logp
    assert distance(ours, with_peft(folder)) <= BOUND


def test_an_expert_alpha_of_its_own_is_kept(tmp_path: Path) -> None:
    shape = lora_tiny.adapter(expert_alpha=3.0)
    folder = lora_tiny.folder(tmp_path / "adapter", shape)
    ours = tiny.trainer(adapter=shape, adapter_folder=str(folder)).score([BATCH])[0].logp
    assert distance(ours, with_peft(folder)) <= BOUND


def test_merged_weights_are_the_base_with_the_adapter(
    trainer: tiny.Trainer, logp: NDArray[np.float32], tmp_path: Path
) -> None:
    trainer.export(tmp_path / "merged", "merged")
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny.checkpoint(), tmp_path / "merged"))
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {n: (t.shape, t.dtype) for n, t in after.items()}
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {name for name in before if not name.removesuffix(".weight").endswith("_proj")}
    from transformers.models.beam import BeamForCausalLM

    model = BeamForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert distance(logp, lora_tiny.logprobs(model, BATCH)) <= BOUND


def test_a_merged_bf16_weight_is_rounded_once() -> None:
    shape = lora_tiny.adapter(*ATTENTION_OUTPUT)
    tensors = lora_tiny.values(shape, tiny.config())
    name = "model.layers.0.self_attn.o_proj"
    weight = torch.randn(64, 128).bfloat16()
    ((_, found),) = merged([(f"{name}.weight", weight)], tensors, shape, tiny.config())
    exact = weight.double() + 2 * tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double()
    half_a_step = exact.abs() * 2**-8 + 1e-6
    assert found.dtype == torch.bfloat16 and bool(((found.double() - exact).abs() <= half_a_step).all())


def test_the_folder_holds_the_trainers_tensors_with_no_scale_in_them(trainer: tiny.Trainer, exported: Path) -> None:
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(exported / WEIGHTS).items()}
    assert all(torch.equal(stored[name], tensor) for name, tensor in trainer.sync_tensors())
    assert not any("experts.gate_up_proj" in name or "experts.base_layer" in name for name in stored)
    settings = json.loads((exported / CONFIG).read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert set(settings["rank_pattern"].values()) == {16} and set(settings["alpha_pattern"].values()) == {32}


# --- forms that another writer might choose ---------------------------------------------------------------


def changed(folder: Path, change: Changes, target: Path) -> Path:
    """The same tensors with another adapter_config.json."""
    shutil.copytree(folder, target)
    settings = json.loads((target / CONFIG).read_text())
    change(settings)
    assert settings != json.loads((folder / CONFIG).read_text())
    (target / CONFIG).write_text(json.dumps(settings))
    return target


def plain_names(c: dict[str, Any]) -> None:
    c |= {"target_modules": [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]}
    c |= {"target_parameters": []}


def without_dense_parameters(c: dict[str, Any]) -> None:
    c["target_parameters"] = [name for name in c["target_parameters"] if not name.startswith("mlp.")]
    c["target_modules"] += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def expert_alpha_as_a_pattern(c: dict[str, Any]) -> None:
    c |= {"lora_alpha": 32, "alpha_pattern": {r"mlp\.experts\..*": 8}}


def rank_stabilized(c: dict[str, Any]) -> None:
    c["use_rslora"] = True


@pytest.mark.parametrize("change", [plain_names, without_dense_parameters, expert_alpha_as_a_pattern, rank_stabilized])
def test_forms_that_load_without_a_word_are_wrong_and_not_ours(
    change: Changes, exported: Path, logp: NDArray[np.float32], tmp_path: Path
) -> None:
    assert distance(logp, with_peft(changed(exported, change, tmp_path / "wrong"))) > 1e3 * BOUND


def expert_rank_as_a_pattern(c: dict[str, Any]) -> None:
    c |= {"r": 16, "rank_pattern": {r"mlp\.experts\..*": 4}}


def with_dropout(c: dict[str, Any]) -> None:
    c["lora_dropout"] = 0.1


@pytest.mark.parametrize("change", [expert_rank_as_a_pattern, with_dropout])
def test_forms_that_peft_refuses_are_not_ours(change: Changes, exported: Path, tmp_path: Path) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        with_peft(changed(exported, change, tmp_path / "refused"))


def test_peft_takes_an_attention_gate_among_modules_for_an_experts(tmp_path: Path) -> None:
    def as_module(c: dict[str, Any]) -> None:
        c |= {"target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj"], "target_parameters": []}

    folder = lora_tiny.folder(tmp_path / "ours", lora_tiny.adapter(*ATTENTION_INPUTS))
    with pytest.raises(ValueError, match="without also targeting up_proj"):
        with_peft(changed(folder, as_module, tmp_path / "wrong"))


# --- reading ----------------------------------------------------------------------------------------------


def test_what_was_written_is_read_back(given: Path) -> None:
    due = lora_tiny.values(SHAPE, tiny.config())
    found = read_adapter(given, SHAPE, tiny.config())
    assert found.keys() == due.keys() and all(torch.equal(found[name], due[name]) for name in due)


def rewritten(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / WEIGHTS)
    change(tensors)
    save_file(tensors, target / WEIGHTS)
    return target


Q, K = (f"{PREFIX}model.layers.0.self_attn.{part}_proj" for part in "qk")
GATE = f"{PREFIX}model.layers.3.mlp.experts.2.gate_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{K}.lora_B.weight"), "lacks model.layers.0.self_attn.k_proj.lora_B.weight .1 such tensors"),
        (lambda t: t.update({f"{Q}x.lora_A.weight": torch.zeros(1)}), "has the unknown .*q_projx.* another base model"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(16, 65)}), "q_proj is .* it is for another base model"),
        (
            lambda t: t.update(
                {f"{GATE}.lora_A.weight": torch.zeros(8, 64), f"{GATE}.lora_B.weight": torch.zeros(32, 8)}
            ),
            "experts.2.gate_proj has rank 8, but model.lora makes it 4",
        ),
        (lambda t: t[f"{K}.lora_A.weight"].add_(1), "k_proj.lora_A.weight differs from .*q_proj.* one A for both"),
        (
            lambda t: t[f"{GATE}.lora_B.weight"][3, 2:].fill_(torch.nan),
            "gate_proj.lora_B.weight has values .* not finite",
        ),
        (
            lambda t: t[f"{GATE}.lora_B.weight"][3, 2:].fill_(-torch.inf),
            "gate_proj.lora_B.weight has values .* not finite",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named_in_one_line(
    change: Callable[[dict[str, torch.Tensor]], None], says: str, given: Path, tmp_path: Path
) -> None:
    folder = rewritten(given, tmp_path / "broken", change)
    with pytest.raises(InputError, match=rf"^model\.lora\.adapter = {folder}: [^\n]*{says}[^\n]*$"):
        read_adapter(folder, SHAPE, tiny.config())


def test_an_adapter_of_another_base_rank_or_scale_is_refused(given: Path) -> None:
    for config in ({"hidden_size": 128}, {"num_experts": 8}, {"mlp_layer_types": ["dense"] * 7}):
        with pytest.raises(InputError, match="another base model"):
            read_adapter(given, SHAPE, tiny.config() | config)
    for other, says in (
        ({"rank": 8}, "q_proj has rank 16, but model.lora makes it 8"),
        ({"alpha": 16.0}, "q_proj has scale 2, but model.lora makes it 1"),
        ({"expert_alpha": 32.0}, "experts.0.gate_proj has scale 2, but model.lora makes it 8"),
        ({"targets": ALL_TARGETS[:5]}, "other model.lora.targets"),
    ):
        with pytest.raises(InputError, match=says):
            read_adapter(given, dataclasses.replace(SHAPE, **other), tiny.config())


def test_an_adapter_trained_on_another_checkpoint_of_the_same_shape_is_refused(given: Path) -> None:
    read_adapter(given, SHAPE, tiny.config(), tiny.checkpoint())
    with pytest.raises(InputError, match=r"was trained on another checkpoint than model\.path"):
        read_adapter(given, SHAPE, tiny.config(), tiny.checkpoint("bf16"))


def test_a_full_disk_leaves_no_half_folder(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("beam_rl.adapter_files.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        lora_tiny.folder(tmp_path / "new", SHAPE)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (WEIGHTS, None, f"no {WEIGHTS} there"),
        (CONFIG, None, f"no {CONFIG} there"),
        (WEIGHTS, b"\x20\0\0\0\0\0\0\0{", f"{WEIGHTS} can't be read"),
        (CONFIG, b"{", f"{CONFIG} is not a LoRA adapter's"),
        (CONFIG, b'{"peft_type": "IA3"}', f"{CONFIG} is not a LoRA adapter's"),
        (CONFIG, b'{"r": "x", "lora_alpha": 8}', f"alphas in its {CONFIG} make no sense"),
        (CONFIG, b'{"r": 4, "lora_alpha": 8, "rank_pattern": {"(": 4}}', f"alphas in its {CONFIG} make no sense"),
        (CONFIG, b'{"r": 4, "lora_alpha": 8, "rank_pattern": ["q"]}', f"alphas in its {CONFIG} make no sense"),
    ],
)
def test_a_missing_or_broken_file_is_named(
    file: str, content: bytes | None, says: str, given: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(given, tmp_path / "broken")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(InputError, match=rf"^model\.lora\.adapter = [^\n]*{says}[^\n]*$"):
        read_adapter(folder, SHAPE, tiny.config())


def test_training_does_not_start_from_an_adapter_that_does_not_fit(given: Path) -> None:
    with pytest.raises(InputError, match="has rank 16, but model.lora makes it 8"):
        tiny.trainer(adapter=dataclasses.replace(SHAPE, rank=8, alpha=16.0), adapter_folder=str(given))


def test_writing_replaces_nothing_and_leaves_no_half_folder(given: Path, tmp_path: Path) -> None:
    config, tensors = tiny.config(), lora_tiny.values(SHAPE, tiny.config())
    with pytest.raises(InputError, match="exists already"):
        write_adapter(tensors.items(), SHAPE, config, given, "base")
    tensors.pop("model.layers.3.mlp.experts.2.down_proj.lora_B.weight")
    with pytest.raises(ValueError, match="not the tensors of this adapter"):
        write_adapter(tensors.items(), SHAPE, config, tmp_path / "new", "base")
    assert list(tmp_path.iterdir()) == []


def test_no_target_stands_both_among_modules_and_parameters() -> None:
    settings = adapter_config(SHAPE, "base")
    assert sorted(settings["target_parameters"]) == [
        "mlp.down_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "self_attn.gate_proj.weight",
    ]
    assert sorted(settings["target_modules"]) == sorted(f"{p}_proj" for p in ("q", "k", "v", "o", "gate", "up", "down"))
