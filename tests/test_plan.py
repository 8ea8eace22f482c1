"""`beam-rl plan` and the plan in `train`: its fields, what fits, what does not and which key to turn, layouts and paces."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import refused
from typer.testing import CliRunner

from beam_rl.checkpoint_shapes import checkpoint_shapes
from beam_rl.cli import app
from beam_rl.errors import InputError
from beam_rl.megatron.logprobs import PARTS as OF_VOCABULARY
from beam_rl.megatron.logprobs import workspace_bytes
from beam_rl.model_config import full_config
from beam_rl.plan.activations import HEAD_PARTS
from beam_rl.plan.case import Case, case_of
from beam_rl.plan.gpu import logit_bytes
from beam_rl.plan.hardware import TABLE, find
from beam_rl.plan.plan import Plan, make_plan
from beam_rl.plan.simulate import Pieces, draw_lengths, in_turn, lengths_of_run, one_step_off, simulate
from beam_rl.plan.suggest import suggest
from beam_rl.plan.tensors import beam_tensors, stored_tensors
from beam_rl.plan.times import Shares, shares_from, sync_size
from beam_rl.plan.work import update_flops, work_of
from beam_rl.recipe.load import load, parse
from beam_rl.recipe.tree import Recipe

FOLDER = Path(__file__).parents[1] / "recipes"
TINY = FOLDER / "tiny_cpu.yaml"
PARTS = {"weights", "gradients", "optimizer", "activations", "kv_cache", "adapters", "buffers"}


def recipe(name: str, *overrides: str) -> Recipe:
    return load(FOLDER / f"{name}.yaml", overrides)


@pytest.fixture(scope="module")
def full() -> Case:
    return case_of(recipe("dapo_full"))


@pytest.fixture(scope="module")
def lora() -> Case:
    return case_of(recipe("dapo_lora"))


def changed(case: Case, **keys: object) -> Plan:
    """The plan of a case with other values of keys that its shapes don't hang on; dots are written as __."""
    tree = case.recipe.model_dump(mode="json")
    for key, value in keys.items():
        *path, leaf = key.split("__")
        node = tree
        for part in path:
            node = node[part]
        node[leaf] = value
    other = parse(tree)
    machine = find(other.cluster.gpu, other.cluster.hardware) if other.cluster.gpu else case.machine
    return make_plan(other, case=replace(case, recipe=other, machine=machine))


def keys_of(plan: Plan) -> list[str]:
    return [problem.key for problem in plan.problems]


# --- the command ------------------------------------------------------------------------------------------


def test_the_json_has_the_fields_that_were_promised() -> None:
    done = CliRunner().invoke(app, ["plan", str(TINY), "--json", "--simulate", "trainer.parallel.pp=2"])
    assert done.exit_code == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["fits"] is True and plan["problems"] == [] and plan["nvme_bytes"] == 0
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1]
    assert sum(rank["parameters"] for rank in plan["ranks"]) == 596_238
    for rank in plan["ranks"]:
        assert set(rank["gpu_bytes"]) == PARTS
        assert all(isinstance(size, int) and size >= 0 for size in rank["gpu_bytes"].values())
        assert sum(rank["gpu_bytes"].values()) <= rank["gpu_limit"]
    assert plan["host_bytes"] > sum(sum(rank["gpu_bytes"].values()) for rank in plan["ranks"])
    assert plan["sync_seconds"] > 0
    assert [t["pace"] for t in plan["simulation"]] == ["synchronous", "one_step_off", "asynchronous"]


def test_a_recipe_that_does_not_fit_ends_with_1_and_training_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "machines.yaml").write_text("toy: {like: H100, hbm_bytes: 20e9, gpus_per_node: 1}\n")
    small = ["cluster.gpu=toy", f"cluster.hardware={tmp_path}/machines.yaml", "rollout.gpu_memory_utilization=0.99"]
    done = CliRunner().invoke(app, ["plan", str(TINY), *small])
    assert done.exit_code == 1 and "Exit" not in done.stderr
    assert "does not fit" in done.stdout
    line = refused("train", TINY, *small, "--out", tmp_path / "run")
    assert "rollout.gpu_memory_utilization: rank 0 needs 19.9 GiB of 18.6 GiB while engines sample" in line
    assert not (tmp_path / "run").exists()


# --- the 501B recipes -------------------------------------------------------------------------------------


