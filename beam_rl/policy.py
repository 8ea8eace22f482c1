"""The driver's handle on the trainer: one Ray actor a rank, each holding a `megatron.trainer.Trainer`.

Splits a step's mini-batches over the data-parallel ranks, ships each micro-batch once, and reduces what comes back.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from beam_rl.inputs import adapter_for, start_adapter
from beam_rl.layout import cut_routes, even_out, pad, place_of
from beam_rl.parity.record import Records
from beam_rl.recipe.tree import Algorithm, Recipe
from beam_rl.samples import MicroBatch, Sample, pack_one, plan_packs
from beam_rl.seats import Seats, unreserved

if TYPE_CHECKING:
    from beam_rl.megatron.offload import Offload, OnGpu
    from beam_rl.megatron.settings import ExportForm


@dataclass(frozen=True)
class Sent:
    """What a weight sync has sent."""

    bytes: int = 0
    buckets: int = 0
    checksum: str | None = None  # of the adapter, as an engine that got all of it holds it; None for all weights


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
        self.offload: Offload | None = None

    def start(self, model_path: str, settings: Any, world_size: int, master: str) -> None:
        """Loads the model and joins the other ranks."""
        from beam_rl.megatron import start_trainer

        self.trainer = start_trainer(model_path, settings, self.rank, world_size, master)

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

    def open_sync(self, host: str, engine_ranks: int, deadline_s: float) -> int:
        """Opens the weight-sync group and returns the port where the engines join it."""
        from beam_rl.rollout.sync.transport import WeightSender

        self.sender = WeightSender(host, 0, engine_ranks, deadline_s)
        return self.sender.port

    def connect_sync(self, joining: list[Any]) -> None:
        """Returns when every engine has joined; `joining` are the engines' own calls."""
        self.sender.connect([ref.future() for ref in joining])

    def send_weights(self, engines: Sequence[Any], bucket_bytes: int) -> Sent:
        """Streams the adapter or all weights to the engines; every rank takes part in gathering, rank 0 sends."""
        tensors = self.trainer.sync_tensors()
        if self.rank != 0:
            for _ in tensors:
                pass
            return Sent()
        watch = self.trainer.sent_checksum()
        stats = self.sender.send(
            watch.watch(tensors) if watch else tensors,
            bucket_bytes,
            lambda bucket: [e.update.remote(bucket).future() for e in engines],
        )
        return Sent(stats.bytes, stats.buckets, watch.value() if watch else None)

    def put_on_gpu(self, what: "OnGpu") -> int:
        """Moves the rest of the trainer's state to host memory; the bytes copied."""
        if self.offload is None:
            from beam_rl.megatron.offload import Offload

            self.offload = Offload(self.trainer.held())
        return self.offload.put(what)

    def save(self, folder: str) -> None:
        self.trainer.save(Path(folder))

    def load(self, folder: str) -> None:
        self.trainer.load(Path(folder))

    def export(self, folder: str, form: "ExportForm") -> None:
        self.trainer.export(Path(folder), form)


class Policy:
    """All ranks of the trainer, ready once `starting` is done; every method returns when all ranks have done it."""

    def __init__(self, recipe: Recipe, model_path: Path, seats: Seats | None = None) -> None:
        """seats: where the ranks run; None: anywhere."""
        self.recipe, self.model_path, self.seats = recipe, model_path, seats
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        self.num_experts = config["num_experts"]
        parallel, kinds = recipe.trainer.parallel, config["mlp_layer_types"]
        self.places = [place_of(rank, parallel, kinds) for rank in range(parallel.ranks)]

    def __enter__(self) -> "Policy":
        import ray

        seats, worker = self.seats or unreserved(self.recipe), ray.remote(PolicyWorker)
        self.workers: list[Any] = [
            worker.options(**seat.options).remote(self.recipe.algorithm, rank) for rank, seat in enumerate(seats.ranks)
        ]
        start = (
            str(self.model_path),
            _settings(self.recipe, self.model_path),
            len(self.places),
            seats.meeting_point(),
        )
        self.starting = [w.start.remote(*start) for w in self.workers]
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        for worker in self.workers:
            ray.kill(worker)

    def wait_ready(self) -> None:
        import ray

        ray.get(self.starting)

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

    def open_sync(self, host: str, engine_ranks: int, deadline_s: float) -> int:
        """Opens rank 0's end of the weight sync; the port where the engines join it."""
        import ray

        return ray.get(self.workers[0].open_sync.remote(host, engine_ranks, deadline_s))

    def connect_sync(self, joining: list[Any]) -> None:
        """Returns when all of the engines' calls `joining` have arrived at rank 0."""
        import ray

        ray.get(self.workers[0].connect_sync.remote(joining))

    def send_weights(self, engines: Sequence[Any], bucket_bytes: int) -> Sent:
        """Streams what the policy trains to the engines' actors."""
        return self._all("send_weights", engines, bucket_bytes)[0]

    def put_on_gpu(self, what: "OnGpu") -> int:
        """What of the trainer's state is on the GPUs from now on, the rest in host memory; the bytes copied by all."""
        return sum(self._all("put_on_gpu", what))

    def save(self, folder: Path, timeout_s: float | None = None) -> None:
        self._all("save", str(folder), timeout_s=timeout_s)

    def load(self, folder: Path) -> None:
        self._all("load", str(folder))

    def export(self, folder: Path, form: "ExportForm", timeout_s: float | None = None) -> None:
        self._all("export", str(folder), form, timeout_s=timeout_s)

    def _micro_batches(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        """A mini-batch as padded micro-batches, equally many for each data-parallel replica."""
        trainer = self.recipe.trainer
        plan = plan_packs([s.model_tokens for s in samples], trainer.token_budget, trainer.parallel.dp)
        packs = [[pack_one(samples, indices) for indices in replica if indices] for replica in plan]
        padded = [[pad(m, trainer.parallel, self.num_experts) for m in replica] for replica in packs]
        return even_out(padded, trainer.parallel, self.num_experts)

    def _all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return self._each(method, [args] * len(self.workers), timeout_s)

    def _each(self, method: str, args: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        import ray

        calls = [getattr(w, method).remote(*a) for w, a in zip(self.workers, args, strict=True)]
        return ray.get(calls, timeout=timeout_s)


def _settings(recipe: Recipe, model_path: Path) -> Any:
    from beam_rl.megatron.settings import TrainerSettings

    t = recipe.trainer
    return TrainerSettings(
        precision=t.precision,
        numerics=t.numerics,
        deterministic=t.deterministic,
        temperature=recipe.rollout.temperature,
        routing_replay=recipe.rollout.routing_replay,
        seed=recipe.seed,
        optimizer=t.optimizer,
        parallel=t.parallel,
        recompute=t.recompute,
        chunk_tokens=t.logprob_chunk_tokens,
        adapter=adapter_for(recipe, model_path),
        adapter_folder=start_adapter(recipe),
    )
