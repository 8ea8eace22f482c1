"""The driver's handle on the trainer: one Ray actor a rank, each holding a `megatron.trainer.Trainer`.

Splits a step's mini-batches over the data-parallel ranks, ships each micro-batch once, and reduces what comes back.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from beam_rl.files import folder_for
from beam_rl.inputs import adapter_for, scheme_for, start_adapter
from beam_rl.layout import cut_routes, even_out, pad, place_of, token_block
from beam_rl.model_config import experts_of, full_config, layer_kinds
from beam_rl.parity.record import Records
from beam_rl.recipe.tree import Algorithm, Recipe
from beam_rl.samples import MicroBatch, Sample, pack_one, plan_packs
from beam_rl.seats import Seats, unreserved
from beam_rl.watch import Rank, RankError, gather

if TYPE_CHECKING:
    from beam_rl.megatron.offload import Offload, OnGpu
    from beam_rl.megatron.profile import Trace
    from beam_rl.megatron.settings import ExportForm
    from beam_rl.rollout.sync.link import Link
    from beam_rl.rollout.sync.place import Place
    from beam_rl.rollout.sync.transport import WeightSender

# In the words of an error; other methods have names that say it.
DOING = {
    "start": "starting",
    "score": "scoring",
    "update": "updating",
    "send_weights": "sending weights",
    "sync_place": "opening a weight sync",
    "open_sync": "opening a weight sync",
    "connect_sync": "opening a weight sync",
    "begin_trace": "beginning a trace",
    "end_trace": "writing a trace",
    "save": "saving",
    "stage": "saving",
    "write": "writing a checkpoint",
    "load": "loading a checkpoint",
    "put_on_gpu": "leaving its GPU or returning to it",
    "rest": "idle",
}
SYNC_PATIENCE = 3  # in sync.deadline_s: what opens a sync ends by itself within that
DISCARD_S = 20.0  # for the ranks to remove their files at the end
ASIDE, ALIVE = "aside", "alive"  # Ray's concurrency groups: what runs beside the training, and what never returns


@dataclass(frozen=True)
class Sent:
    """What a weight sync has sent."""

    bytes: int = 0
    buckets: int = 0
    checksum: str | None = None  # of the adapter, as an engine that got all of it holds it; None for all weights


@dataclass(frozen=True)
class Copied:
    """Between GPUs that trainer and engines share, and the place where the trainer's state waits."""

    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Copied") -> "Copied":
        """One after the other."""
        return Copied(self.bytes + other.bytes, self.seconds + other.seconds)


@dataclass(frozen=True)
class Scores:
    """The trainer's own view of a step's tokens, before the first update. Only sampled tokens are listed."""

    logp: NDArray[np.float32]  # (sampled tokens,)
    logp_engine: NDArray[np.float32]  # (sampled tokens,)
    routes_agree: int  # (token, layer) pairs whose expert set the trainer's own router would have chosen too
    routes_total: int


