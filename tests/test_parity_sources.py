"""What the gap of trainer and engine is made of, with the head in FP32 on both sides."""

from pathlib import Path

import pytest
from test_cli import TINY, refused

from beam_rl.inputs import prepare
from beam_rl.parity.sources import AS_IS, Gap, gaps_of
from beam_rl.recipe.load import load
from beam_rl.step import Quiet


@pytest.fixture(scope="module")
def gaps(ray_here: str, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Gap]:
    overrides = ["trainer.precision=bf16", "trainer.numerics=fp32_head", "parity.prompts=64"]
    recipe = load(TINY, [*overrides, f"model.path={tiny_folder}", f"cluster.address={ray_here}"])
    found = gaps_of(recipe, prepare(recipe, Quiet()), AS_IS, tmp_path_factory.mktemp("sources"), Quiet())
    return {gap.source: gap for gap in found}


def test_a_head_in_fp32_on_both_sides_is_worth_half_of_one_in_the_trainer_alone(gaps: dict[str, Gap]) -> None:
    """1.3e-3 of 3.3e-3, which it would be if engines went on rounding; with rounding on both sides it is 1.8e-3."""
    assert 0 < gaps[AS_IS].mean < 1.6e-3
    assert gaps[AS_IS].tokens > 500


def test_replay_is_worth_something_and_the_engine_hardly_hangs_on_its_batch(gaps: dict[str, Gap]) -> None:
    assert gaps["without replay of the routes"].mean > 1.05 * gaps[AS_IS].mean
    assert gaps["without replay of the routes"].tokens == gaps[AS_IS].tokens
    itself = [gap.mean for gap in gaps.values() if gap.between == "engine – itself"]
    assert len(itself) == 2 and max(itself) < 1e-5


def test_other_choices_need_the_table_that_they_go_into() -> None:
    assert "--other: goes with --sources" in refused("parity", TINY, "--other", "seed=1")
