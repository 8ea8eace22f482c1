"""Trains the tiny Beam of `megatron_tiny` in any layout, in real processes, and reports what one process would see.

Everything comes back whole and under its HF name or in its samples' order: log-probabilities, gradients, weights.
"""

import contextlib
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine_samples import engine_batches
from megatron.core import parallel_state
from numpy.typing import NDArray

from beam_rl.adapter_files import merged, read_adapter
from beam_rl.algorithms.losses import LossInputs, TokenLoss
from beam_rl.layout import PADDING, cut_routes, even_out, pad
from beam_rl.lora import Adapter
from beam_rl.megatron.checkpoint import Reader
from beam_rl.megatron.optimizer import is_distributed, owned
from beam_rl.megatron.trainer import Trainer
from beam_rl.recipe.tree import Optimizer, Parallel
from beam_rl.samples import MicroBatch

LR = 1e-3
# Four micro-batches of different lengths, none of them a multiple of anything; their routes are random, so replayed.
BATCHES = [tiny.micro_batch(lengths, seed=i) for i, lengths in enumerate([[13, 30], [21], [7, 5, 11], [17, 9]])]


@dataclass(frozen=True)
class Layout:
    name: str
    parallel: Parallel = field(default_factory=Parallel)
    recompute: str = "none"
    distributed: bool = True
    adapter: Adapter | None = None
    adapter_folder: str | None = None

    def settings(self) -> tiny.TrainerSettings:
        """No clipping, which would scale the gradients that we compare. Adam's eps keeps an entry whose gradient is
        rounding noise from moving by a whole step in a random direction."""
        optimizer = Optimizer(lr=LR, weight_decay=0.1, clip_grad=1e9, eps=1e-5, distributed=self.distributed)
        return tiny.settings(
            parallel=self.parallel,
            recompute=self.recompute,
            optimizer=optimizer,
            adapter=self.adapter,
            adapter_folder=self.adapter_folder,
        )

    def trainer(self, rank: int, master: str) -> Trainer:
        return Trainer(str(tiny.checkpoint()), self.settings(), rank, self.parallel.ranks, master)


Tensors = dict[str, NDArray[Any]]


@dataclass
class Seen:
    """What a layout computed."""

    engine: dict[str, float]  # the gap to the engine, on four micro-batches that it sampled
    logp: list[NDArray[np.float32]]  # of each micro-batch's real tokens
    entropy: list[NDArray[np.float32]]
    agreement: list[tuple[int, int]]
    metrics: list[dict[str, float]]  # of two updates
    start: Tensors  # exported before
    gradients: Tensors  # of the first update, by the weight's HF name
    weights: Tensors  # exported after both
    resumed: tuple[dict[str, float], Tensors]  # the second update once more, from a checkpoint


def shares(batches: list[MicroBatch], parallel: Parallel) -> list[list[MicroBatch]]:
    """The micro-batches of each data-parallel replica: most for the first, so that padding fills up the others."""
    edge = len(batches) - parallel.dp + 1
    parts = [batches[:edge], *([batch] for batch in batches[edge:])]
    padded = [[pad(batch, parallel, tiny.EXPERTS) for batch in part] for part in parts]
    return even_out(padded, parallel, tiny.EXPERTS)


def measure(trainer: Trainer, folder: Path) -> Seen:
    """Scores and two updates. Leaves a checkpoint of the state between the updates in `folder`."""
    place = trainer.place
    mine = [cut_routes(batch, place) for batch in shares(BATCHES, place.parallel)[place.dp]]
    start = weights(trainer)
    if trainer.adapted:
        start |= {f"new {name}": values for name, values in new_adapter(trainer).items()}
        start |= {f"merged {name}": values for name, values in merged_weights(trainer).items()}
        engine = {}  # which has sampled without an adapter
    else:
        engine = engine_gap(trainer, engine_batches(tiny.checkpoint(), folder.parent))
    scores = trainer.score(mine)
    assert bool(scores) == place.last_stage
    real = [batch.sample != PADDING for batch in mine]
    kept = [(score, rows) for score, rows in zip(scores, real, strict=bool(scores)) if rows.any()]

    def update() -> dict[str, float]:
        return trainer.update(mine, tiny.squared_objective, LR)

    base = frozen(trainer)
    first = update()
    gradient = gradients(trainer)
    check_copies(trainer)
    trainer.save(folder)
    second, after = update(), weights(trainer)
    assert all(torch.equal(values, base[name]) for name, values in frozen(trainer).items())
    trainer.load(folder)
    return Seen(
        engine=engine,
        logp=[score.logp[rows] for score, rows in kept],
        entropy=[score.entropy[rows] for score, rows in kept],
        agreement=[(score.routes_agree, score.routes_total) for score, _ in kept],
        metrics=[first, second],
        start=start,
        gradients=gradient,
        weights=after,
        resumed=(update(), weights(trainer)),
    )


