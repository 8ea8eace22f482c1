"""Environments: each response's in a process of its own, whatever its class does; and the tokens around what they say."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from beam_rl.environments import EnvironmentFailure, EnvironmentPool, Remote
from beam_rl.environments.frame import find_frame
from beam_rl.environments.second_try import SecondTry
from beam_rl.errors import InputError
from beam_rl.recipe.load import load
from beam_rl.tiny.checkpoint import tiny_tokenizer

TURNS = Path(__file__).parents[1] / "recipes" / "tiny_cpu_turns.yaml"
CLASSES = '''
import os, random, subprocess, time
from pathlib import Path

class Moody:
    """Does what it is told."""

    def __init__(self, row, note=None):
        self.row, self.note, self.turns = row, note, 0
        if row.get("broken"):
            raise ValueError("a row that is broken")

    def step(self, response):
        self.turns += 1
        print("what a library prints")
        if response == "raise":
            raise RuntimeError("no such tool")
        if response == "hang":
            child = subprocess.Popen(["sleep", "600"])
            Path(self.note).write_text(str(child.pid))
            time.sleep(600)
        if response == "start":  # and leave it running, in the group and from a process of its own
            child = subprocess.Popen("sleep 600 & echo $!; wait", shell=True, stdout=subprocess.PIPE)
            return f"{child.pid} {child.stdout.readline().decode().strip()}", None
        if response == "die":
            os._exit(3)
        if response == "eat":
            return "x" * (3 * 2**30), None
        if response == "odd":
            return "an answer alone"
        if response == "nan":
            return "a", float("nan")
        if response == "keys":
            return ",".join(sorted(os.environ)), None
        if response == "draw":
            return str(random.random()), None
        return f"{self.row['answer']} {self.turns}", 0.25 * self.turns

    def close(self):
        if self.note:
            Path(self.note).write_text("closed")

class Mute:
    def __init__(self, row):
        pass

class Attentive:
    stop_strings = ("</call>",)

    def __init__(self, row):
        pass

    def step(self, response, ended_by):
        return f"{response} {ended_by}", None

class Endless(Attentive):
    stop_strings = ("",)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "moody.py"
    path.write_text(CLASSES)
    return path


def with_pool[T](file: Path, act: Callable[[EnvironmentPool], Coroutine[None, None, T]], **options: object) -> T:
    with EnvironmentPool(f"{file}:Moody", options, timeout_s=4.0) as pool:
        found = asyncio.run(act(pool))
    return found


async def failure(remote: Remote, response: str) -> str:
    with pytest.raises(EnvironmentFailure) as caught:
        await remote.step(response)
    return str(caught.value)


def test_each_response_has_an_environment_that_remembers_its_turns(file: Path) -> None:
    async def talk(pool: EnvironmentPool) -> list[object]:
        one, two = await pool.begin({"answer": "a"}, 0), await pool.begin({"answer": "b"}, 0)
        return [await one.step("x"), await two.step("x"), await one.step("x")]

    assert with_pool(file, talk) == [("a 1", 0.25), ("b 1", 0.25), ("a 2", 0.5)]


def test_an_environment_names_strings_that_end_a_turn_and_hears_which_did(file: Path) -> None:
    async def talk(pool: EnvironmentPool) -> list[object]:
        remote = await pool.begin({}, 0)
        return [await remote.step("a</call>", "</call>"), await remote.step("b")]

    with EnvironmentPool(f"{file}:Attentive", {}) as pool:
        assert pool.stop_strings == ("</call>",)
        assert asyncio.run(talk(pool)) == [("a</call> </call>", None), ("b None", None)]
    with EnvironmentPool(f"{file}:Moody", {}) as pool:
        assert pool.stop_strings == ()


def test_one_that_raises_hangs_or_dies_takes_no_other_along(file: Path, tmp_path: Path) -> None:
    note = tmp_path / "sleeper"

    async def misbehave(pool: EnvironmentPool) -> dict[str, str]:
        healthy = await pool.begin({"answer": "a"}, 0)
        await healthy.step("x")
        ways = ("raise", "hang", "die", "eat", "odd", "nan")
        remotes = [await pool.begin({"answer": "b"}, 0) for _ in ways]
        said = await asyncio.gather(*(failure(r, way) for r, way in zip(remotes, ways, strict=True)))
        said.append(await failure(await pool.begin({"broken": True}, 0), "x"))
        assert await healthy.step("x") == ("a 2", 0.5)
        return dict(zip((*ways, "broken"), said, strict=True))

    assert with_pool(file, misbehave, note=str(note)) == {
        "raise": "RuntimeError: no such tool",
        "hang": "no answer within 4 s",
        "die": "its process died",
        "eat": "MemoryError:",
        "odd": "TypeError: step returned 'an answer alone', not (answer or None, reward or None)",
        "nan": "ValueError: a reward of nan",
        "broken": "ValueError: a row that is broken",
    }
    assert ended(int(note.read_text())), "what it had started"


@pytest.mark.parametrize("way", ["raise", "die", "end"])
def test_what_an_environment_has_started_ends_with_it(file: Path, way: str) -> None:
    async def leave_behind(pool: EnvironmentPool) -> list[int]:
        remotes = [await pool.begin({"answer": "a"}, 0) for _ in range(3)]
        answers = [await remote.step("start") for remote in remotes]
        for remote in remotes:
            if way == "end":
                remote.end()
            else:
                await failure(remote, way)
        started = [int(pid) for answer, _ in answers for pid in (answer or "").split()]
        await asyncio.sleep(0.2)
        await (await pool.begin({"answer": "a"}, 0)).step("x")  # the next response's comes
        assert all([ended(pid) for pid in started]), "while others go on"
        return started

    assert len(with_pool(file, leave_behind)) == 6


def test_where_no_process_is_to_be_had_one_response_fails_and_others_go_on(tmp_path: Path) -> None:
    full, file = tmp_path / "full", tmp_path / "crowded.py"
    file.write_text(f"""{CLASSES}
