"""Who sits on which GPU: the trainer's ranks and the engines of a run, over the nodes of a cluster.

Pure: knows nothing about Ray. A machine without GPUs has CPU slots in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from beam_rl.errors import InputError

Placement = Literal["colocated", "disaggregated"]


@dataclass(frozen=True)
class Shelf:
    """GPUs of one node that are reserved together, and who is on them.

    Rank `ranks[i]` has the shelf's i-th GPU; an engine has all of them. So where both are, they share.
    """

    node: int
    gpus: int
    ranks: tuple[int, ...] = ()
    engine: int | None = None


def for_pace(pace: str) -> Placement:
    """What goes with a pace: turns on the same GPUs where one waits for the other anyway."""
    return "colocated" if pace == "synchronous" else "disaggregated"


def place(
    placement: Placement, ranks: int, engines: int, workers: int, nodes: Sequence[int], unit: str = "GPU"
) -> list[Shelf]:
    """The run's shelves; consecutive ranks are as near to each other as can be.

    Args:
        workers: GPUs of each engine, which have to be on one node.
        nodes: GPUs of each node. unit: what to call them.
    Raises:
        InputError: it does not fit.
    """
    wanted = _colocated(ranks, engines, workers) if placement == "colocated" else _apart(ranks, engines, workers)
    largest_first = sorted(range(len(nodes)), key=lambda node: -nodes[node])
    for order in (largest_first, largest_first[::-1]):
        homes = _first_fit([shelf.gpus for shelf in wanted], nodes, order)
        if homes is not None:
            return [Shelf(home, s.gpus, s.ranks, s.engine) for home, s in zip(homes, wanted, strict=True)]
    total = sum(shelf.gpus for shelf in wanted)
    sharing = "share them" if placement == "colocated" else "have their own"
    on_one_node = f", the {workers} of an engine on one node" if workers > 1 else ""
    raise InputError(
        f"cluster.placement = {placement}: the {ranks} ranks of trainer.parallel and rollout.engines = {engines} of "
        f"{workers} (rollout.parallel) {sharing} and need {total} {unit}s{on_one_node}; Ray has "
        f"{' + '.join(map(str, nodes)) or 0}"
    )


def _colocated(ranks: int, engines: int, workers: int) -> list[Shelf]:
    shelves = []
    for i in range(max(engines, -(-ranks // workers))):
        seated = tuple(range(i * workers, min(ranks, (i + 1) * workers)))
        engine = i if i < engines else None
        shelves.append(Shelf(0, len(seated) if engine is None else workers, seated, engine))
    return shelves


def _apart(ranks: int, engines: int, workers: int) -> list[Shelf]:
    return [*(Shelf(0, 1, (rank,)) for rank in range(ranks)), *(Shelf(0, workers, (), i) for i in range(engines))]


def _first_fit(sizes: Sequence[int], nodes: Sequence[int], order: Sequence[int]) -> list[int] | None:
    """For each size the first node of `order` that has room for it; None if one finds none."""
    room = list(nodes)
    homes = []
    for size in sizes:
        home = next((node for node in order if room[node] >= size), None)
        if home is None:
            return None
        room[home] -= size
        homes.append(home)
    return homes
