"""A run's place in Ray: one placement group, reserved before anything starts, and a seat in it for every actor.

An actor that is started anew gets the same seat, or, when its node is lost, any that Ray has. Where trainer and engine
share GPUs, Ray counts them for the ranks alone: it hands a fraction of one GPU to an actor, never fractions of several. The
engine is put beside them and told its devices.
Knows nothing about what the actors do.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from beam_rl.errors import InputError
from beam_rl.placement import Shelf, for_pace, place
from beam_rl.recipe.tree import Recipe

LOOPBACK = "127.0.0.1"
NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Seat:
    """Where an actor runs."""

    options: dict[str, Any] = field(default_factory=dict)  # of `ray.remote`
    host: str = LOOPBACK  # its node's address for the others
    devices: str | None = None  # CUDA_VISIBLE_DEVICES; None: those that Ray hands to it
    node: str | None = None  # its id; None: Ray chooses
    gpus: int = 0  # that it has, counted by Ray for it or not

    @property
    def lost(self) -> bool:
        """Whether its node has gone."""
        return self.node is not None and self.node not in {node["NodeID"] for node in _alive()}

    def elsewhere(self) -> "Seat":
        """As much of any node that has it, now or later; its address is known when the actor is there."""
        return Seat({"num_cpus": self.options["num_cpus"], "num_gpus": self.gpus}, host="", gpus=self.gpus)


@dataclass(frozen=True)
class Seats:
    ranks: tuple[Seat, ...]
    engines: tuple[Seat, ...]
    shared_gpus: bool = False  # the trainer and the engines have to take turns

    def meeting_point(self) -> str:
        """ "host:port" where the trainer's ranks can meet: on the first one's node."""
        import ray

        first = self.ranks[0]
        if first.host == LOOPBACK:
            return f"{LOOPBACK}:{free_port(LOOPBACK)}"
        there = ray.remote(free_port).options(**first.options | {"num_cpus": 0, "num_gpus": 0})
        return f"{first.host}:{ray.get(there.remote(first.host))}"


def unreserved(recipe: Recipe) -> Seats:
    """Every actor asks Ray on its own, and all are on this machine; for a trainer or engines alone."""
    gpu = int(any(gpus_of(node) for node in _alive()))
    rank, engine = ({"num_cpus": 1, "num_gpus": gpu * n} for n in (1, recipe.rollout.parallel.workers))
    ranks, engines = recipe.trainer.parallel.ranks, recipe.rollout.engines
    return Seats((Seat(rank),) * ranks, (Seat(engine),) * engines)


@contextlib.contextmanager
def reserved(recipe: Recipe) -> Iterator[Seats]:
    """The run's seats in the Ray that this process is connected to. InputError if they are more than it has."""
    from ray.util import remove_placement_group
    from ray.util.placement_group import placement_group

    nodes = _alive()
    unit = "GPU" if any(gpus_of(node) for node in nodes) else "CPU"
    sizes = [int(node["Resources"].get(unit, 0)) for node in nodes]
    ranks, engines, workers = recipe.trainer.parallel.ranks, recipe.rollout.engines, recipe.rollout.parallel.workers
    name = "GPU" if unit == "GPU" else "CPU slot"
    placement = recipe.cluster.placement or for_pace(recipe.rollout.pace)
    shelves = place(placement, ranks, engines, workers, sizes, name)
    group = placement_group(
        [_bundle(shelf, unit) for shelf in shelves],
        bundle_label_selector=[{NODE_LABEL: nodes[shelf.node]["NodeID"]} for shelf in shelves],
    )
    try:
        _wait(group, recipe.cluster.start_timeout_s)
        yield _seats(group, shelves, unit, nodes)
    finally:
        remove_placement_group(group)


def _alive() -> list[dict[str, Any]]:
    import ray

    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])


def gpus_of(node: dict[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def _bundle(shelf: Shelf, unit: str) -> dict[str, float]:
    """What a shelf takes of its node; on GPU nodes each actor has a CPU slot too."""
    if unit == "CPU":
        return {"CPU": shelf.gpus}
    return {"GPU": shelf.gpus, "CPU": len(shelf.ranks) + (shelf.engine is not None)}


def _wait(group: Any, timeout_s: float) -> None:
    import ray

    try:
        ray.get(group.ready(), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise InputError(
            f"cluster.start_timeout_s = {timeout_s:g}: Ray has what the run needs, but others had it until then"
        ) from None


def _seats(group: Any, shelves: Sequence[Shelf], unit: str, nodes: Sequence[dict[str, Any]]) -> Seats:
    shared = unit == "GPU" and any(shelf.ranks and shelf.engine is not None for shelf in shelves)
    devices = _devices(group, shelves) if shared else [None] * len(shelves)
    ranks, engines = {}, {}
    for i, shelf in enumerate(shelves):
        node = nodes[shelf.node]
        host = node["NodeManagerAddress"] if len(nodes) > 1 else LOOPBACK
        for rank in shelf.ranks:
            ranks[rank] = Seat(_options(group, i, unit, 1), host, node=node["NodeID"])
        if shelf.engine is not None:
            own = 0 if shelf.ranks or shared else shelf.gpus
            gpus = shelf.gpus if unit == "GPU" else 0
            engines[shelf.engine] = Seat(_options(group, i, unit, own), host, devices[i], node["NodeID"], gpus)
    return Seats(_in_order(ranks), _in_order(engines), shared)


def own_address() -> str:
    """Of the node that this process is an actor on, for the others."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in _alive() if node["NodeID"] == here)


def _in_order(seats: dict[int, Seat]) -> tuple[Seat, ...]:
    return tuple(seats[i] for i in sorted(seats))


def _options(group: Any, bundle: int, unit: str, amount: int) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    cpus, gpus = (1, amount) if unit == "GPU" else (amount, 0)
    return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}


def _devices(group: Any, shelves: Sequence[Shelf]) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each shelf: Ray keeps a bundle's GPUs, and says which they are to who gets them all."""
    import ray

    ask = ray.remote(visible_devices)
    options = [_options(group, i, "GPU", shelf.gpus) for i, shelf in enumerate(shelves)]
    return ray.get([ask.options(**option).remote() for option in options])


def visible_devices() -> str | None:
    """Of the process that it runs in."""
    import os

    return os.environ.get("CUDA_VISIBLE_DEVICES")


def free_port(host: str) -> int:
    """A TCP port of this machine's address `host` that nobody listens on now.

    Below the ports that the system hands to whoever asks for any (32768 on, on Linux), above those of Ray's workers: it
    stays free until it is used, which can be a minute later.
    """
    import errno
    import random
    import socket

    choice = random.SystemRandom()  # two runs with one seed must not meet
    while True:
        with socket.socket() as s:
            try:
                s.bind((host, choice.randrange(20_000, 32_768)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return s.getsockname()[1]
