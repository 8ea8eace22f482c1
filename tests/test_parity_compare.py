"""Judging two sides' records: what counts as a departure, what is explained, and how it reads."""

import io
import json
import math

import numpy as np
import pytest
import rich.console
import torch

from beam_rl.parity import table
from beam_rl.parity.compare import EXACT_BOUND, GAIN, Comparison, Departure, Side, compare, relative_error
from beam_rl.parity.record import AFTER, BEFORE, EXACT_DIMS, LAYER, PROJECTED_DIMS, Place, Recorder, Records

TOKENS, EXPERTS, TOP_K = 50, 16, 4
NAMES: list[Place] = (
    [(None, n) for n in BEFORE] + [(i, n) for i in range(3) for n in LAYER] + [(None, n) for n in AFTER]
)
BOUND = 1e-2


def records(seed: int = 0) -> Records:
    rng = np.random.default_rng(seed)
    found: Records = {place: rng.normal(size=(TOKENS, EXPERTS)).astype(np.float32) for place in NAMES}
    for layer in range(3):
        dense = np.zeros((TOKENS, EXPERTS), np.float32)
        dense[:, :TOP_K] = 1 / TOP_K
        found[layer, "experts"] = dense
        found[layer, "margin"] = np.full((TOKENS, 1), 0.1, np.float32)
    return found


def changed(base: Records, errors: dict[Place, float]) -> Records:
    """The same values, each named place scaled so that its relative error is as given."""
    return base | {place: base[place] * np.float32(1 + error) for place, error in errors.items()}


def judge(base: Records, other: Records, replayed: bool = True, logp_shift: float = 0.0) -> Comparison:
    logp = np.full(TOKENS, -1.0, np.float32)
    sides = {"reference": Side(base, logp), "trainer": Side(other, logp + np.float32(logp_shift))}
    return compare(sides, replayed=replayed, sublayer_bound=BOUND, logprob_mean_bound=1e-3)


def named(found: Comparison) -> tuple[int | None, str] | None:
    first = found.first_departure
    return None if first is None else (first.layer, first.sublayer)


def test_equal_records_agree() -> None:
    found = judge(records(), records())
    assert found.within_bounds and found.first_departure is None and found.route_agreement == 1
    assert list(found.errors["trainer_reference"]) == NAMES


def test_the_first_departing_sublayer_is_named_and_not_what_follows_from_it() -> None:
    later = {(1, "attention"): 0.5, (1, "attention_out"): 0.7, (2, "q"): 0.9, (None, "logits"): 0.9}
    assert named(judge(records(), changed(records(), later))) == (1, "attention")


def test_an_error_that_the_inputs_explain_is_not_named() -> None:
    small = {(1, "input_norm"): EXACT_BOUND * 0.9, (1, "q"): BOUND + GAIN * EXACT_BOUND * 0.8}
    assert named(judge(records(), changed(records(), small))) is None
    large = small | {(1, "q"): BOUND + GAIN * EXACT_BOUND}
    assert named(judge(records(), changed(records(), large))) == (1, "q")


def test_what_is_rounded_once_has_a_bound_of_its_own() -> None:
    assert named(judge(records(), changed(records(), {(0, "q"): BOUND * 0.9}))) is None
    wrong = {(0, "residual_attention"): 2 * EXACT_BOUND}
    assert named(judge(records(), changed(records(), wrong))) == (0, "residual_attention")


def test_logprobs_above_their_bound_are_named_where_no_sublayer_is() -> None:
    found = judge(records(), records(), logp_shift=0.01)
    assert found.first_departure == Departure(
        "trainer_reference", None, "log_probabilities", pytest.approx(0.01, rel=1e-5)
    )
    assert not found.within_bounds


def test_logprobs_above_their_bound_are_named_where_no_sublayer_is_known() -> None:
    found = judge({}, {}, logp_shift=0.01)
    assert named(found) == (None, "log_probabilities") and found.unseen == {} and found.alone is None


def test_nan_is_a_departure_and_null_in_json() -> None:
    broken = records()
    broken[1, "mlp"] = broken[1, "mlp"] * np.float32(np.nan)
    found = judge(records(), broken)
    assert named(found) == (1, "mlp")
    text = json.dumps(found.record(), allow_nan=False)
    assert json.loads(text)["first_departure"]["error"] is None
    assert not judge(records(), records(), logp_shift=math.nan).within_bounds


def with_other_choice(base: Records, layer: int, tokens: int) -> Records:
    dense = base[layer, "experts"].copy()
    dense[:tokens, TOP_K], dense[:tokens, 0] = dense[:tokens, 0], 0
    return base | {(layer, "experts"): dense}


def test_another_choice_of_experts_is_a_departure_unless_it_was_a_tie() -> None:
    base = records()
    assert named(judge(base, with_other_choice(base, 1, tokens=5))) == (1, "experts")
    margin = base[1, "margin"].copy()
    margin[:5] = 0
    found = judge(base | {(1, "margin"): margin}, with_other_choice(base, 1, tokens=5))
    assert found.within_bounds and found.route_agreement == pytest.approx(1 - 5 / (3 * TOKENS))


def test_without_replay_a_tie_explains_the_experts_outputs() -> None:
    margin = np.zeros((TOKENS, 1), np.float32)
    base = records() | {(1, "margin"): margin}
    other = changed(with_other_choice(base, 1, tokens=25), {(1, "mlp"): 0.5})
    assert named(judge(base, other, replayed=True)) == (1, "mlp")
    assert named(judge(base, other, replayed=False)) is None


def test_of_several_pairs_the_earliest_departure_counts_and_the_odd_one_is_named() -> None:
    base, logp = records(), np.full(TOKENS, -1.0, np.float32)
    faulty = changed(base, {(1, "k"): 0.5})
    sides = {"reference": Side(base, logp), "engine": Side(base, logp), "trainer": Side(faulty, logp)}
    found = compare(sides, replayed=True, sublayer_bound=BOUND, logprob_mean_bound=1e-3)
    first = found.first_departure
    assert first is not None and first.pair == "trainer_reference"
    assert table.verdict(found) == (
        "trainer – reference departs first at layer 1, k: error 5.00e-01; trainer differs there from both others"
    )


def test_the_tables_fit_100_columns_and_mark_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    base, logp = records(), np.full(TOKENS, -1.0, np.float32)
    faulty = changed(base, {(1, "post_attention_norm"): 0.5, (1, "mlp"): 0.9})
    sides = {"reference": Side(base, logp), "engine": Side(faulty, logp), "trainer": Side(faulty, logp)}
    found = compare(sides, replayed=True, sublayer_bound=BOUND, logprob_mean_bound=1e-3)
    out = io.StringIO()
    table.show(found, rich.console.Console(file=out, width=100, highlight=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    row = next(line for line in lines if line.startswith("1 "))
    assert row.count("5.0e-01 post_attention_norm *") == 2
    assert any(line.startswith("post_attention_norm") and "5.0e-01 *" in line for line in lines)


def test_projection_keeps_relative_errors() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(40, 5 * EXACT_DIMS, generator=generator)
    other = base + 1e-3 * torch.randn(base.shape, generator=generator)
    sides = []
    for value in (base, other):
        recorder = Recorder()
        recorder.add(0, "mlp", value)
        sides.append(recorder.records()[0, "mlp"])
    assert sides[0].shape == (40, PROJECTED_DIMS)
    assert relative_error(sides[1], sides[0]) == pytest.approx(1e-3, rel=0.1)
