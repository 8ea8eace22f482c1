"""Who sits on which GPU, and what trainer and engines do about it where they share."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from beam_rl.errors import InputError
from beam_rl.megatron.offload import Held, Offload
from beam_rl.placement import Shelf, for_pace, place
from beam_rl.policy import Copied
from beam_rl.recipe.load import load
from beam_rl.recipe.tree import Recipe
from beam_rl.seats import Seat, free_port
from beam_rl.turns import Turns

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"


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


class SharedGpu:
    """A GPU that holds the trainer's state or the engines' caches, and the weights of both, but never more."""

    def __init__(self, engines: int) -> None:
        self.trainer, self.caches = "nothing", ["weights", "kv_cache"] * engines
        self.history: list[str] = []

    def put_on_gpu(self, what: str) -> Copied:
        self.trainer = what
        self._look(f"trainer {what}")
        return Copied(8, 0.5)

    def all_alive(self) -> bool:
        return True

    def each(self, method: str, part: str = "") -> None:
        self.caches = [] if method == "sleep" else self.caches + [part] * 2
        self._look(f"engines {method} {part}".strip())

    def _look(self, event: str) -> None:
        assert self.trainer == "nothing" or "kv_cache" not in self.caches
        assert self.trainer != "all" or not self.caches
        self.history.append(event)


def test_trainer_and_engines_are_never_both_on_a_shared_gpu() -> None:
    gpu: Any = SharedGpu(engines=2)
    turns = Turns(gpu, gpu, shared=True)
    with turns.to_engines():  # the first sync
        assert gpu.trainer == "weights" and set(gpu.caches) == {"weights"}
    for _ in range(2):
        turns.to_trainer()
        turns.to_trainer()  # scoring and saving need not know of each other
        assert gpu.trainer == "all"
        with turns.to_engines():
            pass
        assert gpu.trainer == "nothing" and set(gpu.caches) == {"weights", "kv_cache"}
    moves = sum("trainer" in event for event in gpu.history)
    assert gpu.history.count("trainer all") == 2 and turns.copied == Copied(8 * moves, moves * 0.5)


def test_a_failed_sync_leaves_the_gpu_to_the_engines() -> None:
    gpu: Any = SharedGpu(engines=2)
    turns = Turns(gpu, gpu, shared=True)
    with pytest.raises(ValueError, match="engine 1"), turns.to_engines():
        raise ValueError("engine 1 is lost")
    assert gpu.trainer == "nothing" and "kv_cache" in gpu.caches


def test_where_nothing_is_shared_nothing_moves() -> None:
    gpu: Any = SharedGpu(engines=1)
    turns = Turns(gpu, gpu, shared=False)
    turns.to_trainer()
    with turns.to_engines():
        pass
    assert gpu.history == [] and turns.take_metrics() == {}


def test_offloaded_state_returns_bit_for_bit_and_its_views_stay_views() -> None:
    buffer, frozen = torch.randn(300), torch.randn(7, dtype=torch.float64)
    weights = [buffer[:100].view(10, 10), buffer[100:]]
    main, moment, gradients = buffer[50:150], torch.randn(300), torch.randn(300)
    before = [t.clone() for t in (buffer, frozen, moment)]
    offload = Offload(Held([frozen], weights, [gradients], [main, moment]))
    assert (
        offload.place.host_bytes == 256 + 1280 + 1280
    )  # frozen, the weights once although the optimizer has a view, the moment
    assert offload.put("nothing") == 56 + 1200 + 1200
    assert all(t.untyped_storage().nbytes() == 0 for t in (buffer, frozen, moment, gradients))
    assert offload.put("weights") == 56 + 1200 and moment.untyped_storage().nbytes() == 0
    assert torch.equal(buffer, before[0]) and torch.equal(weights[0].flatten(), before[0][:100])
    assert offload.put("all") == 1200
    assert all(torch.equal(now, then) for now, then in zip((buffer, frozen, moment), before, strict=True))
    gradients.zero_()
    main += 1
    assert torch.equal(weights[1], torch.cat([before[0][100:150] + 1, before[0][150:]]))  # still a view
    assert offload.put("weights") == 1200  # the moment alone
    assert offload.put("nothing") == 1200  # the frozen weight is in the host since the first time
    offload.put("all")
    assert torch.equal(main, before[0][50:150] + 1)


def recipe(*overrides: str) -> Recipe:
    return load(TINY, overrides)


@pytest.fixture(scope="module")
def two_nodes() -> dict[str, Any]:
    program = Path(__file__).with_name("two_nodes.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


SMALL, LARGE = ["127.0.0.1"] * 2, ["127.0.0.2"] * 2  # what a seat says, and where an actor in it finds itself


def test_seats_of_two_nodes_are_where_the_plan_says(two_nodes: dict[str, Any]) -> None:
    found = two_nodes["disaggregated"]
    assert found["ranks"] == [LARGE] * 4 and found["engines"] == found["restarted"] == [SMALL]
    assert found["meeting"].startswith("127.0.0.2:")
    assert two_nodes["again"]["ranks"] == found["ranks"]  # what a run has reserved it gives back


def test_colocated_on_two_nodes_an_engine_is_beside_its_ranks(two_nodes: dict[str, Any]) -> None:
    found = two_nodes["colocated"]
    assert found["engines"] == [LARGE, SMALL] and found["ranks"] == [LARGE] * 3 + [SMALL] * 3


def test_what_ray_does_not_have_is_refused_with_the_nodes(two_nodes: dict[str, Any]) -> None:
    assert two_nodes["too_much"]["error"].startswith("cluster.placement = disaggregated: ")
    assert two_nodes["too_much"]["error"].endswith("need 8 CPU slots; Ray has 3 + 4")


def test_who_has_lost_its_node_asks_for_as_much_anywhere() -> None:
    shared = Seat({"num_cpus": 1, "num_gpus": 0, "scheduling_strategy": "beside its rank"}, "10.0.0.7", "2,3", "id", 2)
    assert shared.elsewhere() == Seat({"num_cpus": 1, "num_gpus": 2}, "", None, None, 2)


def test_a_port_at_an_address_that_is_not_this_machines_is_an_error() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("203.0.113.1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("cluster.placement=colocated", "rollout.pace=asynchronous"), "rollout.pace = asynchronous: .* disaggregated"),
        (("cluster.placement=colocated", "rollout.pace=one_step_off"), "rollout.pace = one_step_off: .* disaggregated"),
        (("rollout.parallel.tp=4", "rollout.parallel.ep=2"), "rollout.parallel.ep = 2: .* use 4 or 1"),
        (
            ("rollout.parallel.dp=2", "rollout.parallel.ep=2", "model.lora.rank=8"),
            "rollout.parallel.dp = 2 and ep = 2: with model.lora .* use dp = 1",
        ),
    ],
)
def test_what_cannot_be_together_is_refused_by_its_keys(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe(*overrides)


@pytest.mark.parametrize(
    ("pace", "slots"), [("synchronous", 1), ("one_step_off", 2), ("asynchronous", 2)]
)  # one rank and one engine
def test_without_a_word_the_pace_decides(pace: str, slots: int) -> None:
    assert sum(shelf.gpus for shelf in place(for_pace(pace), 1, 1, 1, [4])) == slots
