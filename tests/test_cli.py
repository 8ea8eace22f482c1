"""Wrong input at the command line: one clear line on stderr, exit code 2, before any engine starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from beam_rl.cli import explicit_resume, root_cause
from beam_rl.errors import InputError
from beam_rl.recipe.load import load
from beam_rl.start import _export_form

ROOT = Path(__file__).parents[1]
TINY = ROOT / "recipes" / "tiny_cpu.yaml"


def beam_rl(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "beam_rl.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)


def refused(*arguments: object) -> str:
    """The one line that a refused command prints."""
    done = beam_rl(*arguments)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("beam-rl: ")
    return lines[0]


def test_no_such_recipe():
    assert "no such recipe: nowhere.yaml" in refused("train", "nowhere.yaml")


def test_unknown_key():
    assert "did you mean rollout.temperature?" in refused("train", TINY, "rollout.temprature=1")


def test_wrong_type():
    assert "trainer.steps = 'many'" in refused("train", TINY, "trainer.steps=many")


def test_dry_run_prints_the_resolved_recipe_and_starts_nothing(tmp_path):
    done = beam_rl("train", TINY, "--dry-run", "trainer.steps=3", "--out", tmp_path / "run")
    assert done.returncode == 0
    assert "steps: 3" in done.stdout and "clip_high: 0.28" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_an_unknown_model(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert "holds GPT2LMHeadModel" in refused("train", TINY, f"model.path={tmp_path}", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_such_model_folder(tmp_path):
    assert "no such folder" in refused("train", TINY, f"model.path={tmp_path}/none", "--out", tmp_path / "run")


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([], "has no rows"),
        ([{"question": "1 +1", "answer": "2"}], "no column 'prompt'; there are: question, answer"),
        ([{"prompt": "3 +8 -5 +9 -2 +4", "answer": None}], "1 no answer"),
    ],
    ids=["empty", "missing column", "no answer"],
)
def test_data_that_cannot_serve(tmp_path, tiny_folder, rows, part):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"model.path={tiny_folder}", f"data.train.path={file}"]
    message = refused("train", TINY, *overrides, "--out", tmp_path / "run")
    assert "data.train" in message and part in message
    assert not (tmp_path / "run").exists()


def test_a_response_beyond_the_models_positions_is_refused_before_an_engine_finds_it(tmp_path, tiny_folder):
    longer = ["rollout.max_response_tokens=200", "trainer.token_budget=4096", f"model.path={tiny_folder}"]
    message = refused("train", TINY, *longer, "--out", tmp_path / "run")
    assert "rollout.max_response_tokens = 200" in message and "use at most 112" in message


def test_a_ray_that_is_not_there(tmp_path, tiny_folder):
    overrides = [f"model.path={tiny_folder}", "cluster.address=127.0.0.1:1", "logging.wandb=disabled"]
    done = beam_rl("train", TINY, *overrides, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "cluster.address = 127.0.0.1:1: no Ray there" in done.stderr.splitlines()[-1]


def test_a_folder_with_another_recipes_run(tmp_path, tiny_folder):
    (tmp_path / "recipe.yaml").write_text("name: other\n")
    message = refused("train", TINY, f"model.path={tiny_folder}", "--out", tmp_path)
    assert "another recipe" in message and "--out" in message
    assert (tmp_path / "recipe.yaml").read_text() == "name: other\n"


def test_export_of_something_that_is_no_checkpoint(tmp_path):
    assert "no complete checkpoint" in refused("export", tmp_path, tmp_path / "out")


def test_export_in_two_forms():
    assert "--adapter and --merged: name one form" in refused("export", "a", "b", "--adapter", "--merged")


def test_a_form_that_the_run_does_not_have_says_which_it_has():
    full, lora = load(TINY, ()), load(TINY, ("model.lora.rank=16",))
    assert [_export_form(None, recipe) for recipe in (full, lora)] == ["full", "adapter"]
    assert _export_form("merged", lora) == "merged"
    with pytest.raises(InputError, match=r"--merged: this run trains all weights .* use --full"):
        _export_form("merged", full)
    with pytest.raises(InputError, match=r"--full: this run trains an adapter .* use --adapter or --merged"):
        _export_form("full", lora)


def test_eval_of_a_model_alone_asks_for_its_data_and_of_too_few_samples_says_so(tiny_folder):
    assert "name the data set to evaluate it on" in refused("eval", tiny_folder)
    assert "--k 9: pass@9 needs as many samples a prompt" in refused("eval", TINY, "--k", "9")


def test_report_of_no_run(tmp_path):
    assert "holds no run" in refused("report", tmp_path)


def test_tiny_refuses_a_folder_that_exists(tmp_path):
    assert "exists already" in refused("tiny", tmp_path)


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        (["train", "r.yaml", "--resume"], ["train", "r.yaml", "--resume", "auto"]),
        (["train", "--resume", "r.yaml", "a=1"], ["train", "--resume", "auto", "r.yaml", "a=1"]),
        (["train", "r.yaml", "--resume", "a=1"], ["train", "r.yaml", "--resume", "auto", "a=1"]),
        (["train", "r.yaml", "--resume", "--out", "x"], ["train", "r.yaml", "--resume", "auto", "--out", "x"]),
        (["train", "r.yaml", "--resume", "runs/x/checkpoints/step_1"],) * 2,
    ],
)
def test_resume_alone_means_auto(given, spelled):
    assert explicit_resume(given) == spelled


def test_the_cause_inside_an_actors_error_is_what_the_user_reads():
    inner = ValueError("the cause")
    outer = RuntimeError("wrapped by Ray")
    outer.cause = inner
    assert root_cause(outer) is inner
    assert root_cause(inner) is inner
