"""Which experts each token went to, kept while the engine runs and handed out when a response is complete.

Rows lie beside the KV cache, one for each of its slots, written in the step that fills the slot. So they share the KV
cache's fate: a prefix-cache hit finds the rows of whoever filled the block, chunked prefill writes them chunk by chunk, a
preempted request writes them again. Knows of the engine only what `Slots` says.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

Routes = NDArray[np.uint8] | NDArray[np.uint16]


class Slots(Protocol):
    """Where the engine keeps tokens (see `compat.SlotView`)."""

    slots: int

    def of_step(self, tokens: int) -> Tensor: ...
    def of_request(self, request_id: str) -> Tensor | None: ...
    def has_request(self, request_id: str) -> bool: ...


def route_dtype(experts: int) -> DTypeLike:
    """The smallest type that holds an expert id."""
    return np.uint8 if experts <= 256 else np.uint16


class RouteRecorder:
    """Routes of running and just finished requests.

    Memory: slots × MoE layers × top-k ids, plus one array for each finished response until `take` or `drop`.
    """

    def __init__(self, layers: int, top_k: int, experts: int, step_tokens: int) -> None:
        self.step = np.zeros((step_tokens, layers, top_k), route_dtype(experts))
        self.slots: Slots | None = None
        self.rows = self.step[:0]
        self.finished: dict[str, Routes] = {}
        self.unwanted: set[str] = set()

    def hook(self, column: int) -> Callable[[Tensor], None]:
        """What a MoE layer calls with its (tokens, top_k) ids in every step; `column` is its place in the rows."""

        def write(ids: Tensor) -> None:
            self.step[: ids.shape[0], column] = ids.numpy()

        return write

    def attach(self, slots: Slots) -> None:
        """Sets the row of every slot aside, once the KV cache has its size."""
        self.slots = slots
        self.rows = np.zeros((slots.slots, *self.step.shape[1:]), self.step.dtype)

    def after_step(self, tokens: int) -> None:
        """Moves the rows of the step that just ran to their slots."""
        assert self.slots is not None
        self.rows[self.slots.of_step(tokens).numpy()] = self.step[:tokens]

    def before_step(self, ended: Iterable[str]) -> None:
        """Saves the rows of requests that ended, before this step can hand their slots to others."""
        for request_id in ended:
            if request_id in self.unwanted:
                self.unwanted.remove(request_id)
            elif request_id not in self.finished and (rows := self._read(request_id)) is not None:
                self.finished[request_id] = rows

    def take(self, request_id: str) -> Routes:
        """(tokens − 1, layers, top_k) rows of a finished request, which are then forgotten.

        No rows of one that was aborted while it waited to be run.
        """
        assert self.slots is not None
        rows = self.finished.pop(request_id, None)
        if rows is None:  # ended in the last step; its slots are intact until the next one
            rows = self._read(request_id)
            if self.slots.has_request(request_id):
                self.unwanted.add(request_id)
        return self.step[:0] if rows is None else rows

    def drop(self, request_id: str) -> None:
        """Forgets an aborted request."""
        assert self.slots is not None
        if self.finished.pop(request_id, None) is None and self.slots.has_request(request_id):
            self.unwanted.add(request_id)

    def _read(self, request_id: str) -> Routes | None:
        assert self.slots is not None
        slots = self.slots.of_request(request_id)
        return None if slots is None else self.rows[slots.numpy()]
