"""The sender's part of a weight sync, whatever the transport: packs, announces, waits, and says who failed.

Two buffers of fixed size are filled in turn: one is packed while the other travels and is loaded. An engine's reply to a
bucket's announcement is its acknowledgement; where receivers begin with the next bucket before they wait for the last, it
is that of the bucket before. Promises: every wait ends within the deadline; a failure names the engines that failed; when
it is raised, no other engine is still reading a buffer. Knows nothing about Ray or vLLM.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from torch import Tensor

from beam_rl.rollout.sync import bucket

POLL_S = 1.0  # how often a wait for an engine's arrival looks whether an engine has failed meanwhile
GRACE_S = 2.0  # for the others' answers when one is late
LET_GO_S = 10.0  # for all of them, where one that hangs has kept them from receiving
BROKE_OFF = "broke off"  # in the message of a receiver whose transfer ended because of somebody else
Announce = Callable[[dict[str, Any]], Sequence[Future]]


class SyncError(RuntimeError):
    """A weight sync failed; the message names the operation and the peer.

    `engines`: indexes of those that failed, in the order in which they were given; empty when nobody can tell.
    """

    def __init__(self, message: str, engines: Iterable[int] = ()) -> None:
        self.engines = tuple(engines)
        super().__init__(message, self.engines)  # both, so that the error survives pickling

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class SyncStats:
    bytes: int
    buckets: int


class SenderEnd(Protocol):
    """How buckets get from here to the engines' workers. Ranks count all of the workers, engine by engine, from 0."""

    buffers: list[Tensor]  # two, (bucket_bytes,) uint8
    shared_fate: bool  # whether one receiver's failure ends the others' transfers
    begins_early: bool  # whether a reply says that its bucket is begun with, and only of those before that they arrived

    def join_info(self) -> dict[str, Any]:
        """What a receiver needs to join (`link.open_receiver`), in plain values."""

    def has_arrived(self, rank: int, timeout_s: float) -> bool:
        """Whether a receiver is there to be connected with."""

    def connect(self) -> None:
        """Forms what ties sender and receivers together, when all have arrived."""

    def start(self, slot: int, nbytes: int) -> None:
        """Sets the first bytes of a buffer on their way; does not wait for anybody."""

    def finish(self, slot: int) -> None:
        """Ends a transfer that every receiver has acknowledged; the buffer is free."""

    def abandon(self) -> None:
        """Lets go receivers that wait for a transfer."""

    def close(self) -> None:
        """Gives back what this end holds."""


@dataclass(frozen=True)
class Flight:
    """A bucket on its way."""

    slot: int
    what: str
    replies: Sequence[Future]  # of each engine
    end: float  # time.monotonic() by which all have to be there


