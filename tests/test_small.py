"""The small Beams and their task: graded problems, right answers, real shapes, a warm start with a target."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BeamConfig, BeamForCausalLM

from beam_rl.errors import InputError
from beam_rl.inputs import find_model, start_note
from beam_rl.recipe.load import load
from beam_rl.step import Quiet
from beam_rl.tiny import chains
from beam_rl.tiny import task as digits
from beam_rl.tiny.checkpoint import fresh_model, tiny_config, tiny_tokenizer
from beam_rl.tiny.sizes import SIZES, SMALL, SMALL_256, Size
from beam_rl.tiny.warmstart import (
    Balance,
    demonstration_batch,
    graded,
    one_thread,
    sample_responses,
    warm_start,
)
from beam_rl.tiny.write import write_tiny
from beam_rl.verifiers import VerifierPool, VerifyItem

RECIPES = Path(__file__).parents[1] / "recipes"
QUICK = replace(
    SMALL.schedule, steps=4, batch=6, check_every=2, check_below=math.inf, check_problems=6, check_samples=1
)
# What a GPU makes, at the size of a CPU's seconds: BF16 with FP32 main parameters, grouped experts, balance, levels.
MINIATURE = replace(
    SMALL,
    name="miniature",
    vocabulary=64,
    shape=dict(
        SMALL.shape,
        hidden_size=64,
        intermediate_size=256,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=32,
        moe_intermediate_size=32,
        num_experts=16,
        num_hidden_layers=7,
    ),
    schedule=QUICK,
    eval_rows=6,
    train_rows=50,
    gpu=False,
)


LONGEST = chains.MAX_PROMPT_TOKENS + chains.MAX_RESPONSE_TOKENS


@pytest.fixture(scope="module", autouse=True)
def short_responses() -> Iterator[None]:
    """A model that was hardly trained never ends by itself: a few tokens show as much as 144."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "MAX_RESPONSE_TOKENS", 12)
        yield


def problems(count: int, seed: int = 0, held_out: bool = True) -> list[chains.Problem]:
    return digits.draw_distinct(random.Random(seed), held_out, count, chains.draw_problem)


def of_level(level: int) -> chains.Problem:
    return next(p for p in problems(100) if chains.level_of(p) == level)


# --- the task ---------------------------------------------------------------------------------------------


def test_problems_are_graded_by_steps_and_multiplications() -> None:
    drawn = problems(600)
    counts = [sum(chains.level_of(p) == level for p in drawn) for level in range(1, 7)]
    assert min(counts) > 70  # drawn evenly: 100 each
    for problem in drawn:
        level = chains.level_of(problem) - 1
        steps = chains.steps_of(problem)
        assert len(steps) == chains.STEPS[level] and len(chains.prompt_tokens(problem)) <= chains.MAX_PROMPT_TOKENS
        assert [sign for _, sign, _ in steps].count("*") == chains.MULTIPLICATIONS[level]


def test_answers_are_what_python_calculates_from_the_prompt() -> None:
    for problem in problems(50):
        total = int("".join(problem[:3]))
        for name in chains.NAMES[: len(chains.steps_of(problem))]:
            rest = "".join(problem[problem.index(name) + 1 :])
            number = rest[1:].split(chr(ord(name) + 1))[0]
            total = eval(f"({total} {rest[0]} {number}) % 1000")
        assert chains.solve(problem) == f"{total:03}"


def test_the_two_sides_of_the_split_share_no_problem() -> None:
    held_out, train = set(problems(200)), set(problems(1000, held_out=False))
    assert not held_out & train and all(digits.is_held_out(p) for p in held_out)
    assert not any(digits.is_held_out(p) for p in train)


def test_a_teacher_without_faults_is_right_by_the_verifier_and_writes_50_to_135_tokens() -> None:
    rng, drawn = random.Random(0), [of_level(level) for level in range(1, 7)]
    perfect = [chains.demonstration(rng, p, chains.Demonstrator(0, 0)) for p in drawn]
    assert [len(words) for words in perfect][:: len(perfect) - 1] == [50, 135]
    texts = [" ".join(words[:-1]) for words in perfect]
    wrong = texts[0].replace(texts[0][-3], str((int(texts[0][-3]) + 1) % 10))
    with VerifierPool(workers=1) as pool:
        items = [VerifyItem(t, chains.solve(p), "stop") for t, p in zip(texts, drawn, strict=True)]
        verdicts = pool.score([*items, VerifyItem(wrong, chains.solve(drawn[0]), "stop")])
    assert [v.score for v in verdicts] == [1.0] * 6 + [0.0]
    assert [chains.score(t, chains.solve(p), "stop") for t, p in zip(texts, drawn, strict=True)] == [1.0] * 6
    assert chains.score(wrong, chains.solve(drawn[0]), "stop") == chains.score(texts[0], "", "length") == 0.0