def test_all_weights_on_64_b200_fit_with_adam_on_nvme(full: Case) -> None:
    plan = make_plan(full.recipe, case=full)
    assert plan.fits, plan.problems
    whole = sum(math.prod(shape) for shape in checkpoint_shapes(full.config).values())
    experts = sum(math.prod(shape) for name, shape in checkpoint_shapes(full.config).items() if ".experts." in name)
    biases = 49 * 256
    assert sum(shape.count(expert=True) for shape in full.shapes) == experts
    assert sum(full.shapes[8 * stage].count(expert=False) for stage in range(4)) == whole - experts - biases
    # 12 bytes a parameter, 8 of an FP32 router's, twice; a quarter of it on each of four nodes.
    routers = 49 * 256 * 5120
    state = 12 * (whole - biases - routers) + 8 * routers
    assert plan.nvme_bytes == pytest.approx(2 * state / 4, rel=0.15)  # stages differ
    assert plan.ranks[0].moments["update"].optimizer == 0
    assert {place.name.split()[0] for place in plan.engines} == {"engine"} and len(plan.engines) == 32


def test_an_adapter_on_32_b200_fits(lora: Case) -> None:
    plan = make_plan(lora.recipe, case=lora)
    assert plan.fits, plan.problems
    assert not plan.engines  # they share the ranks' GPUs
    sampling = plan.ranks[0].moments["rollout"]
    assert sampling.kv_cache > 0 and sampling.adapters > 0 and sampling.optimizer == 0
    assert plan.ranks[0].moments["update"].gradients < 2**30
    assert plan.node.engine_base > 900e9  # a sleeping engine's base waits on the host


def test_a_kv_cache_that_the_recipe_sizes_for_vllm_is_that_size(lora: Case) -> None:
    plan = changed(lora, rollout__engine_args={"kv_cache_memory_bytes": 6 * 10**9})
    assert plan.ranks[0].moments["rollout"].kv_cache == 6 * 10**9


def test_what_does_not_fit_names_the_key_to_turn(full: Case, lora: Case) -> None:
    assert keys_of(changed(full, trainer__optimizer__offload="none")) == ["trainer.optimizer.offload"]
    assert keys_of(changed(full, trainer__recompute="none")) == ["trainer.recompute"]
    assert keys_of(changed(full, trainer__token_budget=122_880)) == ["trainer.token_budget"]
    assert keys_of(changed(full, rollout__gpu_memory_utilization=0.95)) == ["rollout.gpu_memory_utilization"]
    assert keys_of(changed(full, rollout__gpu_memory_utilization=0.6)) == ["rollout.gpu_memory_utilization"]
    assert "trainer.parallel.pp" in keys_of(changed(lora, cluster__gpu="H100"))
    assert keys_of(make_plan(lora.recipe, case=replace(lora, machine=replace(lora.machine, host_bytes=10**12)))) == [
        "cluster.placement"
    ]


def test_too_few_nodes_are_a_problem_and_an_engine_over_two_nodes_is_wrong_input() -> None:
    few = make_plan(
        recipe("tiny_cpu", "cluster.gpu=H200", "cluster.nodes=1", "cluster.gpus_per_node=1", "rollout.engines=2")
    )
    assert keys_of(few) == ["cluster.nodes"] and "2 are needed" in few.problems[0].message
    with pytest.raises(InputError, match="16 workers of an engine have to be on one node"):
        case_of(recipe("dapo_lora", "rollout.parallel.tp=16"))


def test_suggested_layouts_fit_and_are_overrides_of_the_recipe() -> None:
    case = case_of(recipe("tiny_cpu", "cluster.gpu=H200", "trainer.parallel.dp=4", "trainer.recompute=full"))
    suggestions = suggest(case, Shares(), draw_lengths(256, 16, 0), tries=3)
    assert suggestions and [s.step_s for s in suggestions] == sorted(s.step_s for s in suggestions)
    assert "trainer.recompute=none" in suggestions[0].overrides  # everything fits, and that is quicker
    overrides = ("cluster.gpu=H200", "trainer.parallel.dp=4", *suggestions[0].overrides)
    assert recipe("tiny_cpu", *overrides).trainer.parallel.ranks == 4


# --- seconds ----------------------------------------------------------------------------------------------


def test_a_sync_sends_the_checkpoint_or_the_adapter(full: Case, lora: Case) -> None:
    nbytes, tensors = sync_size(full)
    assert tensors == len(checkpoint_shapes(full.config))
    assert nbytes == pytest.approx(1.003e12, rel=0.01)
    assert sync_size(lora)[0] < nbytes / 100