class WeightSender:
    """The trainer's end of a sync with engines of `workers[i]` workers each."""

    def __init__(self, end: SenderEnd, workers: Sequence[int], deadline_s: float, checksums: bool) -> None:
        if not workers:
            raise ValueError("a sync needs at least one engine")
        self.end, self.workers, self.deadline_s, self.checksums = end, workers, deadline_s, checksums
        self.flights: list[Flight] = []

    def join_infos(self) -> list[dict[str, Any]]:
        """For each engine what it needs to join, in plain values; `rank` is its first worker's."""
        common = {"deadline_s": self.deadline_s, "bucket_bytes": len(self.end.buffers[0]), **self.end.join_info()}
        return [common | {"rank": sum(self.workers[:i])} for i in range(len(self.workers))]

    def connect(self, joining: Sequence[Future] = ()) -> None:
        """Returns when every engine has joined; `joining` are the engines' own calls, whose errors end the wait.

        Raises SyncError; the sender is then closed, which lets go the engines that wait for it.
        """
        try:
            self._connect(joining, "joining the weight sync", time.monotonic() + self.deadline_s)
        except Exception:
            self.close()
            raise

    def _connect(self, joining: Sequence[Future], what: str, end: float) -> None:
        engine_of = [engine for engine, workers in enumerate(self.workers) for _ in range(workers)]
        for rank, engine in enumerate(engine_of):
            while not self.end.has_arrived(rank, max(0.01, min(POLL_S, end - time.monotonic()))):
                _raise_failed(what, joining)
                if time.monotonic() >= end:
                    raise SyncError(f"{what}: engine {engine} did not arrive within {self.deadline_s:g} s", [engine])
        self.end.connect()
        wait(joining, max(0.01, end - time.monotonic()), FIRST_EXCEPTION)
        _raise_failed(what, joining)
        late = [engine for engine, call in enumerate(joining) if not call.done()]
        if late:
            raise SyncError(f"{what}: engine {late[0]} did not answer within {self.deadline_s:g} s", late)

    def send(self, tensors: Iterable[tuple[str, Tensor]], announce: Announce) -> SyncStats:
        """Sends every tensor to every engine.

        Args:
            tensors: (checkpoint name, tensor), produced one by one.
            announce: starts the engines' update call for one bucket and returns a future for each engine. Calls of
                consecutive buckets overlap.
        Raises:
            SyncError: an engine failed, or did not answer within the deadline.
        """
        self.flights = []
        sent = buckets = 0
        for packed in bucket.pack(tensors, self._free_buffers(), self.checksums):
            self._take_off(packed, announce)
            sent, buckets = sent + packed.payload_bytes, buckets + 1
        while self.flights:
            self._land()
        return SyncStats(sent, buckets)

    def close(self) -> None:
        self.end.close()

    def _free_buffers(self) -> Iterator[Tensor]:
        for number in count():
            if number >= 2:
                self._land()
            yield self.end.buffers[number % 2]

    def _take_off(self, packed: bucket.Bucket, announce: Announce) -> None:
        slot = packed.number % 2
        about = bucket.to_metadata(packed) | {"slot": slot, "deadline_s": self.deadline_s}
        self.end.start(slot, packed.nbytes)
        what = f"weight-sync bucket {packed.number} ({packed.entries[0].name} …)"
        self.flights.append(Flight(slot, what, announce(about), time.monotonic() + self.deadline_s))

    def _land(self) -> None:
        """Waits until every engine has taken the oldest bucket on its way."""
        flight = self.flights[0]
        for telling in self.flights[: 2 if self.end.begins_early else 1]:
            _, waiting = wait(telling.replies, max(0.01, telling.end - time.monotonic()), FIRST_EXCEPTION)
            if waiting or any(reply.exception() for reply in telling.replies):
                raise self._failure(telling)
        self.end.finish(flight.slot)
        del self.flights[0]

    def _failure(self, flight: Flight) -> SyncError:
        """Lets the engines go, waits for the answers of those that may still give one, and says who failed.

        An engine that is late has had its time; when one has failed, the others have theirs, to take what is on its way.
        """
        self.end.abandon()
        if self.end.shared_fate:  # none could go on without the one that hangs: only now the others can answer
            wait([reply for each in self.flights for reply in each.replies], LET_GO_S)
        late = {i for i, reply in enumerate(flight.replies) if not reply.done() and time.monotonic() >= flight.end}
        own = [[each.replies[i] for each in self.flights] for i in range(len(self.workers))]
        rest = [reply for i, replies in enumerate(own) if i not in late for reply in replies]
        wait(rest, max(0.0, self.flights[-1].end - time.monotonic()) if not late else GRACE_S)
        said: dict[int, str] = {}
        for engine, replies in enumerate(own):
            errors = [reason(error) for reply in replies if reply.done() and (error := reply.exception())]
            if errors:
                said[engine] = f"engine {engine} failed: {errors[0]}"
            elif not all(reply.done() for reply in replies):
                said[engine] = f"engine {engine} did not answer within {self.deadline_s:g} s"
        at_fault = {engine: text for engine, text in said.items() if not (self.end.shared_fate and BROKE_OFF in text)}
        return SyncError(f"{flight.what}: {'; '.join((at_fault or said).values())}", at_fault)


def reason(error: BaseException) -> str:
    """One line of what a call raised, without what it was wrapped in on its way (Ray keeps the original as `cause`)."""
    cause = getattr(error, "cause", None) or error
    line = str(cause).strip().partition("\n")[0].removeprefix("Call to collective_rpc method failed: ")
    return line or type(cause).__name__


def _raise_failed(what: str, calls: Sequence[Future]) -> None:
    failed = {engine: error for engine, call in enumerate(calls) if call.done() and (error := call.exception())}
    if failed:
        said = "; ".join(f"engine {engine} failed: {reason(error)}" for engine, error in failed.items())
        raise SyncError(f"{what}: {said}", failed)
