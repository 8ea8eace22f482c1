"""The driver's part of a weight sync: tells the trainer to stream its weights and the engines to take them.

Promises: when `load` returns, every engine asked for serves exactly the version asked for; when it raises SyncError, no
engine is left in the middle of an update: one with an adapter serves the version before, another one that got a part
of the weights serves nothing until the next update. What travels and how is decided in `rollout.sync` and by the trainer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from beam_rl.engines import Engines
from beam_rl.policy import Policy
from beam_rl.recipe.tree import Sync
from beam_rl.rollout.sync.transport import SyncError, reason

HOST = "127.0.0.1"  # where all are on one machine


@dataclass(frozen=True)
class SyncReport:
    seconds: float
    bytes: int
    buckets: int
    version: int  # what every engine serves now


class WeightSync:
    """The way from the trainer's ranks to the engines; opened with the first sync, and anew for other engines."""

    def __init__(self, policy: Policy, engines: Engines, settings: Sync, host: str = HOST) -> None:
        """host: the trainer's address, that the engines reach it at."""
        self.policy, self.engines, self.settings, self.host = policy, engines, settings, host
        self.connected: list[Any] = []  # the actors that have joined

    def bring(self, version: int) -> SyncReport:
        """`load` for every engine that is there; one that fails is replaced, and the others are loaded without it.

        An engine that is still starting anew gets its weights from `mend`, or from the next call.
        """
        while (report := self._load_or_replace(version, self.engines.standing())) is None:
            pass
        return report

    def mend(self, version: int) -> None:
        """Gives engines that were started anew the trainer's weights, which are `version`. For when the trainer rests.

        Where others serve the version before, they wait for the next sync instead.
        """
        fresh = self.engines.fresh()
        if fresh and (self.engines.version == version or not self.engines.serving()):
            self._load_or_replace(version, fresh)

    def _load_or_replace(self, version: int, chosen: Sequence[int]) -> SyncReport | None:
        """Loads these engines, which then serve; None where some failed in it: others are started in their places."""
        try:
            report = self.load(version, chosen)
        except SyncError as error:
            if not error.engines:
                raise
            self.engines.lost(error.engines, error)
            return None
        self.engines.serve(version, chosen)
        return report

    def load(self, version: int, engines: Sequence[int] | None = None) -> SyncReport:
        """Brings the trainer's weights into every engine, bucket by bucket; from then on all serve `version`.

        With `model.lora` that is the adapter alone, and each engine proves by a checksum that it holds what was sent.

        Args:
            engines: the indexes of those to load, as after a restart; None: all.
        Raises:
            SyncError: `engines` of it are the indexes of those that failed and need to be replaced.
        """
        start = time.perf_counter()
        chosen = list(range(len(self.engines.actors)) if engines is None else engines)
        actors = [self.engines.actors[i] for i in chosen]
        what = f"weight sync {version}"
        try:
            if actors != self.connected:
                self._connect(chosen)
            self._all(chosen, f"{what}: begin", self.engines.begin_update(chosen))
            sent = _by_index(chosen, lambda: self.policy.send_weights(actors))
            held = self._all(chosen, f"{what}: finish", self.engines.finish_update(chosen, version))
            wrong = [i for i, checksum in zip(chosen, held, strict=True) if checksum != sent.checksum]
            if wrong:
                raise SyncError(f"{what}: engine {wrong[0]} holds another adapter than the trainer has sent", wrong)
        except SyncError as error:
            self._let_go([i for i in chosen if i not in error.engines])
            raise
        return SyncReport(time.perf_counter() - start, sent.bytes, sent.buckets, version)

    def _connect(self, chosen: Sequence[int]) -> None:
        """Opens the way from the trainer's first rank to these engines, and closes the one before."""
        from beam_rl.rollout.sync.link import Link
        from beam_rl.rollout.sync.place import choose

        self.connected = []
        places = self._all(chosen, "weight sync: find the engines", self.engines.sync_places(chosen))
        sender = self.policy.sync_place()
        s = self.settings
        transport = choose(s.transport, sender, [place for engine in places for place in engine])
        checksums = transport in ("shm", "gloo") if s.checksums is None else s.checksums
        link = Link(transport, s.bucket_bytes, s.deadline_s, checksums, self.host)
        joins = self.policy.open_sync(link, [len(engine) for engine in places])
        _by_index(chosen, lambda: self.policy.connect_sync(self.engines.join_sync(chosen, joins)))
        self.connected = [self.engines.actors[i] for i in chosen]

    def _let_go(self, survivors: Sequence[int]) -> None:
        """Leaves no survivor in an update; one that can't even answer to this is found by the next sync."""
        import ray

        self.connected = []
        calls = self.engines.abandon_update(survivors)
        ray.wait(calls, num_returns=len(calls), timeout=self.settings.deadline_s) if calls else None

    def _all(self, chosen: Sequence[int], what: str, calls: Sequence[Any]) -> list[Any]:
        """What the engines answer. SyncError names every one that failed, or did not answer within the deadline."""
        import ray

        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=self.settings.deadline_s)
        answers, failed = [], {}
        for i, call in zip(chosen, calls, strict=True):
            try:
                if call not in done:
                    raise TimeoutError(f"did not answer within {self.settings.deadline_s:g} s")
                answers.append(ray.get(call))
            except Exception as error:
                failed[i] = error
        refusals = [e for e in failed.values() if isinstance(getattr(e, "cause", None), ValueError)]
        if refusals:  # of what was sent: another engine would refuse it, too
            raise refusals[0]
        if failed:
            said = "; ".join(f"engine {i}: {reason(error)}" for i, error in failed.items())
            raise SyncError(f"{what}: {said}", failed) from next(iter(failed.values()))
        return answers


def _by_index(chosen: Sequence[int], act: Callable[[], Any]) -> Any:
    """Lets the trainer act; its SyncError counts the chosen engines from 0, the one raised here as the run does."""
    from ray.exceptions import RayTaskError

    try:
        return act()
    except RayTaskError as error:
        if not isinstance(error.cause, SyncError):
            raise
        raise SyncError(str(error.cause), [chosen[i] for i in error.cause.engines]) from None