def engine_gap(trainer: Trainer, batches: list[MicroBatch]) -> dict[str, float]:
    """How far this layout is from the engine on what the engine sampled, replaying its routes; changes no weight.

    The mean |Δlogp| of the response tokens as scored (on ranks that report), and in an update's own forward pass; that
    update's gradient norm, with recomputation in every layout but that of one process; and the share of expert sets that
    the trainer would have chosen otherwise.
    """
    place = trainer.place
    mine = [cut_routes(batch, place) for batch in shares(batches, place.parallel)[place.dp]]

    def gap(inputs: LossInputs) -> TokenLoss:
        difference = (inputs.logp - inputs.logp_engine).detach().abs()
        return TokenLoss(loss=-inputs.advantage * inputs.logp, clipped=difference > 1, kl=difference)

    scores = trainer.score(mine)
    with recomputed(trainer):
        metrics = trainer.update(mine, gap, lr=0.0)
    found = {"update": metrics["loss/kl"], "gradient": metrics["optim/grad_norm"]}
    if scores:
        differences = [np.abs(s.logp - b.logp_engine)[b.response] for s, b in zip(scores, mine, strict=True)]
        found["score"] = float(np.concatenate(differences).mean())
        found["flipped"] = 1 - sum(s.routes_agree for s in scores) / sum(s.routes_total for s in scores)
    return found


@contextlib.contextmanager
def recomputed(trainer: Trainer) -> Iterator[None]:
    """Recomputes whole layers, where the trainer has several ranks and does not recompute by itself."""
    config = trainer.config
    if trainer.place.parallel.ranks == 1 or config.recompute_granularity is not None:
        yield
        return
    config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    yield
    config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None


def weights(trainer: Trainer) -> Tensors:
    """What is trained."""
    return {name: tensor.cpu().numpy().copy() for name, tensor in trainer.sync_tensors()}


