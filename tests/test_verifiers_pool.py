"""The pool that grades in killable processes, and the toy task's verifier."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from beam_rl.errors import InputError
from beam_rl.recipe.load import load
from beam_rl.recipe.tree import Verifier
from beam_rl.verifiers import ToyVerifier, VerifierPool, VerifyItem, check_verifier, make_verifier
from beam_rl.verifiers.toy import toy_score

LIMIT_S = 3.0
TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(workers=1, timeout_s=LIMIT_S) as pool:
        pool.score([item("5")])  # started
        yield pool


def item(answer: str, gold: str = "5", finish_reason: str = "stop") -> VerifyItem:
    return VerifyItem(rf"so \boxed{{{answer}}}", gold, finish_reason)


def test_one_verdict_per_item_in_order(pool: VerifierPool) -> None:
    items = [
        item("5"),
        item("6"),
        VerifyItem("no answer", "5", "length"),
        item("5.0"),
        item("5\ud800"),
        item(""),
    ]
    verdicts = pool.score(items * 3)
    assert [verdict.score for verdict in verdicts] == [1, 0, 0, 1, 0, 0] * 3
    assert not any(verdict.timed_out for verdict in verdicts)
    assert pool.score([]) == []


def test_towers_and_factorials_end_in_time_as_wrong_and_the_rest_is_graded(
    pool: VerifierPool,
) -> None:
    items = [
        item("9^{9^{9^{9}}}"),
        item("5"),
        item("1000000!"),
        item("x^2", gold="x \\cdot x"),
    ]
    started = time.monotonic()
    verdicts = pool.score(items)
    assert [verdict.score for verdict in verdicts] == [0, 1, 0, 1]
    assert verdicts[0].timed_out
    assert time.monotonic() - started < 30  # two limits and the starts of new workers, on a busy machine


def test_a_memory_bomb_hits_the_workers_limit_and_not_the_machine() -> None:
    with VerifierPool(workers=1, timeout_s=30.0, memory_bytes=700 * 2**20) as small:
        bomb = small.score([item("10^{10^{10}}!")])[0]
        assert (bomb.score, bomb.timed_out) == (0, False) and bomb.error
        assert small.score([item("5.0")])[0].score == 1


def test_a_worker_that_died_while_idle_is_replaced(pool: VerifierPool) -> None:
    children = psutil.Process().children()
    workers = [p for p in children if "beam_rl.verifiers.worker" in p.cmdline()]
    assert len(workers) == 1
    workers[0].kill()
    workers[0].wait(10)
    assert [verdict.score for verdict in pool.score([item("5.0")])] == [1]


def test_works_off_the_main_thread_without_touching_its_alarm(
    pool: VerifierPool,
) -> None:
    handler = signal.getsignal(signal.SIGALRM)
    results: dict[int, list[float]] = {}

    def grade(which: int) -> None:
        results[which] = [
            v.score for v in pool.score([item("5.0"), item("9^{9^{9^{9}}}") if which == 0 else item("6.0")])
        ]

    threads = [threading.Thread(target=grade, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {0: [1, 0], 1: [1, 0]}
    assert signal.getsignal(signal.SIGALRM) is handler


def test_workers_import_no_tensor_library(pool: VerifierPool) -> None:
    code = "import sys, beam_rl.verifiers.math, beam_rl.verifiers.worker; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.split()
    assert "sympy" in modules and not {
        "torch",
        "transformers",
        "ray",
        "vllm",
        "datasets",
    } & set(modules)


HOLD = """
import psutil, threading
from beam_rl.verifiers import VerifierPool, VerifyItem
pool = VerifierPool(workers=2, timeout_s=3.0)
pool.score([VerifyItem("\\\\boxed{5.0}", "5", "stop")])
print(*(p.pid for p in psutil.Process().children()), flush=True)
pool.score([VerifyItem("\\\\boxed{9^{9^{9^{9}}}}", "5", "stop")])
"""


def test_workers_die_with_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    time.sleep(0.5)  # one of them is now deep in the tower
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=30)
    assert not alive


def test_close_leaves_no_process() -> None:
    pool = VerifierPool(workers=2)
    workers = [p for p in psutil.Process().children() if "beam_rl.verifiers.worker" in p.cmdline()]
    assert len(workers) >= 2
    pids = {worker.process.pid for worker in pool._workers}
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_the_recipe_names_the_verifier() -> None:
    with make_verifier(Verifier(name="toy")) as toy:
        assert isinstance(toy, ToyVerifier)
    with make_verifier(Verifier(name="math", workers=1, timeout_s=LIMIT_S)) as pool:
        assert isinstance(pool, VerifierPool) and pool.score([item("4", gold="2+2")])[0].score == 1


@pytest.mark.parametrize(
    ("response", "finish_reason", "score"),
    [
        (r"3 1 6 5 3 7 \boxed{ 7 }", "stop", 1.0),
        (r"\boxed{ 7 }", "stop", 1.0),  # a direct answer has the task's form too
        (r"3 1 6 5 3 7 \boxed{ 7 }", "length", 0.0),
        (r"3 1 6 5 3 7 \boxed{ 8 }", "stop", 0.0),
        (r"3 1 6 5 3 7 \boxed{ 7 } 7", "stop", 0.0),
        (r"3 1 \boxed{ 8 } \boxed{ 7 }", "stop", 0.0),
        (r"3 1 \boxed{ 7 } \boxed{ 7 }", "stop", 0.0),
        (r"3 +1 \boxed{ 7 }", "stop", 0.0),
        (r"3 1 \boxed{ 7", "stop", 0.0),
        (r"3 1 \boxed{ 7 7 }", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_toy_reward_is_for_totals_one_box_and_a_stop(response: str, finish_reason: str, score: float) -> None:
    assert toy_score(response, "7", finish_reason) == score
    assert [v.score for v in ToyVerifier().score([VerifyItem(response, "7", finish_reason)] * 2)] == [score] * 2


def workers_of(pool: VerifierPool) -> list[psutil.Process]:
    return [psutil.Process(worker.process.pid) for worker in pool._workers]


@pytest.mark.parametrize(("how", "delay_s"), [("killed", 0.0), ("killed", 0.3), ("stopped", 0.3)])
def test_a_worker_lost_from_outside_costs_no_verdict(how: str, delay_s: float) -> None:
    """Every worker of the pool, at its start or at work: each item has its one right verdict."""
    with VerifierPool(workers=2, timeout_s=1.5) as pool:
        if delay_s:
            pool.score([item("5.0")])
        doomed = workers_of(pool)

        def strike() -> None:
            time.sleep(delay_s)
            for process in doomed:
                process.kill() if how == "killed" else process.suspend()

        thread = threading.Thread(target=strike)
        thread.start()
        answers = [str(n) for n in range(4, 7)] * 40 + [rf"\frac{{{n}}}{{7}}" for n in range(60)]
        verdicts = pool.score([item(answer) for answer in answers])
        thread.join()
        assert [v.score for v in verdicts] == [float(answer in ("5", r"\frac{35}{7}")) for answer in answers]
        assert not any(v.error or v.timed_out for v in verdicts)
        assert [v.score for v in pool.score([item("5.0"), item("6")])] == [1, 0]


def test_a_worker_stopped_at_its_start_is_replaced() -> None:
    with VerifierPool(workers=1) as pool:
        (process,) = workers_of(pool)
        process.suspend()
        pool._workers[0].deadline = time.monotonic()  # START_LIMIT_S have passed
        assert [v.score for v in pool.score([item("5.0"), item("6")])] == [1, 0]
        assert not process.is_running()


def test_workers_that_never_start_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        VerifierPool(workers=1) as pool,
        pytest.raises(RuntimeError, match="3 grading processes in a row did not start"),
    ):
        pool.score([item("5.0")])


def test_an_answer_that_kills_its_worker_is_wrong_and_counted() -> None:
    """Whatever the item does, it is tried twice and no more."""
    with VerifierPool(workers=1, timeout_s=20.0) as pool:
        pool.score([item("5.0")])
        ended = threading.Event()

        def strike() -> None:
            while not ended.wait(0.01):
                for worker in pool._workers:
                    if worker.item is not None:
                        worker.process.kill()

        thread = threading.Thread(target=strike)
        thread.start()
        verdict = pool.score([item("9^{9^{9^{9}}}")])[0]
        ended.set()
        thread.join()
        assert verdict.score == 0 and verdict.error == "the grading process died (-9)"


def test_an_interrupted_scoring_leaves_no_verdict_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with VerifierPool(workers=1, timeout_s=LIMIT_S) as pool:
        pool.score([item("5.0")])
        collect = pool._collect

        def interrupted(*_: object) -> list:
            raise KeyboardInterrupt

        monkeypatch.setattr(pool, "_collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.score([item("5.0")])
        monkeypatch.setattr(pool, "_collect", collect)
        assert [v.score for v in pool.score([item("6.0"), item("7")])] == [0, 0]


def test_workers_have_no_keys_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    with VerifierPool(workers=1) as pool:
        (process,) = workers_of(pool)
        assert "HF_TOKEN" not in process.environ() and "PATH" in process.environ()


OWN = """
from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Unit:
    name: str