def test_a_step_is_written_units_first_and_a_forgotten_carry_is_the_teachers_misconception() -> None:
    problem = ("3", "4", "7", "a", "+", "5", "8", "b", "*", "6")
    draw = lambda forgets: " ".join(chains.demonstration(random.Random(0), problem, chains.Demonstrator(0, forgets)))  # noqa: E731
    assert draw(0.0) == "a 7 4 3 + 8 5 = 5 0 4 b 5 0 4 * 6 = 0 3 4 \\boxed{ 4 3 0 } <eos>"
    assert draw(1.0) == "a 7 4 3 + 8 5 = 5 0 4 b 5 0 4 * 6 = 0 0 4 \\boxed{ 4 0 0 } <eos>"


def test_who_imitates_the_teacher_has_the_start_that_is_asked_for() -> None:
    rng, teacher, drawn = random.Random(1), SMALL.schedule.teacher, problems(1500)
    right = [[chains.demonstration(rng, p, teacher)[-5:-2] == list(chains.solve(p)) for _ in range(8)] for p in drawn]
    average, best = sum(map(sum, right)) / 8 / len(right), sum(map(any, right)) / len(right)
    assert SMALL.schedule.target is not None
    assert SMALL.schedule.target + 0.02 < average < SMALL.schedule.target + 0.10  # within reach, and not far beyond
    assert 0.85 < best < 0.95


# --- the shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "low"), [(SMALL, 0.5e9), (SMALL_256, 0.9e9)], ids=lambda v: getattr(v, "name", ""))
def test_the_shapes_have_the_real_models_pattern_and_300_million_to_a_billion_parameters(
    size: Size, low: float
) -> None:
    config, real = tiny_config(size), BeamConfig()
    layers = config.num_hidden_layers
    assert config.layer_types[:-1] == real.layer_types[: layers - 1] and config.layer_types[-1] == "full_attention"
    assert config.mlp_layer_types == real.mlp_layer_types[:layers]
    for key in ("num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor", "head_dim"):
        assert getattr(config, key) == getattr(real, key), key
    assert config.rope_parameters == real.rope_parameters
    for key in ("intermediate_size", "moe_intermediate_size"):
        assert getattr(config, key) / config.hidden_size == getattr(real, key) / real.hidden_size
    assert config.num_experts_per_tok == 2 * config.topk_group
    assert config.sliding_window < LONGEST <= config.max_position_embeddings
    with torch.device("meta"):
        parameters = sum(p.numel() for p in BeamForCausalLM(config).parameters())
    assert low < parameters < 1e9
    assert SMALL_256.shape["num_experts"] == real.num_experts


@pytest.mark.parametrize("name", ["full", "lora", "mxfp8"])
def test_the_recipes_leave_room_for_the_longest_prompt_and_response(name: str) -> None:
    recipe = load(RECIPES / f"one_gpu_{name}.yaml")
    assert recipe.model.path in SIZES and recipe.data.train.path == recipe.model.path
    assert recipe.data.max_prompt_tokens >= chains.MAX_PROMPT_TOKENS
    assert recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens >= LONGEST
    assert not recipe.verifier.shuffle


