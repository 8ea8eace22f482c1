"""A trainer spread over ranks records what one process does: whole, at the right layer, in the right order."""

from typing import Any

import megatron_tiny as tiny
import numpy as np
import pytest

from beam_rl.megatron.probe import probe
from beam_rl.parity.compare import relative_error
from beam_rl.parity.record import Records, concatenate
from beam_rl.recipe.tree import Parallel

SEQUENCES = [tiny.micro_batch([n], seed=n) for n in (13, 22, 30)]
LAYOUTS = {
    "dp2": Parallel(dp=2),
    "tp2 sp": Parallel(tp=2, sp=True),
    "pp2 uneven": Parallel(pp=2, pp_layers=[4, 3]),
    "pp2 virtual": Parallel(pp=2, vpp=2),
    "cp2": Parallel(cp=2),
    "ep2": Parallel(dp=2, ep=2),
}


def found_by(rank: int, jobs: list[tuple[Parallel, str]]) -> list[dict[int, Records]]:
    """What one rank records in each layout."""
    found = []
    for parallel, master in jobs:
        settings = tiny.settings(parallel=parallel)
        trainer: Any = tiny.Trainer(str(tiny.checkpoint()), settings, rank, parallel.ranks, master)
        found.append(probe(trainer, SEQUENCES))
        trainer.close()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[int, Records]]]:
    jobs = [(parallel, tiny.meeting_point()) for parallel in LAYOUTS.values()]
    return tiny.in_new_processes(found_by, (0, jobs), (1, jobs))


@pytest.fixture(scope="module")
def alone() -> list[Records]:
    found = probe(tiny.trainer(), SEQUENCES)
    return [found[i] for i in range(len(SEQUENCES))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_records_of_all_ranks_together_are_those_of_one_process(
    ranks: list[list[dict[int, Records]]], alone: list[Records], name: str
) -> None:
    at = list(LAYOUTS).index(name)
    whole: list[Records] = [{} for _ in SEQUENCES]
    for rank in ranks:
        for i, records in rank[at].items():
            whole[i] |= records
    found, expected = concatenate(whole), concatenate(alone)
    assert found.keys() == expected.keys()
    errors = {place: relative_error(found[place], expected[place]) for place in expected}
    assert max(errors.values()) < 2e-6, max(errors.items(), key=lambda e: e[1])
    assert len(found[None, "embedding"]) == sum(len(s.tokens) for s in SEQUENCES)
    assert np.isfinite(found[None, "logits"]).all()
