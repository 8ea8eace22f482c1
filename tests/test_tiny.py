"""The tiny Beam: what is on disk, that it is the same for the same seed, and that its task grades as it says."""

import dataclasses
import json
import multiprocessing
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BeamConfig, BeamForCausalLM

from beam_rl.tiny import cached_tiny, task
from beam_rl.tiny.checkpoint import fresh_model
from beam_rl.tiny.warmstart import Schedule, accuracy, one_thread, warm_start
from beam_rl.tiny.write import write_tiny
from beam_rl.verifiers.toy import toy_score

SHORT = Schedule(steps=2, batch=4)
ONE_STEP = dataclasses.replace(SHORT, steps=1)


@pytest.fixture(scope="module", autouse=True)
def short_evaluation() -> Iterator[None]:
    """Two supervised steps teach nothing: one sample a problem is enough to see that the evaluation runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("beam_rl.tiny.write.EVAL_SAMPLES", 1)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "beam", seed=0, schedule=SHORT).path


def expected_names(config: BeamConfig) -> set[str]:
    """The published checkpoint's tensor names, spelled out for the tiny shape."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i, kind in enumerate(config.mlp_layer_types):
        layer = f"model.layers.{i}."
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            names.add(f"{layer}{norm}_layernorm.weight")
        names |= {f"{layer}self_attn.{p}_proj.weight" for p in ("q", "k", "v", "o", "gate")}
        names |= {f"{layer}self_attn.{n}" for n in ("gate_bias", "q_norm.weight", "k_norm.weight")}
        if kind == "sparse":
            names |= {
                f"{layer}mlp.gate.weight",
                f"{layer}mlp.gate.e_score_correction_bias",
            }
        experts = [f"experts.{e}." for e in range(config.num_experts)] if kind == "sparse" else [""]
        names |= {f"{layer}mlp.{e}{p}_proj.weight" for e in experts for p in ("gate", "up", "down")}
    return names


def test_disk_holds_exactly_the_published_tensor_names(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    config = BeamConfig.from_pretrained(folder)
    assert set(tensors) == expected_names(config)
    assert config.architectures == ["BeamForCausalLM"]
    assert tensors["model.layers.3.mlp.experts.15.gate_proj.weight"].shape == (32, 64)
    assert tensors["model.layers.3.mlp.experts.0.down_proj.weight"].shape == (64, 32)


def test_transformers_loads_back_the_very_weights_that_were_trained(
    folder: Path,
) -> None:
    with one_thread():
        trained = fresh_model(0)
        warm_start(trained, 0, SHORT)
    loaded = BeamForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, loaded[name]), name


