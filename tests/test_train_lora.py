"""A LoRA run as a user starts it, and its adapter where users take it: export, stock PEFT, stock vLLM."""

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from peft import PeftModel
from rollout_fixtures import Reference
from runs import metrics, samples
from safetensors.torch import load_file
from test_engine_checkpoint import in_half

from beam_rl.lora import adapter_of, adapter_tensors, repeated_tensors
from beam_rl.recipe.load import load

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu_lora.yaml"
OVERRIDES = [
    "trainer.steps=3",
    "trainer.deterministic=true",
    "checkpoint.every=2",
    "eval.every=0",
    "logging.samples_per_step=1000",
    "logging.wandb=disabled",
]
Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def run(ray_here: str) -> Run:
    return partial(runs.run, TINY, [*OVERRIDES, f"cluster.address={ray_here}"])


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(run: Run, folder: Path) -> Path:
    run(folder / "whole")
    return folder / "whole"


@pytest.fixture(scope="module")
def exported(whole: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "beam_rl.cli", "export", str(whole), str(folder / "adapter")]
    subprocess.run(command, check=True, timeout=300)
    return folder / "adapter"


def test_trainer_and_engine_agree_at_every_step_and_replay_every_route(whole):
    for row in metrics(whole)[1:]:
        assert row["parity/abs_logprob_diff_mean"] < 1e-5
        assert row["replay/missing_rows"] == 0 and row["replay/route_agreement"] > 0.999


def test_a_sync_sends_the_adapter_and_not_a_byte_more(whole, tiny_folder):
    config = json.loads((tiny_folder / "config.json").read_text())
    lora = load(TINY).model.lora
    adapter = adapter_of(lora, config["num_experts_per_tok"])
    repeated = repeated_tensors(adapter, config)
    size = sum(4 * prod(shape) for name, shape in adapter_tensors(adapter, config).items() if name not in repeated)
    assert [row["sync/bytes"] for row in metrics(whole)] == [size] * 4
    assert [row["sync/version"] for row in metrics(whole)] == [0, 1, 2, 3]


def test_a_resumed_run_goes_on_as_the_whole_one_did(run, whole, folder):
    run(folder / "resumed", "--resume", str(whole / "checkpoints" / "step_2"))
    assert samples(folder / "resumed", 3) == samples(whole, 3)
    there, here = metrics(whole)[-1], metrics(folder / "resumed")[-1]
    for name in there:
        if not name.startswith(("time/", "memory/", "sync/seconds", "rollout/tokens_per_s", "optim/tflops")):
            assert here[name] == there[name], name


@pytest.mark.parametrize(("precision", "gap"), [("bf16", 0.008), ("mxfp8", 0.015)])
def test_another_precision_two_ranks_and_a_kl_term_from_an_adapter_on(
    run, whole, tiny_folder, folder, precision: str, gap: float
):
    """The published bar for BF16 with LoRA and replay is a mean |Δlogp| of 0.008, for MXFP8 0.03."""
    half = in_half(tiny_folder, folder / f"half_{precision}")
    run(
        folder / precision,
        f"model.path={tiny_folder}",
        *([f"rollout.checkpoint={half}"] if precision == "bf16" else []),
        f"model.lora.adapter={whole / 'adapters' / 'step_3'}",
        f"trainer.precision={precision}",
        "trainer.parallel.dp=2",
        "algorithm.kl.coefficient=0.01",
        "rollout.prompts_per_step=8",  # 64 samples are some 800 tokens for the mean
        "trainer.steps=2",
    )
    for row in metrics(folder / precision)[1:]:
        assert 0 < row["parity/abs_logprob_diff_mean"] < gap
        assert row["loss/kl"] > 1e-6, "the reference is the model without the adapter"
    assert (str(half) in (folder / precision / "logs" / "engine-0.log").read_text()) == (precision == "bf16")


def test_an_adapter_of_another_base_is_refused_before_anything_starts(run, whole, tiny_folder, folder):
    other = shutil.copytree(tiny_folder, folder / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"note": "another model"}))
    given = (f"model.path={other}", f"model.lora.adapter={whole / 'adapters' / 'step_3'}")
    _, err = run(folder / "refused", *given, code=2)
    assert "was trained on another checkpoint than model.path" in err and not (folder / "refused").exists()


def test_the_adapter_lies_beside_each_checkpoint_and_the_export_is_the_last(whole, exported):
    assert {p.name for p in (whole / "adapters").iterdir()} == {p.name for p in (whole / "checkpoints").iterdir()}
    there = load_file(whole / "adapters" / "step_3" / "adapter_model.safetensors")
    here = load_file(exported / "adapter_model.safetensors")
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    assert any(tensor.any() for name, tensor in here.items() if ".lora_B." in name)


@pytest.fixture(scope="module")
def drawn(exported: Path, tiny_folder: Path, folder: Path) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, response, log-probabilities) that a stock vLLM drew with the exported adapter."""
    script = Path(__file__).with_name("fresh_vllm.py")
    command = [sys.executable, str(script), str(tiny_folder), str(exported), str(folder / "drawn")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads((folder / "drawn").read_bytes())


@pytest.fixture(scope="module")
def trained(ray_here: str, whole: Path, tiny_folder: Path, drawn: list, folder: Path) -> np.ndarray:
    """The trainer's log-probabilities of the drawn responses, from the last checkpoint."""
    import ray

    from beam_rl.policy import Policy
    from beam_rl.samples import Completion, Prompt, Sample

    recipe = load(whole / "recipe.yaml", ["rollout.routing_replay=false"])
    drawn_samples = [
        Sample(
            Prompt(i, i, prompt, ""),
            Completion(str(i), np.array(response, np.int32), np.array(logp, np.float32), None, "stop", 3),
        )
        for i, (prompt, response, logp) in enumerate(drawn)
    ]
    with Policy(recipe, tiny_folder, folder / "logs") as policy:
        ray.get(policy.starting)
        policy.load(whole / "checkpoints" / "step_3")
        scores = policy.score([drawn_samples])
    # The samples travel sorted into packs; their engine's values travel with them.
    order = np.argsort(scores.logp_engine)
    return np.stack([scores.logp_engine[order], scores.logp[order]])


def test_stock_vllm_with_the_exported_adapter_gives_the_trainers_log_probabilities(trained, drawn):
    engine, trainer = trained
    assert len(engine) == sum(len(response) for _, response, _ in drawn) > 100
    assert np.abs(engine - trainer).max() < 2e-5


def test_the_parity_commands_reference_has_the_adapter_that_training_starts_from(drawn, exported, tiny_folder):
    from beam_rl.parity.reference import Reference

    reference = Reference(str(tiny_folder), "fp32", True, 1.0, str(exported))
    for prompt, response, logp in drawn[:4]:
        found = reference.probe(np.array([*prompt, *response]), None)[None, "log_probabilities"][len(prompt) - 1 :, 0]
        assert np.abs(found - logp).max() < 2e-5


def test_stock_peft_with_the_exported_adapter_gives_them_too(drawn, exported, tiny_folder):
    reference = Reference(tiny_folder)
    base = np.concatenate([reference.score(p, np.array(r))[0] for p, r, _ in drawn])
    reference.model = PeftModel.from_pretrained(reference.model, exported).eval().base_model.model
    peft = np.concatenate([reference.score(p, np.array(r))[0] for p, r, _ in drawn])
    engine = np.concatenate([logp for *_, logp in drawn])
    assert np.abs(peft - engine).max() < 2e-5
    assert np.abs(base - engine).max() > 1e-3, "the adapter does too little for the test to mean anything"