def frozen(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This rank's part of what an adapter leaves as it is."""
    found = [(f"{i} {name}", p) for i, chunk in enumerate(trainer.chunks) for name, p in chunk.named_parameters()]
    return {name: parameter.clone() for name, parameter in found if not parameter.requires_grad}


def new_adapter(trainer: Trainer) -> Tensors:
    """What this layout would start from without a given adapter; it gets the given one back."""
    adapted, settings = trainer.adapted, trainer.settings
    assert adapted and settings.adapter and settings.adapter_folder
    adapted.start_new(settings.seed)
    found = weights(trainer)
    adapted.load(read_adapter(Path(settings.adapter_folder), settings.adapter, trainer.hf))
    return found


def merged_weights(trainer: Trainer) -> Tensors:
    """The base with what the adapter adds, as an export has it."""
    assert trainer.settings.adapter
    added = dict(trainer.hf_adapter_tensors())
    whole = merged(trainer.hf_tensors(), added, trainer.settings.adapter, trainer.hf)
    return {name: tensor.cpu().numpy().copy() for name, tensor in whole}


@torch.no_grad()
def gradients(trainer: Trainer) -> Tensors:
    """Every weight's gradient, by the weight's HF name: they take the way of an export, in the weights' place."""
    live = trainer._weights_on_host()
    for parameter, gradient in whole_gradients(trainer):
        parameter.copy_(gradient)
    found = {name: grad for name, grad in weights(trainer).items() if "e_score_correction_bias" not in name}
    trainer._put_weights(live)
    return found


def whole_gradients(trainer: Trainer) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each parameter of this rank and its gradient, from the parts that the distributed optimizer's ranks have."""
    for chunk in trainer.chunks:
        mine = owned(chunk, trainer.optimizer)
        for parameter in (p for p in chunk.parameters() if p.requires_grad):
            whole = torch.zeros_like(parameter.main_grad).view(-1)
            if part := mine.get(parameter):
                here = slice(part.start, part.start + part.main.numel())
                whole[here] = parameter.main_grad.view(-1)[here]
            if is_distributed(trainer.optimizer):
                expert = not getattr(parameter, "allreduce", True)
                dense_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
                group = parallel_state.get_expert_data_parallel_group() if expert else dense_group
                dist.all_reduce(whole, group=group)
            yield parameter, whole.view(parameter.shape)


@torch.no_grad()
def check_copies(trainer: Trainer) -> None:
    """What tensor-parallel ranks hold copies of (router, norms) is the same on all, bit for bit; so is its gradient."""
    group = parallel_state.get_tensor_model_parallel_group()
    for parameter, gradient in whole_gradients(trainer):
        if getattr(parameter, "tensor_model_parallel", False) or not getattr(parameter, "allreduce", True):
            continue
        for tensor in (parameter.detach(), gradient):
            copies = [torch.empty_like(tensor) for _ in range(group.size())]
            dist.all_gather(copies, tensor, group=group)
            assert all(torch.equal(copy, tensor) for copy in copies)


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a trainer's checkpoint, whole; random states left out."""
    reader = Reader(folder)
    stored = {k: v for k, v in reader.read_metadata().state_dict_metadata.items() if not k.startswith("random.")}
    tensors = {name: torch.empty(found.size, dtype=found.properties.dtype) for name, found in stored.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


# --- processes --------------------------------------------------------------------------------------------


def _meeting(file: Path, rank: int) -> str:
    """Where the ranks meet: the first one chooses when it comes, the others wait to read it."""
    if rank == 0:
        file.with_suffix(".new").write_text(tiny.meeting_point())
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.02)
    return file.read_text()


def _run(rank: int, layouts: Sequence[Layout], folder: Path, foreign: Path) -> list[tuple[Any, Seen]]:
    """One rank of each layout after another, in one process."""
    found = []
    for layout in layouts:
        try:
            trainer = layout.trainer(rank, _meeting(folder / f"{layout.name}.address", rank))
            place = trainer.place
            assert place.tp == parallel_state.get_tensor_model_parallel_rank()
            assert place.cp == parallel_state.get_context_parallel_rank()
            assert place.pp == parallel_state.get_pipeline_model_parallel_rank()
            assert place.dp == parallel_state.get_data_parallel_rank()
            found.append((place, measure(trainer, folder / layout.name)))
            trainer.load(foreign)
            trainer.stage()
            trainer.write(folder / f"{layout.name}, again")
            trainer.close()
        except BaseException:
            print(f"{layout.name}, rank {rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            raise
    return found


def run(layouts: Sequence[Layout], folder: Path, foreign: Path) -> Iterator[tuple[Layout, Seen]]:
    """What each layout computed; they must have equally many ranks, which run in as many processes.

    Each leaves its own checkpoint in `folder/<name>`, and in `folder/<name>, again` what it made of the one at
    `foreign`.
    """
    (size,) = {layout.parallel.ranks for layout in layouts}
    per_rank = tiny.in_new_processes(_run, *[(rank, layouts, folder, foreign) for rank in range(size)], timeout_s=600)
    for layout, *seen in zip(layouts, *per_rank, strict=True):
        yield layout, joined(seen)


def joined(ranks: Sequence[tuple[Any, Seen]]) -> Seen:
    """The whole from the ranks that report; what several know must be the same on all."""
    first = ranks[0][1]
    for _, seen in ranks[1:]:
        assert (seen.metrics, seen.resumed[0]) == (first.metrics, first.resumed[0])
        for name in ("start", "gradients", "weights"):
            assert same_bits(getattr(seen, name), getattr(first, name))
    reports = [seen for place, seen in sorted(ranks, key=lambda found: found[0].dp) if place.reports]
    for name in ("logp", "entropy", "agreement"):
        setattr(first, name, [value for seen in reports for value in getattr(seen, name)])
    first.engine = {name: max(seen.engine[name] for seen in reports) for name in reports[0].engine}
    return first


# --- comparing --------------------------------------------------------------------------------------------

CLASSES = {
    "embedding": ("embed_tokens",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"),
    "o": ("self_attn.o_proj",),
    "gate bias": ("gate_bias",),
    "q/k norm": ("q_norm", "k_norm"),
    "norms": ("layernorm", "model.norm"),
    "dense MLP": tuple(f".{i}.mlp.{part}" for i in range(3) for part in ("gate_proj", "up_proj", "down_proj")),
    "experts": ("mlp.experts",),
    "router": ("mlp.gate.weight",),
    "head": ("lm_head",),
}


def same_bits(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def error(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """The difference's norm, relative to what it should be."""
    exact = theirs.astype(np.float64)
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


def errors(seen: Seen, one: Seen) -> dict[str, float]:
    """How far a layout is from one process: the largest relative error of each kind of number."""
    assert seen.agreement == one.agreement
    assert seen.gradients.keys() == one.gradients.keys()
    found = {
        "log-probabilities": max(error(a, b) for a, b in zip(seen.logp, one.logp, strict=True)),
        "entropies": max(error(a, b) for a, b in zip(seen.entropy, one.entropy, strict=True)),
        "metrics": max(
            abs(ours[name] - theirs[name]) / abs(theirs[name])
            for ours, theirs in zip(seen.metrics, one.metrics, strict=True)
            for name in theirs
        ),
    }
    if seen.engine:
        theirs, ours = one.engine, seen.engine
        found = {
            "engine, scored": ours["score"],
            "engine, in an update": ours["update"],
            "its routes flipped": ours["flipped"],
            "its ∇ norm": abs(ours["gradient"] - theirs["gradient"]) / theirs["gradient"],
        } | found
    by_class: dict[str, list[float]] = {kind: [] for kind in CLASSES}
    for name in one.gradients:
        (kind,) = [kind for kind, parts in CLASSES.items() if any(part in name for part in parts)]
        by_class[kind].append(error(seen.gradients[name], one.gradients[name]))
    found |= {f"gradient: {kind}": max(values) for kind, values in by_class.items() if values}
    found["weights"] = max(error(seen.weights[name], one.weights[name]) for name in one.weights)
    return found
