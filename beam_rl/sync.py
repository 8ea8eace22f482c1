"""The driver's part of a weight sync: tells the trainer to stream its weights and the engines to take them.

Promises: when `load` returns, every engine serves exactly the version asked for. What travels and how is decided in
`rollout.sync` and by the trainer.
"""

import time
from dataclasses import dataclass

from beam_rl.engines import Engines
from beam_rl.policy import Policy
from beam_rl.recipe.tree import Sync

HOST = "127.0.0.1"  # where all are on one machine


@dataclass(frozen=True)
class SyncReport:
    seconds: float
    bytes: int
    buckets: int
    version: int  # what every engine serves now


class WeightSync:
    """The way from the trainer's ranks to the engines; its group of processes is opened with the first sync."""

    def __init__(self, policy: Policy, engines: Engines, settings: Sync, host: str = HOST) -> None:
        """host: the address of the trainer's first rank, that the engines reach it at."""
        self.policy, self.engines, self.settings, self.host = policy, engines, settings, host
        self._connected = False

    def mend(self, version: int) -> None:
        """Gives engines that were started anew the trainer's weights, which are `version`, and lets them serve.

        Where others serve the version before, they wait for the next `load`. For when the trainer is at rest.
        """
        fresh = self.engines.fresh()
        if fresh and self.engines.version is not None and self.engines.version in (version, None):
            self.load(version)

    def load(self, version: int) -> SyncReport:
        """Brings the trainer's weights into every engine, bucket by bucket; from then on all serve `version`.

        With `model.lora` that is the adapter alone, and each engine proves by a checksum that it holds what was sent.
        """
        start = time.perf_counter()
        if not self._connected:
            self._connect()
            self._connected = True
        self.engines.begin_update()
        sent = self.policy.send_weights(self.engines.actors, self.settings.bucket_bytes)
        for i, held in enumerate(self.engines.finish_update(version)):
            if held != sent.checksum:
                raise RuntimeError(f"weight sync {version}: engine {i} holds another adapter than the trainer has sent")
        self.engines.serve(version, range(len(self.engines.actors)))
        return SyncReport(time.perf_counter() - start, sent.bytes, sent.buckets, version)

    def _connect(self) -> None:
        """Joins the trainer's first rank and every engine into one group."""
        deadline_s, size = self.settings.deadline_s, len(self.engines.actors) + 1
        port = self.policy.open_sync(self.host, size - 1, deadline_s)
        self.policy.connect_sync(self.engines.join_sync(self.host, port, size, deadline_s))