really_fork = os.fork
def fork():
    if Path({str(full)!r}).exists():
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return really_fork()
os.fork = fork
""")

    async def crowd(pool: EnvironmentPool) -> tuple[str, object, object]:
        one = await pool.begin({"answer": "a"}, 0)
        await one.step("x")
        full.touch()
        why = await failure(await pool.begin({"answer": "b"}, 0), "x")
        full.unlink()
        return why, await one.step("x"), await (await pool.begin({"answer": "c"}, 0)).step("x")

    why, still, later = with_pool(file, crowd)
    assert "no process could be started for it" in why or why == "its process died"
    assert still == ("a 2", 0.5) and later == ("c 1", 0.25)


def ended(pid: int) -> bool:
    """Whether a process ends within five seconds."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_an_environment_closes_when_its_response_is_finished(file: Path, tmp_path: Path) -> None:
    note = tmp_path / "note"

    async def finish(pool: EnvironmentPool) -> None:
        remote = await pool.begin({"answer": "a"}, 0)
        await remote.step("x")
        remote.end()
        end = time.monotonic() + 5
        while not note.exists() and time.monotonic() < end:
            await asyncio.sleep(0.02)

    with_pool(file, finish, note=str(note))
    assert note.read_text() == "closed"


def test_no_key_reaches_an_environment_and_its_random_numbers_repeat(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 40)

    async def ask(pool: EnvironmentPool) -> list[str | None]:
        remotes = [await pool.begin({}, seed) for seed in (1, 1, 2)]
        return [
            (await r.step(what))[0] for r, what in zip((remotes[0], *remotes), ["keys"] + ["draw"] * 3, strict=True)
        ]

    keys, one, again, other = with_pool(file, ask)
    assert keys is not None and "PATH" in keys.split(",") and "HF_TOKEN" not in keys
    assert one == again != other


def test_a_lost_process_costs_its_environments_and_the_next_ones_have_another(file: Path) -> None:
    async def lose(pool: EnvironmentPool) -> tuple[str | None, float | None]:
        remote = await pool.begin({"answer": "a"}, 0)
        await remote.step("x")
        first = pool._process.pid
        (own,) = psutil.Process(first).children()
        pool._process.kill()
        assert ended(own.pid)
        assert await failure(remote, "x") == "its process died"
        another = await pool.begin({"answer": "b"}, 0)
        assert pool._process.pid != first
        return await another.step("x")

    assert with_pool(file, lose) == ("b 1", 0.25)


def test_environments_end_with_a_killed_driver(file: Path, tmp_path: Path) -> None:
    note, ready = (
        tmp_path / "sleeper",
        f"""
import asyncio
from beam_rl.environments import EnvironmentPool
pool = EnvironmentPool("{file}:Moody", {{"note": "{tmp_path}/sleeper"}}, timeout_s=60)
async def main():
    await (await pool.begin({{}}, 0)).step("hang")
asyncio.run(main())
""",
    )
    driver = subprocess.Popen([sys.executable, "-c", ready])
    try:
        while not (note.exists() and note.read_text()):
            assert driver.poll() is None
            time.sleep(0.02)
        family = [p.pid for p in psutil.Process(driver.pid).children(recursive=True)]
        assert len(family) == 3 and int(note.read_text()) in family
    finally:
        driver.kill()
        driver.wait()
    assert all(map(ended, family))