def test_router_stays_fp32_in_a_bf16_checkpoint(tmp_path: Path, folder: Path) -> None:
    out = write_tiny(tmp_path / "bf16", seed=0, dtype="bf16", schedule=SHORT).path
    tensors, full = (
        load_file(out / "model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    for name, tensor in tensors.items():
        if ".mlp.gate." in name:
            assert torch.equal(tensor, full[name]) and tensor.dtype == torch.float32, name
        else:
            assert torch.equal(tensor, full[name].bfloat16()), name
    loaded = BeamForCausalLM.from_pretrained(out)
    assert loaded.model.layers[3].mlp.gate.weight.dtype == torch.float32
    assert loaded.lm_head.weight.dtype == torch.bfloat16


def test_chat_template_gives_the_prompt_with_one_bos(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "3 +8 -5 +9 -2 +4"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<bos>",
        "3",
        "+8",
        "-5",
        "+9",
        "-2",
        "+4",
        "=",
    ]
    assert ids == [task.TOKENS.index(t) for t in task.prompt_tokens(("3", "+8", "-5", "+9", "-2", "+4"))]


def test_decoding_shows_tokens_outside_the_task_and_hides_only_eos(
    folder: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = ["3", "1", "\\boxed{", "1", "}", "<unused50>", "<eos>"]
    text = tokenizer.decode(tokenizer.convert_tokens_to_ids(words), skip_special_tokens=True)
    assert text == "3 1 \\boxed{ 1 } <unused50>"
    assert toy_score(text, "1", "stop") == 0.0
    assert toy_score(text.removesuffix(" <unused50>"), "1", "stop") == 1.0


def test_generation_stops_at_eos_by_the_folder_alone(folder: Path) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == AutoTokenizer.from_pretrained(folder).eos_token_id == 2


def test_data_files_hold_distinct_solved_problems_from_both_sides_of_the_split(
    folder: Path,
) -> None:
    for name, rows, held_out in (
        ("train.jsonl", 20_000, False),
        ("eval.jsonl", 128, True),
    ):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        problems = [tuple(line["prompt"][0]["content"].split()) for line in lines]
        assert len(set(problems)) == rows == len(lines)
        assert all(task.is_held_out(problem) is held_out for problem in problems)
        for problem, line in zip(problems[:100], lines, strict=False):
            total = int(problem[0])
            for term in problem[1:]:
                total = total + int(term[1]) if term[0] == "+" else total - int(term[1])
            assert line["answer"] == str(total % 10)


def test_demonstrations_slip_as_often_as_the_teacher_says() -> None:
    rng = random.Random(0)
    right, direct, n = 0, 0, 4000
    for _ in range(n):
        problem = task.draw_problem(rng, held_out=False)
        words = task.demonstration(rng, problem, task.Demonstrator(slip=0.12, direct=0.2))
        right += toy_score(" ".join(words[:-1]), str(task.solve(problem)), "stop") == 1
        direct += words[0] == task.BOX
    assert abs(direct / n - 0.2) < 0.02
    # A direct answer is right with 0.88; five steps are all right with 0.88⁵, and two slips cancel now and then.
    no_slip = 0.2 * 0.88 + 0.8 * 0.88**5
    assert no_slip - 0.02 < right / n < no_slip + 0.08


def test_perfect_demonstrations_are_graded_right() -> None:
    rng = random.Random(1)
    for direct in (0.0, 1.0):
        for _ in range(50):
            problem = task.draw_problem(rng, held_out=True)
            words = task.demonstration(rng, problem, task.Demonstrator(slip=0.0, direct=direct))
            assert toy_score(" ".join(words[:-1]), str(task.solve(problem)), "stop") == 1.0


def _write_in_another_process(out: Path) -> None:
    torch.set_num_threads(2)  # the caller's choice must not matter
    torch.manual_seed(99)  # nor the state of its random generator
    write_tiny(out, seed=0, schedule=SHORT)


def test_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path, folder: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_write_in_another_process, args=(tmp_path / "b",))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_another_seed_gives_other_weights_and_the_same_problems(tmp_path: Path, folder: Path) -> None:
    out = write_tiny(tmp_path / "b", seed=1, schedule=ONE_STEP).path
    assert (folder / "model.safetensors").read_bytes() != (out / "model.safetensors").read_bytes()
    assert (folder / "eval.jsonl").read_bytes() == (out / "eval.jsonl").read_bytes()


def test_writing_leaves_threads_and_random_state_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        write_tiny(tmp_path / "a", seed=0, schedule=ONE_STEP)
        assert torch.equal(torch.rand(3), expected)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(step: int, total: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tiny(tmp_path / "sub" / "beam", progress=interrupt, schedule=SHORT)
    assert list((tmp_path / "sub").iterdir()) == []


def test_a_taken_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=f"{tmp_path}: exists already"):
        write_tiny(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_progress_tells_every_step(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = write_tiny(
        tmp_path / "a",
        progress=lambda step, total, loss: seen.append((step, total)),
        schedule=SHORT,
    )
    assert seen == [(1, 2), (2, 2)]
    assert 0 <= report.avg_at_8 <= report.pass_at_8 <= 1
    assert report.parameters == 596_238


def test_two_askers_at_once_get_one_cached_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEAM_RL_CACHE", str(tmp_path))
    steps: list[int] = []
    found: list[Path] = []

    def ask() -> None:
        found.append(
            cached_tiny(
                3,
                "fp32",
                lambda step, total, loss: steps.append(step),
                schedule=ONE_STEP,
            )
        )

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1] and steps == [1]
    assert (found[0] / "model.safetensors").exists() and found[0].parent == tmp_path
    assert not list(tmp_path.glob(".*unfinished*"))


def test_cache_tells_seed_dtype_and_schedule_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BEAM_RL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = {
        cached_tiny(0, "fp32", schedule=ONE_STEP),
        cached_tiny(1, "fp32", schedule=ONE_STEP),
    }
    folders |= {
        cached_tiny(0, "bf16", schedule=ONE_STEP),
        cached_tiny(0, "fp32", schedule=SHORT),
    }
    assert len(folders) == 4 and {f.parent for f in folders} == {tmp_path / "beam-rl"}


def test_supervised_steps_lower_the_loss_and_an_untrained_model_scores_nothing() -> None:
    losses: list[float] = []
    with one_thread():
        model = fresh_model(0)
        problems = task.draw_distinct(random.Random(0), held_out=True, count=8)
        assert accuracy(model, problems)[0] < 0.02
        schedule = Schedule(steps=12, batch=16, warmup_steps=2)
        warm_start(model, 0, schedule, lambda step, total, loss: losses.append(loss))
    assert losses[-1] < losses[0] - 1.0
