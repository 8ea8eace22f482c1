"""`rollout.checkpoint`: the frozen base as engines hold it; `test_train_lora.py` trains with one."""

import json
from pathlib import Path
from shutil import copytree

import pytest
from safetensors.torch import load_file, save_file

from beam_rl.errors import InputError
from beam_rl.inputs import engine_model
from beam_rl.plan.case import case_of
from beam_rl.recipe.load import load
from beam_rl.recipe.tree import Recipe

LORA = Path(__file__).parents[1] / "recipes" / "tiny_cpu_lora.yaml"
FULL = LORA.with_name("tiny_cpu.yaml")


def in_half(whole: Path, folder: Path) -> Path:
    """A copy with every tensor in BF16, and its config.json saying so."""
    copytree(whole, folder)
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def recipe(tiny_folder: Path, tmp_path: Path) -> Recipe:
    half = in_half(tiny_folder, tmp_path / "half")
    return load(LORA, [f"model.path={tiny_folder}", f"rollout.checkpoint={half}"])


def test_engines_load_it_and_the_plan_counts_its_bytes(recipe: Recipe, tiny_folder: Path, tmp_path: Path) -> None:
    assert engine_model(recipe, tiny_folder) == tmp_path / "half"
    assert engine_model(load(LORA, []), tiny_folder) == tiny_folder
    stored = sum(file.stat().st_size for file in (tmp_path / "half").glob("*.safetensors"))
    assert case_of(recipe).engine.weights == pytest.approx(stored, rel=0.01)


def test_another_model_is_refused_by_the_key_that_differs(recipe: Recipe, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "half" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sliding_window": 7}))
    with pytest.raises(InputError, match=r"^rollout.checkpoint = .*half: not the model at .* sliding_window = 7"):
        engine_model(recipe, tiny_folder)


def test_a_missing_one_and_one_that_a_sync_would_overwrite_are_refused(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(InputError, match=r"^rollout.checkpoint = /none/there: no such folder"):
        engine_model(load(LORA, ["rollout.checkpoint=/none/there"]), tiny_folder)
    with pytest.raises(InputError, match=r"rollout.checkpoint = x: .* only with model.lora"):
        load(FULL, ["rollout.checkpoint=x"])
    with pytest.raises(InputError, match=r"rollout.checkpoint = x: .* MXFP8 would be another"):
        load(LORA, ["rollout.checkpoint=x", "trainer.precision=mxfp8"])