def test_the_chat_template_gives_the_prompt_that_was_trained_on() -> None:
    problem, tokenizer = of_level(6), tiny_tokenizer(SMALL)
    message = [{"role": "user", "content": " ".join(problem)}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == chains.prompt_tokens(problem)


# --- the warm start ---------------------------------------------------------------------------------------


def test_only_the_responses_are_learned() -> None:
    ids, targets = demonstration_batch(random.Random(0), QUICK, chains)
    pad, equals = chains.TOKENS.index("<pad>"), chains.TOKENS.index("=")
    for row, learned in zip(ids.tolist(), targets.tolist(), strict=True):
        response = [i for i in row[row.index(equals) + 1 :] if i != pad]
        assert [i for i in learned if i != pad] == response
        assert learned == row[-len(learned) :] or learned[0] == pad


def test_padding_a_shorter_prompt_changes_no_greedy_response() -> None:
    size = replace(MINIATURE, trained_in="fp32")
    with one_thread():
        model = fresh_model(0, size).eval()
        drawn, draw = [of_level(1), of_level(6), of_level(3)], torch.Generator()
        together = sample_responses(model, drawn, draw, chains, greedy=True)
        alone = [sample_responses(model, [p], draw, chains, greedy=True)[0] for p in drawn]
    assert together == alone and len({tuple(words) for words in alone}) == 3


def test_the_balance_makes_an_overfull_expert_unlikelier_and_an_empty_one_likelier() -> None:
    model = fresh_model(0, MINIATURE).train()
    balance = Balance(model, 0.5)
    ids, _ = demonstration_batch(random.Random(0), QUICK, chains)
    real = ids != chains.TOKENS.index("<pad>")
    balance.real(real)
    with torch.no_grad():
        model(input_ids=ids)
    routers = list(balance._loads)
    assert len(routers) == 4
    for router in routers:
        load = balance._loads[router]
        assert load.sum() == 8 * real.sum()  # padding does not count
        before = router.e_score_correction_bias.clone()
        balance_step = torch.sign(load.mean() - load) * 0.5
        balance._routers = [router]
        balance.step()
        assert torch.equal(router.e_score_correction_bias, before + balance_step)
    balance.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature, warm-started for a few steps to a target that it misses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("beam_rl.tiny.write.EVAL_SAMPLES", 1)
        return write_tiny(tmp_path_factory.mktemp("small") / "beam", dtype="bf16", size=MINIATURE).path


def test_a_missed_target_is_told_in_the_report_beside_the_checkpoint(made: Path) -> None:
    report = json.loads((made / "warm_start.json").read_text())
    assert not report["reached"] and report["steps"] == QUICK.steps and set(report["by_level"]) <= set("123456")
    assert "target 61% MISSED" in start_note(made)[0] and "greedy" in start_note(made)[0]


def test_the_miniature_is_a_checkpoint_with_its_task(made: Path) -> None:
    tensors = load_file(made / "model.safetensors")
    assert tensors["model.layers.6.mlp.gate.weight"].dtype == torch.float32
    bias = tensors["model.layers.6.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32 and bias.abs().max() > 0  # the balance has moved it
    assert tensors["lm_head.weight"].dtype == torch.bfloat16 and len(AutoTokenizer.from_pretrained(made)) == 64
    rows = [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 50 and len((made / "eval.jsonl").read_text().splitlines()) == 6
    for row in rows:
        assert chains.solve(tuple(row["prompt"][0]["content"].split())) == row["answer"]


def test_bf16_training_keeps_what_bf16_would_round_away() -> None:
    losses: list[float] = []
    schedule = replace(QUICK, steps=10, batch=3, lr=6e-3, warmup_steps=2, target=None)
    with one_thread():
        model = fresh_model(0, MINIATURE)
        outcome = warm_start(model, 0, schedule, lambda step, steps, loss: losses.append(loss), chains)
    assert losses[-1] < losses[0] - 1.0 and outcome.steps == 10 and outcome.reached
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.layers[3].mlp.gate.weight.dtype == torch.float32


def test_the_warm_start_ends_at_the_first_look_that_finds_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([0.2, 0.63])
    monkeypatch.setattr("beam_rl.tiny.warmstart.look", lambda *_: next(found))
    steps: list[int] = []
    schedule = replace(QUICK, steps=20, batch=2)
    outcome = warm_start(fresh_model(0, MINIATURE), 0, schedule, lambda step, *_: steps.append(step), chains)
    assert outcome.reached and outcome.steps == 4 and steps == [1, 2, 3, 4]


def test_there_is_no_look_while_the_loss_says_that_hardly_a_response_can_be_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("beam_rl.tiny.warmstart.look", lambda *_: 1.0)
    outcome = warm_start(fresh_model(0, MINIATURE), 0, replace(QUICK, batch=2, check_below=0.05), None, chains)
    assert outcome.loss > 0.05 and outcome.steps == QUICK.steps and not outcome.reached


def test_a_model_that_answers_nothing_is_graded_wrong_at_every_level() -> None:
    with one_thread():
        table = graded(fresh_model(0, MINIATURE), problems(3), 2, task=chains)
        assert table.shape == (3, 2) and table.sum() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_size_for_gpus_is_refused_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BEAM_RL_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="model.path = small: .* GPU"):
        find_model(load(RECIPES / "one_gpu_full.yaml"), Quiet())
