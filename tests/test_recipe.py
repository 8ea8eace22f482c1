"""A recipe's mistakes: each is one line that names the key, the value and what would do."""

import ast
from pathlib import Path

import pytest
import recipe_keys

from beam_rl.recipe.load import RecipeError, dump, leaf_keys, load, parse

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
RECIPES = sorted(TINY.parent.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_recipe_we_ship_is_valid(path):
    assert load(path).name == path.stem


def test_the_resolved_recipe_reads_back_to_itself(tmp_path):
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump(load(TINY, ["trainer.steps=7"])))
    assert load(resolved) == load(TINY, ["trainer.steps=7"])


def test_overrides_change_nested_keys_in_order():
    recipe = load(TINY, ["trainer.optimizer.lr=0.5", "trainer.optimizer.lr=0.25", "algorithm.kl.coefficient=0.1"])
    assert recipe.trainer.optimizer.lr == 0.25
    assert recipe.algorithm.kl.coefficient == 0.1


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rollout.temprature=1", ["unknown key rollout.temprature", "rollout.temperature"]),
        ("lr=3", ["unknown key lr", "trainer.optimizer.lr"]),
        ("trainer.optimzer.lr=3", ["unknown key trainer.optimzer", "trainer.optimizer"]),
        ("trainer.steps=abc", ["trainer.steps = 'abc'", "integer"]),
        ("trainer.steps=true", ["trainer.steps = True", "integer"]),
        ("rollout.routing_replay=1", ["rollout.routing_replay = 1", "boolean"]),
        ("rollout.temperature=0.001", ["rollout.temperature = 0.001", "0.01 or more"]),
        ("rollout.engines=99", ["rollout.engines = 99", "prompts_per_step = 32"]),
        ("trainer.steps=1.5", ["trainer.steps = 1.5", "integer"]),
        ("trainer.optimizer.lr=-1", ["trainer.optimizer.lr = -1", "greater than 0"]),
        ("trainer.optimizer.lr=.nan", ["trainer.optimizer.lr = nan", "finite"]),
        ("algorithm.loss=ppo", ["algorithm.loss = 'ppo'", "'clip', 'gspo' or 'cispo'"]),
        ("trainer=3", ["trainer = 3"]),
        ("name=a/b", ["name = 'a/b'"]),
        ("trainer.steps.more=3", ["trainer.steps is a value, not a section"]),
        ("trainer.steps", ["'trainer.steps'", "key=value"]),
        ("rollout.samples_per_prompt=1", ["rollout.samples_per_prompt = 1", "at least 2"]),
        ("rollout.temperature=0", ["rollout.temperature = 0", "0.01 or more"]),
        ("rollout.top_p=0.9", ["rollout.top_p = 0.9", "use 1.0"]),
        ("trainer.mini_batches=5", ["trainer.mini_batches = 5", "rollout.prompts_per_step = 32"]),
        ("trainer.token_budget=20", ["trainer.token_budget = 20", "at least 32"]),
        ("algorithm.overlong.buffer_tokens=16", ["algorithm.overlong.buffer_tokens = 16", "max_response_tokens = 16"]),
        ("algorithm.loss=gspo", ["algorithm.aggregation = token_mean", "sample_mean"]),
        ("rollout.max_batched_tokens=100", ["rollout.max_batched_tokens = 100", "rollout.max_num_seqs = 256"]),
        ("checkpoint.every=7", ["checkpoint.every = 7", "eval.every = 10"]),
        (
            "trainer.mxfp8.keep_last_layers=1",
            ["trainer.mxfp8.keep_last_layers = 1", "trainer.precision or rollout.precision = mxfp8"],
        ),
        ("eval.temperature=0", ["eval.samples_per_prompt = 8", "eval.temperature = 0"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_and_what_would_do(override, parts):
    with pytest.raises(RecipeError) as caught:
        load(TINY, [override])
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_a_missing_key_says_what_it_is_for():
    with pytest.raises(RecipeError, match=r"model\.path is missing: HF folder"):
        parse({"name": "x", "model": {}, "data": {"train": {"path": "x"}}})


def test_no_such_recipe_names_the_nearest(tmp_path):
    with pytest.raises(RecipeError, match=r"no such recipe.*did you mean .*tiny_cpu\.yaml"):
        load(TINY.with_name("tiny_cup.yaml"))
    with pytest.raises(RecipeError, match="no such recipe"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize(("text", "part"), [("a: [", "not valid YAML"), ("- 1", "mapping of keys"), ("", "mapping")])
def test_a_file_that_is_no_recipe(tmp_path, text, part):
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=part):
        load(file)


def test_every_key_is_read_by_something():
    """A key that no code outside the recipe's own package reads would be accepted and ignored."""
    package = TINY.parents[1] / "beam_rl"
    sources = [file for file in package.rglob("*.py") if file.parent.name != "recipe"]
    read = {name for file in sources for node in ast.walk(ast.parse(file.read_text())) for name in _reads(node)}
    unread = [key for key in leaf_keys() if key.rsplit(".", 1)[-1] not in read]
    assert unread == []


def _reads(node: ast.AST) -> list[str]:
    """Names that a node reads: `section.key`, or `section["key"]` of a recipe as plain data."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return [node.attr]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return [node.slice.value]
    return []


def test_ranks_wait_longer_for_each_other_than_the_first_one_for_an_engine() -> None:
    load(TINY, ["trainer.collective_timeout_s=300"])
    with pytest.raises(RecipeError, match=r"collective_timeout_s = 300: .*sync\.deadline_s = 300 s .* at least 360"):
        load(TINY, ["trainer.parallel.dp=2", "trainer.collective_timeout_s=300"])


def test_the_page_of_keys_is_the_code_s() -> None:
    """Else run `python -m tests.recipe_keys --write`."""
    assert recipe_keys.PAGE.read_text() == recipe_keys.page()
