"""Trainer and engines on the same GPUs: one works while the other's memory is elsewhere, or given back.

The trainer's state goes to page-locked host memory or to a file (`megatron.offload`). Engines sleep as vLLM does: with an
adapter its base stays in host memory, else the weights are dropped, since the sync that ends the trainer's turn brings them
anyway. The KV cache is dropped. Where nothing is shared, and on CPUs, where both lie in the same memory, turns move nothing.
"""

import contextlib
from collections.abc import Iterator

from beam_rl.engines import Engines
from beam_rl.policy import Copied, Policy


class Turns:
    """Begins with the engines' turn."""

    def __init__(self, policy: Policy, engines: Engines, shared: bool) -> None:
        """shared: whether they have the same GPUs, so that somebody has to make room."""
        self.policy, self.engines, self.shared = policy, engines, shared
        self.trainers = False  # whose turn it is
        self.copied = Copied()  # of the trainer's state, since somebody asked

    def take_metrics(self) -> dict[str, float]:
        """What the trainer's turns have copied since the last time; nothing where nothing is shared."""
        copied, self.copied = self.copied, Copied()
        return {"turn/bytes": copied.bytes, "turn/seconds": copied.seconds} if self.shared else {}

    def to_trainer(self) -> None:
        """The engines, which have nothing to do now, make room; the trainer may score, update, save."""
        if not self.shared or self.trainers:
            return
        self.engines.each("sleep")
        self.copied += self.policy.put_on_gpu("all")
        self.trainers = True

    def to_trainer_for_good(self) -> None:
        """The run is ending, and the engines have been killed: the trainer gets its state back, to save it."""
        if not self.shared or self.trainers:
            return
        self.copied += self.policy.put_on_gpu("all")
        self.trainers = True

    @contextlib.contextmanager
    def to_engines(self) -> Iterator[None]:
        """Inside, trainer and engines hold their weights, for a sync of all engines; afterwards it is the engines' turn.

        Also from the engines' turn, when nothing is being sampled.
        """
        if not self.shared:
            yield
            return
        self.trainers = False  # from the first move on: what fails half-way has to bring all of it back
        if not self.engines.all_alive():  # one that starts anew takes its memory then
            self.copied += self.policy.put_on_gpu("nothing")
        self.engines.each("sleep")
        self.copied += self.policy.put_on_gpu("weights")
        self.engines.each("wake", "weights")
        try:
            yield
        finally:  # also after a failed sync: an engine that is started anew needs the room
            self.copied += self.policy.put_on_gpu("nothing")
            self.engines.each("wake", "kv_cache")
