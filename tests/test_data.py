"""Prompts from files: columns, encoding, what is left out, the order, and the errors' words."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from beam_rl.data import DataError, PromptStream, read_prompts
from beam_rl.recipe.tree import DataSource
from beam_rl.samples import Prompt
from beam_rl.tiny.checkpoint import tiny_tokenizer

PROBLEMS = [f"{i % 10} +{i // 10 % 10} -{i % 7}" for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def jsonl(path: Path, rows: list[Any]) -> DataSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSource(path=str(path))


def evaluated(source: DataSource, tokenizer: Any) -> list[Prompt]:
    return read_prompts(source, tokenizer, 32, "data.eval")[0]


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def words(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> DataSource:
    rows = [{"prompt": chat(p), "answer": str(i)} for i, p in enumerate(PROBLEMS)]
    return jsonl(tmp_path_factory.mktemp("data") / "train.jsonl", rows)


def test_chat_messages_are_encoded_once_with_one_bos(source: DataSource, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = evaluated(source, tokenizer)
    assert [p.answer for p in prompts] == [str(i) for i in range(60)]
    assert words(tokenizer, prompts[12].token_ids) == "<bos> 2 +1 -5 ="
    assert all(p.token_ids.count(tokenizer.bos_token_id) == 1 for p in prompts)


def test_a_text_is_one_user_message_or_plain_text_without_a_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    source = jsonl(tmp_path / "aime.jsonl", [{"problem": "3 +8", "answer": 1}])
    source = source.model_copy(update={"prompt": "problem"})
    (prompt,) = evaluated(source, tokenizer)
    assert words(tokenizer, prompt.token_ids) == "<bos> 3 +8 =" and prompt.answer == "1"
    plain = tiny_tokenizer()
    plain.chat_template = None
    (prompt,) = evaluated(source, plain)
    assert words(plain, prompt.token_ids) == "<bos> 3 +8"


def dapo_parquet(path: Path, rows: list[dict[str, Any]]) -> DataSource:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return DataSource(path=str(path), answer="reward_model.ground_truth")


def test_dapo_layout_reaches_into_structs_and_drops_its_repeats(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = {"data_source": "math_dapo", "prompt": chat("3 +8"), "reward_model": {"ground_truth": "1", "style": "rule"}}
    other = row | {"reward_model": {"ground_truth": "2", "style": "rule"}}  # same prompt, another answer: kept
    source = dapo_parquet(tmp_path / "dapo.parquet", [row, other] * 50)
    stream = PromptStream.open(source, tokenizer, 32, seed=0)
    assert (len(stream), stream.counts.rows, stream.counts.duplicates) == (2, 100, 98)
    assert {p.answer for p in stream.take(2)} == {"1", "2"}


def test_fields_that_parquet_fills_in_do_not_reach_the_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    strict = tiny_tokenizer()
    strict.chat_template = "{% for m in messages %}{{ m.keys() | list | join(' ') }}{% endfor %}"
    rows = [
        {"prompt": chat("3"), "reward_model": {"ground_truth": "1"}},
        {"prompt": [{"role": "user", "content": "4", "name": "x"}], "reward_model": {"ground_truth": "1"}},
    ]
    lengths = [len(p.token_ids) for p in evaluated(dapo_parquet(tmp_path / "a.parquet", rows), strict)]
    assert lengths == [2, 3]


def test_a_column_with_a_dot_in_its_name_wins_over_a_struct(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"prompt": "3", "a.b": "7", "a": {"b": "8"}}])
    (prompt,) = evaluated(source.model_copy(update={"answer": "a.b"}), tokenizer)
    assert prompt.answer == "7"


def test_unusable_rows_are_dropped_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"prompt": chat("3 +1"), "answer": "4"},
        {"prompt": chat("3 +1 +2 +3 +4 +5"), "answer": "8"},  # 8 tokens
        {"prompt": chat(" "), "answer": "1"},
        {"prompt": [], "answer": "1"},
        {"answer": "1"},
        {"prompt": chat("3 +2"), "answer": None},
        {"prompt": chat("3 +2"), "answer": "  "},
        {"prompt": chat("3 +2")},
        {"prompt": chat("3 +1"), "answer": "4"},
        {"prompt": chat("3 +3"), "answer": 0},  # zero is an answer
    ]
    stream = PromptStream.open(jsonl(tmp_path / "a.jsonl", rows), tokenizer, 7, seed=0)
    c = stream.counts
    assert (c.rows, c.too_long, c.no_prompt, c.no_answer, c.duplicates) == (10, 1, 3, 3, 1)
    assert sorted((p.row, p.answer) for p in stream.take(2)) == [(0, "4"), (9, "0")]


def test_limit_takes_the_first_rows(source: DataSource, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = evaluated(source.model_copy(update={"limit": 5}), tokenizer)
    assert [p.row for p in prompts] == [0, 1, 2, 3, 4]


def test_every_epoch_is_another_permutation_and_the_seed_decides_it(
    source: DataSource, tokenizer: PreTrainedTokenizerFast
) -> None:
    stream = PromptStream.open(source, tokenizer, 32, seed=7)
    rows = [p.row for p in stream.take(150)]
    assert [p.position for p in PromptStream.open(source, tokenizer, 32, seed=7).take(150)] == list(range(150))
    first, second = rows[:60], rows[60:120]
    assert sorted(first) == sorted(second) == list(range(60)) and first != second and len(set(rows[120:])) == 30
    assert [p.row for p in PromptStream.open(source, tokenizer, 32, seed=7).take(150)] == rows
    assert [p.row for p in PromptStream.open(source, tokenizer, 32, seed=8).take(60)] != first


def test_a_restored_stream_goes_on_as_the_uninterrupted_one(
    source: DataSource, tokenizer: PreTrainedTokenizerFast
) -> None:
    whole = PromptStream.open(source, tokenizer, 32, seed=3)
    expected = whole.take(200)
    for cut in (0, 1, 59, 60, 61, 130):
        stream = PromptStream.open(source, tokenizer, 32, seed=3)
        before = stream.take(cut)
        resumed = PromptStream.open(source, tokenizer, 32, seed=3)
        resumed.restore(json.loads(json.dumps(stream.state())))
        assert before + resumed.take(200 - cut) == expected


def failing(source: DataSource, tokenizer: PreTrainedTokenizerFast, limit: int = 32) -> str:
    with pytest.raises(DataError) as raised:
        PromptStream.open(source, tokenizer, limit, seed=0)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_errors_name_the_key_in_one_line(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    good = [{"prompt": "3 +1", "answer": "4", "meta": {"id": 1, "source": "x"}}]
    path = tmp_path / "a.jsonl"
    assert failing(DataSource(path="no/such.jsonl"), tokenizer) == "data.train.path: no such file: no/such.jsonl"
    assert failing(DataSource(path="no/such.parquet"), tokenizer) == "data.train.path: no such file: no/such.parquet"
    assert "a .jsonl or .parquet file" in failing(DataSource(path=str(tmp_path)), tokenizer)
    assert "a .jsonl or .parquet file" in failing(DataSource(path="train.json"), tokenizer)
    assert failing(jsonl(path, []), tokenizer) == f"data.train.path: {path} has no rows"
    text = failing(jsonl(path, good).model_copy(update={"prompt": "question"}), tokenizer)
    assert text == "data.train.prompt: no column 'question'; there are: prompt, answer, meta.id, meta.source"
    text = failing(jsonl(path, good).model_copy(update={"answer": "meta.gold"}), tokenizer)
    assert text.startswith("data.train.answer: no column 'meta.gold'; there are: prompt, answer, meta.id")
    text = failing(jsonl(path, good), tokenizer, limit=2)
    assert text.startswith("data.train.path: none of the 1 rows") and "1 more than data.max_prompt_tokens = 2" in text
    assert failing(jsonl(path, [*good, [1]]), tokenizer).endswith("line 2: a JSON object is expected")
    assert failing(jsonl(path, [good[0] | {"prompt": 5}]), tokenizer).startswith("data.train.prompt: row 0: a text or")
    assert failing(jsonl(path, [good[0] | {"answer": {"x": 1}}]), tokenizer).startswith("data.train.answer: row 0:")
    path.write_text(json.dumps(good[0]) + '\n{"prompt": "3", "answer\n')
    assert failing(DataSource(path=str(path)), tokenizer).startswith(f"data.train.path: {path}, line 2: not JSON")
    path.write_bytes(b'{"prompt": "\xff"}\n')
    assert failing(DataSource(path=str(path)), tokenizer) == f"data.train.path: {path}: not UTF-8 text"
    broken = tmp_path / "b.parquet"
    broken.write_text("not parquet")
    assert failing(DataSource(path=str(broken)), tokenizer).startswith(f"data.train.path: {broken}: not a Parquet file")
    with pytest.raises(DataError, match=r"^data\.eval\.path: no such file"):
        evaluated(DataSource(path="no.jsonl"), tokenizer)
    plain = tiny_tokenizer()
    plain.chat_template = None
    text = failing(jsonl(path, [{"prompt": chat("3"), "answer": "3"}]), plain)
    assert text == "data.train.prompt: the rows hold chat messages, but the model's tokenizer has no chat template"


def test_an_answer_that_looks_like_a_date_stays_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (prompt,) = evaluated(jsonl(tmp_path / "a.jsonl", [{"prompt": "3", "answer": "2024-01-01"}]), tokenizer)
    assert prompt.answer == "2024-01-01"


OFFLINE = """
import os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
from beam_rl.data import DataError, read_prompts
from beam_rl.recipe.tree import DataSource
from beam_rl.tiny.checkpoint import tiny_tokenizer
read_prompts(DataSource(path=sys.argv[1]), tiny_tokenizer(), 32, "data.eval")
assert "datasets" not in sys.modules
try:
    read_prompts(DataSource(path="no-such-owner/no-such-set"), tiny_tokenizer(), 32, "data.eval")
except DataError as error:
    print(error)
"""


def test_an_unreachable_hub_is_one_line_and_the_home_folder_stays_empty(source: DataSource, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, source.path],
        capture_output=True,
        text=True,
        timeout=100,
        env={"HOME": str(home), "PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"},
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 1, done.stderr
    assert lines[0].startswith("data.eval.path: can't load 'no-such-owner/no-such-set' from the Hugging Face hub")
    assert [p for p in home.rglob("*") if p.is_file()] == []