class PolicyWorker:
    """One rank. Holds the step's micro-batches between scoring and the updates."""

    def __init__(self, algorithm: Algorithm, rank: int) -> None:
        self.algorithm, self.rank = algorithm, rank
        self.mini_batches: list[list[MicroBatch]] = []
        self.sender: WeightSender | None = None
        self.offload: Offload | None = None
        self.trace: Trace | None = None

    def start(self, model_path: str, settings: Any, world_size: int, master: str, log: Path) -> None:
        """Loads the model and joins the other ranks; what this process prints from now on goes to `log`."""
        print_to(log)
        from beam_rl.megatron import start_trainer

        self.trainer = start_trainer(model_path, settings, self.rank, world_size, master)

    def live(self) -> None:
        """Never returns: Ray ends the call when the process dies."""
        import threading

        threading.Event().wait()

    def score(self, mini_batches: list[list[MicroBatch]]) -> Scores:
        """Takes over the step's micro-batches and scores them with the current weights."""
        flat = [m for batch in mini_batches for m in batch]
        scores = self.trainer.score(flat)
        reference = self.trainer.score_reference(flat) if self.algorithm.kl.coefficient else [None] * len(scores)
        if scores:  # else a pipeline stage without the head, which needs no log-probabilities
            flat = [
                replace(m, logp_old=s.logp, logp_reference=r.logp if r else None)
                for m, s, r in zip(flat, scores, reference, strict=True)
            ]
        rest = iter(flat)
        self.mini_batches = [[next(rest) for _ in batch] for batch in mini_batches]
        none = np.empty(0, np.float32)
        return Scores(
            logp=np.concatenate([none, *(s.logp[m.response] for m, s in zip(flat, scores, strict=False))]),
            logp_engine=np.concatenate([none, *(m.logp_engine[m.response] for m in flat)]),
            routes_agree=sum(s.routes_agree for s in scores),
            routes_total=sum(s.routes_total for s in scores),
        )

    def update(self, index: int, lr: float) -> dict[str, float]:
        from functools import partial

        from beam_rl.algorithms.losses import objective

        return self.trainer.update(self.mini_batches[index], partial(objective, settings=self.algorithm), lr)

    def begin_trace(self) -> None:
        from beam_rl.megatron.profile import Trace

        self.trace = Trace()

    def end_trace(self, path: str) -> str | None:
        """What kept the trace from being written, if anything did."""
        trace, self.trace = self.trace, None
        assert trace is not None
        try:
            trace.write(Path(f"{path}_rank_{self.rank}.json"))
        except OSError as error:
            return f"{path}_rank_{self.rank}.json could not be written ({(error.strerror or str(error)).lower()})"
        return None

    def probe(self, sequences: list[MicroBatch]) -> dict[int, Records]:
        """What every sub-layer computes, by the sequence's index; of this rank's sequences and layers."""
        from beam_rl.megatron.probe import probe

        return probe(self.trainer, sequences)

    def peak_memory(self) -> dict[str, float]:
        """Bytes this process has held at most, so far."""
        import resource

        import torch

        peaks: dict[str, float] = {"memory/host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if torch.cuda.is_available():
            peaks["memory/gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
        return peaks

    def sync_place(self) -> "Place":
        """Where this rank is, for the choice of a transport."""
        from beam_rl.rollout.sync.place import here

        return here(self.trainer.device)

    def open_sync(self, link: "Link", workers: list[int]) -> list[dict[str, Any]]:
        """Opens the way to engines of `workers[i]` workers each, in the place of an earlier one; what each has to know."""
        from beam_rl.rollout.sync.link import open_sender

        self.close_sync()
        self.sender = open_sender(link, workers, self.trainer.device)
        return self.sender.join_infos()

    def connect_sync(self, joining: list[Any]) -> None:
        """Returns when every engine has joined; `joining` are the engines' own calls. Raises SyncError."""
        assert self.sender is not None
        self.sender.connect([ref.future() for ref in joining])

    def close_sync(self) -> None:
        """Gives back what the sync holds, if there is one."""
        if self.sender is not None:
            self.sender.close()
        self.sender = None

    def send_weights(self, engines: Sequence[Any]) -> Sent:
        """Streams the adapter or all weights to the engines; every rank takes part in gathering, rank 0 sends.

        Raises SyncError on rank 0, once the other ranks are through with gathering too.
        """
        from beam_rl.megatron.profile import part

        with part("sync"):
            return self._send_weights(engines)

    def _send_weights(self, engines: Sequence[Any]) -> Sent:
        from beam_rl.adapter_stacks import stacked

        tensors = self.trainer.sync_tensors()
        watch = self.trainer.sent_checksum()
        try:
            if self.rank != 0:
                return Sent()
            assert self.sender is not None
            stats = self.sender.send(
                watch.watch(stacked(tensors, self.trainer.hf)) if watch else tensors,
                lambda bucket: [e.update.remote(bucket).future() for e in engines],
            )
            return Sent(stats.bytes, stats.buckets, watch.value() if watch else None)
        finally:
            for _ in tensors:
                pass

    def put_on_gpu(self, what: "OnGpu") -> Copied:
        """Moves the rest of the trainer's state to where it waits."""
        self.offload = self.offload or self.trainer.offload()
        start = time.perf_counter()
        return Copied(self.offload.put(what), time.perf_counter() - start)

    def save(self, folder: str) -> None:
        self._tell_saved(folder, self.trainer.save(Path(folder)))

    def stage(self) -> None:
        self.trainer.stage()

    def write(self, folder: str) -> None:
        self._tell_saved(folder, self.trainer.write(Path(folder)))

    def _tell_saved(self, folder: str, how: str | None) -> None:
        if how:
            print(f"{folder} has the optimizer's state as a {how} of the file on NVMe", flush=True)

    def load(self, folder: str) -> None:
        self.trainer.load(Path(folder))

    def export(self, folder: str, form: "ExportForm") -> None:
        self.trainer.export(Path(folder), form)

    def discard(self) -> None:
        """Removes what the trainer keeps in files; it can't go on after this."""
        self.trainer.discard()


class Policy:
    """All ranks of the trainer, ready once `starting` is done; every method returns when all ranks have done it."""

    def __init__(self, recipe: Recipe, model_path: Path, logs: Path, seats: Seats | None = None) -> None:
        """logs: the folder for what the ranks print. seats: where they run; None: anywhere."""
        self.recipe, self.model_path, self.seats = recipe, model_path, seats
        config = full_config(model_path)
        self.num_experts = experts_of(config)
        parallel, kinds = recipe.trainer.parallel, layer_kinds(config)
        self.places = [place_of(rank, parallel, kinds) for rank in range(parallel.ranks)]
        self.logs = logs = logs.resolve()
        self.ranks = [Rank(i, place.named(), logs / f"trainer-{i}.log") for i, place in enumerate(self.places)]
        self.failure: RankError | None = None  # after which no rank can be relied on

    def __enter__(self) -> "Policy":
        import ray

        seats = self.seats or unreserved(self.recipe)
        worker: Any = ray.remote(concurrency_groups={ASIDE: 1, ALIVE: 1})(PolicyWorker)
        self.workers: list[Any] = [
            worker.options(**seat.options).remote(self.recipe.algorithm, rank) for rank, seat in enumerate(seats.ranks)
        ]
        start = (
            str(self.model_path),
            _settings(self.recipe, self.model_path, self.logs),
            len(self.places),
            seats.meeting_point(),
        )
        self.alive = [w.live.options(concurrency_group=ALIVE).remote() for w in self.workers]
        self.starting = [w.start.remote(*start, rank.log) for w, rank in zip(self.workers, self.ranks, strict=True)]
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        if error[0] is None and self.recipe.trainer.optimizer.offload == "nvme":  # after an error it stays as it is
            ray.wait([w.discard.remote() for w in self.workers], num_returns=len(self.workers), timeout=DISCARD_S)
        for worker in self.workers:
            ray.kill(worker)

    def wait_ready(self) -> None:
        self._gather("start", self.starting, self.recipe.cluster.start_timeout_s)

    def check(self) -> None:
        """For while no rank has anything to do: raises RankError if one has died."""
        import ray

        if ray.wait(self.alive, timeout=0)[0]:
            self._gather("rest", self.alive)

    def score(self, mini_batches: Sequence[Sequence[Sample]]) -> Scores:
        """Ships the step's samples to the ranks and scores them; `update` then refers to a mini-batch by its index."""
        replicas = [self._micro_batches(samples) for samples in mini_batches]
        per_rank = [[[cut_routes(m, place) for m in r[place.dp]] for r in replicas] for place in self.places]
        scores = self._each("score", [(batches,) for batches in per_rank])
        known = [s for s, place in zip(scores, self.places, strict=True) if place.reports]
        return Scores(
            logp=np.concatenate([s.logp for s in known]),
            logp_engine=np.concatenate([s.logp_engine for s in known]),
            routes_agree=sum(s.routes_agree for s in known),
            routes_total=sum(s.routes_total for s in known),
        )

    def update(self, index: int, lr: float) -> dict[str, float]:
        """One optimizer update over mini-batch `index`; the metrics are the same on every rank."""
        return self._all("update", index, lr)[0]

    def begin_trace(self) -> None:
        self._all("begin_trace")

    def end_trace(self, path: Path) -> list[str]:
        """Writes every rank's trace since `begin_trace` as `path`_rank_N.json; says which could not be written."""
        return [problem for problem in self._all("end_trace", str(path.resolve())) if problem]

    def probe(self, samples: Sequence[Sample]) -> list[Records]:
        """What every sub-layer computes for each sample, put together from all ranks."""
        sequences = [pack_one(samples, [i]) for i in range(len(samples))]
        whole: list[Records] = [{} for _ in samples]
        for rank in self._all("probe", sequences):
            for i, records in rank.items():
                whole[i] |= records
        return whole

    def peak_memory(self) -> dict[str, float]:
        """The largest of the ranks' peaks, in bytes."""
        ranks = self._all("peak_memory")
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

    def sync_place(self) -> Any:
        """Where rank 0 is, which sends the weights."""
        return self._first("sync_place")

    def open_sync(self, link: "Link", workers: list[int]) -> list[dict[str, Any]]:
        """Opens rank 0's end of a weight sync with engines of so many workers each; what each needs to join it."""
        return self._first("open_sync", link, workers)

    def connect_sync(self, joining: list[Any]) -> None:
        """Returns when all of the engines' calls `joining` have arrived at rank 0. Raises SyncError."""
        self._first("connect_sync", joining)

    def send_weights(self, engines: Sequence[Any]) -> Sent:
        """Streams what the policy trains to the engines' actors. Raises SyncError."""
        return self._all("send_weights", engines)[0]

    def put_on_gpu(self, what: "OnGpu") -> Copied:
        """What of the trainer's state is on the GPUs from now on, the rest where `trainer.wait_in` says; the bytes that all
        ranks have copied, and the seconds of the slowest."""
        copied = self._all("put_on_gpu", what)
        return Copied(sum(rank.bytes for rank in copied), max(rank.seconds for rank in copied))

    def save(self, folder: Path, timeout_s: float | None = None) -> None:
        self._all("save", str(folder), timeout_s=timeout_s)

    def stage(self, timeout_s: float | None = None) -> None:
        """The first half of `save`: copies what there is to write to the host. Training may go on after it."""
        self._all("stage", timeout_s=timeout_s)

    def write(self, folder: Path) -> None:
        """The second half: writes the copies, beside whatever else the ranks are asked for. From any thread."""
        calls = [w.write.options(concurrency_group=ASIDE).remote(str(folder)) for w in self.workers]
        self._gather("write", calls)

    def load(self, folder: Path) -> None:
        self._all("load", str(folder))

    def export(self, folder: Path, form: "ExportForm", timeout_s: float | None = None) -> None:
        self._all("export", str(folder), form, timeout_s=timeout_s)

    def _micro_batches(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        """A mini-batch as padded micro-batches, equally many for each data-parallel replica."""
        trainer = self.recipe.trainer
        plan = plan_packs([s.model_tokens for s in samples], trainer.token_budget, trainer.parallel.dp)
        packs = [[pack_one(samples, indices) for indices in replica if indices] for replica in plan]
        layout = (trainer.parallel, self.num_experts, token_block(trainer.precision))
        return even_out([[pad(m, *layout) for m in replica] for replica in packs], *layout)

    def _first(self, method: str, *args: Any) -> Any:
        """One call to the first rank, which alone speaks with the engines. Raises RankError if it dies or hangs."""
        limit_s = SYNC_PATIENCE * self.recipe.sync.deadline_s
        try:
            return self._gather(method, [getattr(self.workers[0], method).remote(*args)], limit_s)[0]
        except TimeoutError as error:
            rank = self.ranks[0]
            raise RankError(
                f"{rank} did not go on while {DOING.get(method, method)}: {error}; its log is {rank.log}"
            ) from None

    def _all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return self._each(method, [args] * len(self.workers), timeout_s)

    def _each(self, method: str, args: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        if self.failure:
            raise self.failure
        calls = [getattr(w, method).remote(*a) for w, a in zip(self.workers, args, strict=True)]
        return self._gather(method, calls, timeout_s)

    def _gather(self, method: str, calls: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        limit_s = self.recipe.trainer.collective_timeout_s
        try:
            return gather(calls, self.ranks, DOING.get(method, method.replace("_", " ")), limit_s, timeout_s)
        except RankError as error:
            self.failure = error
            raise


def _settings(recipe: Recipe, model_path: Path, logs: Path) -> Any:
    """logs: of this run and no other, so that its state on NVMe is in the way of nobody's but its own earlier one's."""
    from beam_rl.megatron.settings import TrainerSettings

    t = recipe.trainer
    nvme = t.optimizer.nvme.path
    return TrainerSettings(
        precision=t.precision,
        mxfp8=t.mxfp8,
        engine_mxfp8=scheme_for(recipe, model_path),
        numerics=t.numerics,
        deterministic=t.deterministic,
        temperature=recipe.rollout.temperature,
        routing_replay=recipe.rollout.routing_replay,
        seed=recipe.seed,
        optimizer=t.optimizer,
        parallel=t.parallel,
        recompute=t.recompute,
        collective_timeout_s=t.collective_timeout_s,
        wait_in=t.wait_in,
        chunk_tokens=t.logprob_chunk_tokens,
        nvme_folder=str(folder_for(logs, Path(nvme))) if nvme else None,
        adapter=adapter_for(recipe, model_path),
        adapter_folder=start_adapter(recipe),
    )


def print_to(log: Path) -> None:
    """Sends what this process and its children print from now on, last words of a crash included, to `log`."""
    import faulthandler
    import os
    import sys

    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable(file=2)