def graded(response, gold, finish_reason):
    print("said by the user's code")
    if response == "raise":
        raise ValueError("no such unit")
    if response == "nan":
        return math.nan
    while response == "hang":
        pass
    return len(response) / 100 + (gold == "5") / 4 + (finish_reason == "stop") / 2
"""


@pytest.fixture(scope="module")
def own_reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("own") / "reward.py"
    file.write_text(OWN)
    return f"{file}:graded"


def test_own_function_gives_the_score_and_its_faults_cost_one_item(own_reward: str) -> None:
    with make_verifier(Verifier(name=own_reward, workers=1, timeout_s=LIMIT_S)) as pool:
        said = ["seven", "raise", "nan", "hang", "abc"]
        verdicts = pool.score([VerifyItem(response, "5", "length") for response in said])
        assert [verdict.score for verdict in verdicts] == pytest.approx([0.3, 0, 0, 0, 0.28])
        assert [verdict.error for verdict in verdicts][1:3] == [
            "ValueError: no such unit",
            "ValueError: a score of nan, which is not between 0 and 1",
        ]
        assert [verdict.timed_out for verdict in verdicts] == [False, False, False, True, False]


def test_module_in_the_working_directory_is_found(own_reward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(own_reward.rpartition(":")[0]).parent)
    with VerifierPool(workers=1, function="reward:graded") as pool:
        assert pool.score([VerifyItem("", "5", "stop")])[0].score == 0.75


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("nowhere.py:score", r"verifier\.name = nowhere\.py:score: ImportError: no file nowhere\.py"),
        ("no_such_module:score", r"ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:score", r"AttributeError: module 'json' has no attribute 'score'"),
        ("os:getcwd", r"TypeError: too many positional arguments"),
    ],
)
def test_function_that_is_not_there_is_refused_before_anything_starts(name: str, refusal: str) -> None:
    with pytest.raises(InputError, match=refusal):
        check_verifier(Verifier(name=name))


@pytest.mark.parametrize("name", ["maths", "reward.py", ":score", "reward:"])
def test_a_name_that_is_no_path_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"verifier.name = {name}: neither math nor toy"):
        load(TINY, [f"verifier.name={name!r}"])
