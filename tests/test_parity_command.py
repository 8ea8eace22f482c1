"""`beam-rl parity` as a user runs it."""

import json

from test_cli import TINY, beam_rl, refused


def test_wrong_input_ends_with_2() -> None:
    assert "did you mean parity.sublayer_bound?" in refused("parity", TINY, "parity.sublayer_bond=1")
    assert "parity.prompts = 0" in refused("parity", TINY, "parity.prompts=0")


def test_three_sides_agree_to_fp32_rounding_and_a_bound_below_that_ends_with_1(ray_here, tiny_folder) -> None:
    done = beam_rl(
        "parity", TINY, "--json", "parity.prompts=3", "parity.sublayer_bound=1e-9", f"cluster.address={ray_here}"
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"pairs", "route_agreement", "first_departure", "unseen", "within_bounds"}
    assert set(found["pairs"]) == {"trainer_reference", "trainer_engine", "engine_reference"}
    assert all(gap["mean"] < 1e-6 and gap["max"] < 1e-5 for gap in found["pairs"].values())
    first = found["first_departure"]
    assert set(first) == {"pair", "layer", "sublayer", "error"} and 1e-9 < first["error"] < 1e-5
    assert found["route_agreement"] == 1.0 and found["within_bounds"] is False
    assert found["unseen"] == {}
