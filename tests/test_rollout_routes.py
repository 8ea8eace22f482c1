"""Keeping routes beside the KV cache: slots here are those of a small block table."""

import numpy as np
import pytest
import torch
from torch import Tensor

from beam_rl.rollout.routes import RouteRecorder

BLOCK = 4


class BlockTable:
    """Requests' blocks and token counts, and the slots of the step that ran last."""

    slots = 10 * BLOCK

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}
        self.step = torch.empty(0, dtype=torch.long)

    def of(self, request_id: str, start: int, end: int) -> Tensor:
        at = torch.arange(start, end)
        return torch.tensor(self.blocks[request_id])[at // BLOCK] * BLOCK + at % BLOCK

    def of_step(self, tokens: int) -> Tensor:
        return self.step[:tokens]

    def of_request(self, request_id: str) -> Tensor | None:
        return self.of(request_id, 0, self.tokens[request_id] - 1) if request_id in self.blocks else None

    def has_request(self, request_id: str) -> bool:
        return request_id in self.blocks


@pytest.fixture
def table() -> BlockTable:
    return BlockTable()


@pytest.fixture
def recorder(table: BlockTable) -> RouteRecorder:
    recorder = RouteRecorder(layers=2, top_k=2, experts=300, step_tokens=16)
    recorder.attach(table)
    return recorder


def run(recorder: RouteRecorder, table: BlockTable, spans: dict[str, tuple[int, int]], ended: list[str]) -> None:
    """A step over [start, end) of each request: token t of a request whose blocks start with b goes to (100 b + t, …)."""
    recorder.before_step(ended)
    for request_id in ended:
        table.blocks.pop(request_id, None)
    table.step = torch.cat([table.of(r, *span) for r, span in spans.items()])
    first = torch.cat([torch.arange(*span) + 100 * table.blocks[r][0] for r, span in spans.items()])
    for column in range(2):
        recorder.hook(column)(torch.stack([first, first + 1 + column], 1).int())
    recorder.after_step(len(table.step))


def rows(base: int, count: int) -> np.ndarray:
    first = np.arange(count) + base
    return np.stack([np.stack([first, first + 1 + column], 1) for column in range(2)], 1)


def test_rows_of_chunks_and_interleaved_requests_come_out_in_order(recorder: RouteRecorder, table: BlockTable) -> None:
    table.blocks, table.tokens = {"a": [1, 0], "b": [2]}, {"a": 7, "b": 3}
    run(recorder, table, {"a": (0, 5)}, [])
    run(recorder, table, {"b": (0, 2), "a": (5, 6)}, [])
    np.testing.assert_array_equal(recorder.take("a"), rows(100, 6))
    np.testing.assert_array_equal(recorder.take("b"), rows(200, 2))


def test_rows_survive_until_taken_when_blocks_are_reused(recorder: RouteRecorder, table: BlockTable) -> None:
    table.blocks, table.tokens = {"a": [1]}, {"a": 4}
    run(recorder, table, {"a": (0, 3)}, [])
    table.blocks["c"], table.tokens["c"] = [2, 1], 8
    run(recorder, table, {"c": (0, 7)}, ["a"])
    got = recorder.take("a")
    np.testing.assert_array_equal(got, rows(100, 3))
    assert got.dtype == np.uint16


def test_prefix_cache_hit_finds_the_rows_of_whoever_filled_the_block(
    recorder: RouteRecorder, table: BlockTable
) -> None:
    table.blocks, table.tokens = {"a": [1, 2]}, {"a": 7}
    run(recorder, table, {"a": (0, 6)}, [])
    table.blocks["hit"], table.tokens["hit"] = [1, 3], 7
    run(recorder, table, {"hit": (4, 6)}, ["a"])
    np.testing.assert_array_equal(recorder.take("hit"), rows(100, 6))


def test_taken_and_dropped_requests_leave_nothing(recorder: RouteRecorder, table: BlockTable) -> None:
    names = ["taken", "taken-late", "dropped", "dropped-late", "other"]
    table.blocks = {name: [i] for i, name in enumerate(names)}
    table.tokens = dict.fromkeys(names, 3)
    run(recorder, table, {name: (0, 2) for name in names}, [])
    recorder.take("taken")
    recorder.drop("dropped")
    run(recorder, table, {"other": (2, 3)}, names[:-1])
    recorder.take("taken-late")
    recorder.drop("dropped-late")
    recorder.drop("never-seen")
    assert not recorder.finished and not recorder.unwanted
    assert len(recorder.take("taken")) == len(recorder.take("never-seen")) == 0
    assert not recorder.unwanted


def test_small_ids_take_a_byte() -> None:
    assert RouteRecorder(1, 2, 256, 4).rows.dtype == np.uint8
    assert RouteRecorder(1, 2, 257, 4).rows.dtype == np.uint16
