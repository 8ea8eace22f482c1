"""Every rank of the 501B recipes holds its part of the checkpoint: together exactly the checkpoint, no more and no less."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BeamConfig, BeamForCausalLM

from beam_rl.checkpoint_shapes import checkpoint_shapes
from beam_rl.plan.description import beam_501b, describe
from beam_rl.recipe.load import load
from beam_rl.recipe.tree import Parallel

RECIPES = ("dapo_lora", "dapo_full", "dapo_mxfp8", "dapo_async_h200")
FOLDER = Path(__file__).parents[1]
# As others have trained it (tensor, sequence and expert-tensor parallel), and an uneven interleaved pipeline.
OTHER = {
    "tp8 sp ep4 etp2 dp1 pp2": Parallel(tp=8, sp=True, ep=4, etp=2, pp=2),
    "pp2 vpp2 uneven": Parallel(pp=2, vpp=2, pp_layers=[1, 3, 3, 1], dp=2, ep=2),
}


def layouts() -> dict[str, Parallel]:
    recipes = {name: load(FOLDER / "recipes" / f"{name}.yaml").trainer.parallel for name in RECIPES}
    return recipes | OTHER


def shortened(layers: int) -> dict[str, Any]:
    """The same with fewer layers: how one is cut does not hang on how many there are."""
    config = beam_501b()
    kinds = {key: config[key][:layers] for key in ("layer_types", "mlp_layer_types")}
    return config | kinds | {"num_hidden_layers": layers}


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """What is wrong with each layout, from one process that builds them all, but no two that are alike."""
    whole, short = beam_501b(), shortened(8)
    orders = {
        name: {"config": short if name in OTHER else whole, "parallel": parallel.model_dump()}
        for name, parallel in layouts().items()
    }
    alike = {json.dumps(order): order for order in orders.values()}
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "tests.plan_coverage"]
    done = subprocess.run(
        command,
        input=json.dumps(list(alike.values())),
        env=environment,
        cwd=FOLDER,
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = dict(zip(alike, json.loads(done.stdout.splitlines()[-1]), strict=True))
    return {name: results[json.dumps(order)] for name, order in orders.items()}


@pytest.mark.parametrize("name", [*RECIPES, *OTHER])
def test_the_ranks_together_hold_exactly_the_checkpoint(found: dict[str, list[str]], name: str) -> None:
    assert found[name] == []


def test_the_checkpoints_shapes_are_those_of_transformers_model() -> None:
    config = beam_501b()
    with torch.device("meta"):
        model = BeamForCausalLM(BeamConfig(**config))
    ours = checkpoint_shapes(config)
    unfused: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():  # experts are fused in memory, and one by one on disk
        shape = tuple(tensor.shape)
        if name.endswith("experts.gate_up_proj"):
            for e, part in ((e, part) for e in range(shape[0]) for part in ("gate", "up")):
                unfused[name.replace("gate_up_proj", f"{e}.{part}_proj.weight")] = (shape[1] // 2, shape[2])
        elif name.endswith("experts.down_proj"):
            unfused |= {name.replace("down_proj", f"{e}.down_proj.weight"): shape[1:] for e in range(shape[0])}
        else:
            unfused[name] = shape
    assert ours == unfused


def test_the_published_model_is_described_as_its_makers_do() -> None:
    config = describe(load(FOLDER / "recipes" / "dapo_lora.yaml")).config
    sparse = config["mlp_layer_types"].count("sparse")
    assert (config["num_hidden_layers"], config["hidden_size"], sparse) == (52, 5120, 49)
    assert config["layer_types"].count("full_attention") == 9
    assert (config["num_experts"], config["num_experts_per_tok"], config["max_position_embeddings"]) == (256, 8, 2**20)
    total = sum(torch.Size(shape).numel() for shape in checkpoint_shapes(config).values())
    assert round(total / 1e9) == 501
