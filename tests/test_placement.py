"""Who sits on which GPU, and what trainer and engines do about it where they share."""

import pytest

from beam_rl.errors import InputError
from beam_rl.placement import Shelf, place


def seats(shelves: list[Shelf]) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
    """(node, shelf) of every rank and every engine."""
    ranks = {rank: (shelf.node, i) for i, shelf in enumerate(shelves) for rank in shelf.ranks}
    engines = {shelf.engine: (shelf.node, i) for i, shelf in enumerate(shelves) if shelf.engine is not None}
    return ranks, engines


@pytest.mark.parametrize(
    ("ranks", "engines", "workers", "nodes"),
    [(1, 1, 1, [2]), (4, 2, 2, [8]), (8, 1, 8, [8, 8]), (2, 1, 8, [4, 8]), (6, 1, 2, [4, 4]), (3, 5, 1, [4, 4])],
)
def test_disaggregated_nobody_shares(ranks: int, engines: int, workers: int, nodes: list[int]) -> None:
    shelves = place("disaggregated", ranks, engines, workers, nodes)
    where, engine_at = seats(shelves)
    assert sorted(where) == list(range(ranks)) and sorted(engine_at) == list(range(engines))
    assert not any(shelf.ranks and shelf.engine is not None for shelf in shelves)
    assert sum(shelf.gpus for shelf in shelves) == ranks + engines * workers
    for node, gpus in enumerate(nodes):
        assert sum(shelf.gpus for shelf in shelves if shelf.node == node) <= gpus


@pytest.mark.parametrize(
    ("ranks", "engines", "workers", "nodes", "gpus"),
    [(1, 1, 1, [1], 1), (4, 2, 2, [4], 4), (16, 2, 8, [8, 8], 16), (3, 2, 2, [4], 4), (8, 1, 2, [8], 8)],
)
def test_colocated_an_engine_has_the_gpus_of_its_ranks(
    ranks: int, engines: int, workers: int, nodes: list[int], gpus: int
) -> None:
    shelves = place("colocated", ranks, engines, workers, nodes)
    where, engine_at = seats(shelves)
    assert sorted(where) == list(range(ranks)) and sorted(engine_at) == list(range(engines))
    assert sum(shelf.gpus for shelf in shelves) == gpus
    for rank, (_, shelf) in where.items():
        assert shelf == rank // workers and len(shelves[shelf].ranks) <= shelves[shelf].gpus


def test_consecutive_ranks_are_on_one_node_and_an_engine_never_on_two() -> None:
    where, engine_at = seats(place("disaggregated", 8, 1, 4, [4, 8]))
    assert {node for node, _ in where.values()} == {1} and engine_at[0][0] == 0
    shelves = place("colocated", 12, 3, 4, [6, 6, 8])  # 6 = one engine of 4, and 2 that nobody can use
    assert sorted(shelf.node for shelf in shelves) in ([0, 2, 2], [1, 2, 2])


@pytest.mark.parametrize(
    ("placement", "ranks", "engines", "workers", "nodes", "message"),
    [
        (
            "disaggregated",
            1,
            1,
            1,
            [1],
            r"cluster.placement = disaggregated: .* have their own and need 2 GPUs; Ray has 1$",
        ),
        ("colocated", 8, 1, 8, [4, 4], r"share them and need 8 GPUs, the 8 of an engine on one node; Ray has 4 \+ 4$"),
        (
            "colocated",
            1,
            2,
            1,
            [1],
            r"trainer.parallel and rollout.engines = 2 of 1 \(rollout.parallel\) .* need 2 GPUs",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    placement: str, ranks: int, engines: int, workers: int, nodes: list[int], message: str
) -> None:
    with pytest.raises(InputError, match=message) as refused:
        place(placement, ranks, engines, workers, nodes)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