def test_paces_trade_idle_time_for_staleness(full: Case) -> None:
    lengths = draw_lengths(4 * full.samples, 8192, 0)
    pieces = Pieces(full, Shares(), lengths, train_s=100.0, sync_s=10.0, slower=1.0)
    turns, ahead = in_turn(pieces, 3, 0.0), one_step_off(pieces, 3)
    assert ahead.step_s < turns.step_s and ahead.trainer_idle < turns.trainer_idle
    assert (turns.staleness_max, ahead.staleness_max) == (0, 1)
    for timeline in simulate(full, Shares(), lengths, steps=4):
        assert 0 <= timeline.trainer_idle < 1 and 0 <= timeline.engines_idle < 1
        assert timeline.staleness_max <= full.recipe.algorithm.staleness


def test_response_lengths_come_from_a_runs_samples(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    rows = [json.dumps({"token_ids": list(range(n))}) for n in (3, 5)]
    (tmp_path / "samples" / "step_1.jsonl").write_text("\n".join(rows))
    assert np.array_equal(lengths_of_run(tmp_path), [3, 5])
    with pytest.raises(InputError, match="no samples there"):
        lengths_of_run(tmp_path / "nowhere")


def test_measured_results_take_the_place_of_assumed_shares(tmp_path: Path) -> None:
    file = tmp_path / "sync.json"
    file.write_text(json.dumps({"name": "sync", "ratio": 0.5, "figure": 1.0}))
    shares, notes = shares_from([file])
    assert shares.sync_bandwidth == 0.5 and "measured" in notes[0]
    file.write_text("{}")
    with pytest.raises(InputError, match="no result of"):
        shares_from([file])


# --- machines ---------------------------------------------------------------------------------------------


def test_machines_of_a_file_extend_and_change_the_table(tmp_path: Path) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text("MI999: {like: B200, hbm_bytes: 3e11}\nH200: {host_bytes: 4e12}\n")
    assert find("mi999", str(file)).hbm_bytes == 300_000_000_000
    assert find("H200", str(file)).host_bytes == 4 * 10**12 and find("H200", None).host_bytes == 2 * 10**12
    assert find("MI999", str(file)).nvlink_bytes_per_s == TABLE["B200"].nvlink_bytes_per_s
    for text, message in (
        ("x: {hbm: 1}", "unknown field hbm"),
        ("x: {hbm_bytes: 1}", "x: lacks"),
        ("H200: {hbm_bytes: -1}", "a positive number"),
        ("- 1", "a mapping of names"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            find("H200", str(file))
    with pytest.raises(InputError, match="cluster.gpu = A100: is none of H100, H200, B200, GB300"):
        find("A100", None)


def test_what_an_update_multiplies_is_told_by_the_checkpoints_headers(tiny_folder: Path) -> None:
    config = full_config(tiny_folder)
    work = work_of(config, stored_tensors(tiny_folder, config))
    assert work == work_of(config, beam_tensors(config))
    # A token meets 301,326 parameters, the embedding's 64 · 64 among them, and 64 biases; 2 heads of 32, a window of 8.
    seen = {"full_attention": 10 / 2, "sliding_attention": 8 - 8**2 / 20}  # of 10 tokens, on average
    attention = 4 * 64 * sum(seen[kind] for kind in config["layer_types"])
    products = 2 * (301_326 - 64 * 64 + 64)
    assert update_flops(work, [10, 10], adapter=False) == pytest.approx(20 * 3 * (products + attention))
    assert update_flops(work, [10, 10], adapter=True) == pytest.approx(20 * (2 * products + 3 * attention))


@pytest.mark.parametrize("numerics", ["engine", "fp32_head"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_logit_takes_as_much_as_the_head_says(precision: str, where: str, numerics: str) -> None:
    gpu = ["cluster.gpu=H200"] if where == "cuda" else []
    case = case_of(recipe("tiny_cpu", f"trainer.precision={precision}", f"trainer.numerics={numerics}", *gpu))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert case.on_gpus == (where == "cuda")
    assert logit_bytes(case) == workspace_bytes(dtype, torch.device(where), numerics)


def test_the_head_is_planned_in_as_many_parts_as_it_has() -> None:
    assert HEAD_PARTS == OF_VOCABULARY
