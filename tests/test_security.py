"""What must not happen: answers and repositories that run as code, secrets in what a run writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from beam_rl.credentials import hide, holds_secret, without_secrets
from beam_rl.recipe.load import RecipeError, load
from beam_rl.run import Run
from beam_rl.verifiers import VerifierPool, VerifyItem

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
ROOT = Path(__file__).parents[1] / "beam_rl"
KEY = "hf_" + "Ab1" * 12


@pytest.mark.parametrize(
    "wrapped",
    [
        "{}",
        r"\text{{{}}}",
        r"\operatorname{{{}}}",
        r"\mathrm{{{}}}(1)",
        "x = {}",
        r"\left({}, 1\right)",
        r"\sqrt{{{}}}",
        r"\begin{{pmatrix}} {} \end{{pmatrix}}",
    ],
)
def test_an_answer_is_never_executed(wrapped: str, tmp_path: Path) -> None:
    mark = tmp_path / "m"
    codes = [f"__import__('os').mkdir('{mark}')", f"(lambda: open('{mark}','w'))()", f'S(\'open("{mark}","w")\')']
    items = [VerifyItem(rf"\boxed{{{wrapped.format(code)}}}", gold, "stop") for code in codes for gold in ("1", "x+1")]
    with VerifierPool(workers=1) as pool:
        assert [v.score for v in pool.score(items)] == [0.0] * len(items)
        assert not [v for v in pool.score(items) if v.timed_out]
    assert not mark.exists()


def test_nothing_asks_for_code_from_a_model_repository_or_for_a_pickle() -> None:
    text = {path: path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
    for path, source in text.items():
        assert "trust_remote_code=True" not in source, path
        assert "torch.load(" not in source, path
        assert "pickle.load" not in source, path
        assert path.name == "launch.py" or "ALLOW_INSECURE_SERIALIZATION" not in source, path


def test_vllms_insecure_serialization_stays_off_whatever_the_shell_says(tmp_path: Path) -> None:
    code = """
import os, sys
from beam_rl.rollout.launch import EngineSettings, set_environment
set_environment(EngineSettings(sys.argv[1], "fp32", 9, 1, 9, 1.0, 0.5, 0, False, "127.0.0.1", sys.argv[1]))
print(os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"])
"""
    environment = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=99,
    )
    assert done.stdout.split()[-1] == "0"


def test_secrets_are_hidden_by_the_name_of_their_variable_and_by_their_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "open sesame")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false as ever")
    text = f"401 for open sesame and {KEY} at https://me:pass@host/x, not for false as ever"
    assert hide(text) == "401 for [hidden] and [hidden] at https://[hidden]@host/x, not for false as ever"
    assert holds_secret(KEY) and not holds_secret("org/model-70B")
    kept = without_secrets({"HF_TOKEN": "x", "WANDB_API_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x", "PATH": "x"})
    assert kept == {"PATH": "x"}


def test_a_recipe_with_a_secret_is_refused_without_repeating_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2)
    for override in (f"logging.project={KEY}", "data.train.path=https://u:0123456789abcdef0123456789abcdef@h/x"):
        with pytest.raises(RecipeError, match="holds a key or token") as caught:
            load(TINY, [override])
        assert KEY not in str(caught.value) and "0123456789" not in str(caught.value)


def test_an_error_that_quotes_a_secret_does_not_bring_it_into_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret without a look")
    recipe = {"checkpoint": {"keep_last": 1, "keep_best": False}}
    with pytest.raises(ConnectionError), Run.open(tmp_path / "run", recipe):
        raise ConnectionError(f"Bearer a secret without a look, or {KEY}: refused")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "refused" in log and "a secret" not in log and KEY not in log