def test_nothing_is_left_when_the_pool_has_closed(file: Path) -> None:
    async def busy(pool: EnvironmentPool) -> list[psutil.Process]:
        remotes = [await pool.begin({"answer": "a"}, 0) for _ in range(3)]
        await asyncio.gather(*(r.step("x") for r in remotes))
        processes = psutil.Process(pool._process.pid).children() + [psutil.Process(pool._process.pid)]
        assert len(processes) == 4
        pool.close()
        with pytest.raises(RuntimeError, match="the run is ending"):
            await pool.begin({}, 0)
        return processes

    assert all(ended(p.pid) for p in with_pool(file, busy))


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("moody.py:Moody", {"depth": 3}, "TypeError: got an unexpected keyword argument 'depth'"),
        ("moody.py:Mute", {}, "TypeError: Mute has no method step(response)"),
        ("moody.py:Moddy", {}, "AttributeError: module 'own_moody' has no attribute 'Moddy'"),
        ("moody.py:Endless", {}, "TypeError: Endless.stop_strings = ('',): a list of texts, none of them empty"),
        ("missing.py:Moody", {}, "ImportError: no file"),
    ],
)
def test_a_class_that_cannot_serve_is_one_line(file: Path, name: str, options: dict, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        EnvironmentPool(f"{file.parent}/{name}", options)
    assert str(caught.value).startswith(f"environment.name = {file.parent}/{name}: {sentence}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "environment.name=calculator",
            "environment.name = calculator: not second_try; your own is written module:Class",
        ),
        ("environment.options.since=2026-01-01", "environment.options.since = 2026-01-01: numbers, texts, lists"),
        ("environment.max_turns=0", "environment.max_turns"),
    ],
)
def test_an_environment_that_a_recipe_can_not_mean_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load(TURNS, [override])


def test_a_second_try_is_worth_what_the_recipe_says() -> None:
    row = {"prompt": [{"role": "user", "content": "1 +2"}], "answer": "3"}
    right, wrong = "\\boxed{ 3 }", "\\boxed{ 4 }"
    assert SecondTry(row).step(right) == (None, 1.0)
    again = SecondTry(row, second=0.25)
    assert (again.step(wrong), again.step(right)) == (("1 +2", None), (None, 0.25))
    lost = SecondTry(row)
    assert (lost.step(wrong), lost.step(wrong)) == (("1 +2", None), (None, 0.0))


def test_the_documented_calculator_computes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()
    (tmp_path / "calculator.py").write_text(page.split("```python\n")[1].split("```")[0])

    async def compute(pool: EnvironmentPool) -> list[tuple[str | None, float | None]]:
        remote = await pool.begin({"prompt": "?", "answer": "408"}, 0)
        said = ["so <calc>12 * 34</calc>", "<calc>1 / 0</calc>", "<calc>open(1)</calc>", "It is 408."]
        return [await remote.step(response) for response in said]

    with EnvironmentPool(f"{tmp_path}/calculator.py:Calculator", {"most_calls": 3}) as pool:
        found = asyncio.run(compute(pool))
    assert found == [("408", None), ("error: ZeroDivisionError", None), ("error: KeyError", None), (None, None)]


# -- frames -----------------------------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)
WORDS = ["<unk>", "<|start|>", "<|end|>", "user", "assistant", "tool", "hello", "four", "system"]
END = [WORDS.index("<|end|>")]


def chat(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template)


def test_a_frame_is_what_the_template_writes_between_two_turns() -> None:
    frame = find_frame(chat(CHATML), "tool", END)
    said = "<|start|> tool four <|end|> <|start|> assistant".split()
    assert [WORDS[i] for i in frame.around("four")] == said
    assert [WORDS[i] for i in frame.around("four", ended=False)] == ["<|end|>", *said], "as if it had said so itself"
    tiny = tiny_tokenizer()
    frame = find_frame(tiny, "user", [tiny.eos_token_id])
    assert tiny.convert_ids_to_tokens(frame.around("3 +8")) == ["3", "+8", "="]


def test_without_a_template_a_text_follows_as_it_stands() -> None:
    assert [WORDS[i] for i in find_frame(chat(None), "user", END).around("hello four")] == ["hello", "four"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (CHATML.replace("{% for", "{{ raise_exception('roles must alternate') }}{% for"), "roles must alternate"),
        ("{% for m in messages[-1:] %}{{ m['content'] }} <|end|> {% endfor %}", "does not show each message once"),
        (CHATML.replace("<|end|>", ""), "does not end a message of the assistant's with a token that ends a response"),
        (CHATML.replace("} <|end|>", "}. <|end|>").replace("{{ m['role'] }} ", "{{ m['role'] }}"), "encoded otherwise"),
    ],
)
def test_a_template_that_cannot_be_framed_is_refused_in_one_line(template: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        find_frame(chat(template), "user", END)
    assert "\n" not in str(caught.value) and "can't frame an answer of role user" in str(caught.value)


def test_a_special_token_that_an_environment_writes_is_text(tmp_path: Path) -> None:
    tokenizer = chat(CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|secret|>"]})
    special = tokenizer.convert_tokens_to_ids("<|secret|>")
    assert special in tokenizer("hello <|secret|>")["input_ids"]
    assert special not in find_frame(tokenizer, "user", END).around("hello <|secret|>")
