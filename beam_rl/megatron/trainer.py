"""One rank of the policy: scores samples, learns from them, hands out its weights, saves and restores itself.

A rank is driven from outside with micro-batches; every rank gets the same calls in the same order. The loss is
injected. Knows nothing about Ray, vLLM, rewards or recipes.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from beam_rl.adapter_files import identity, merged, read_adapter, write_adapter
from beam_rl.algorithms.losses import LossInputs, TokenLoss
from beam_rl.checksum import SentChecksum
from beam_rl.errors import InputError
from beam_rl.layout import PADDING, check_layout, place_of, routed_rows
from beam_rl.lora import Adapter
from beam_rl.megatron import checkpoint, compat, mxfp8, ranks
from beam_rl.megatron.export import export_checkpoint
from beam_rl.megatron.family import head_of, open_family
from beam_rl.megatron.logprobs import token_logprobs
from beam_rl.megatron.lora import AdaptedModel
from beam_rl.megatron.model import layout_fields
from beam_rl.megatron.nvme.optimizer import Moved
from beam_rl.megatron.nvme.snapshot import SavedBy
from beam_rl.megatron.nvme.waiting import FilePlace
from beam_rl.megatron.offload import Held, HostPlace, Offload
from beam_rl.megatron.optimizer import (
    make_optimizer,
    prefetch,
    router_gradient_norm,
    set_lr,
    state_tensors,
    streamed_state,
    with_gradient_buffers,
)
from beam_rl.megatron.packing import Agreement, Pack, pack
from beam_rl.megatron.profile import part
from beam_rl.megatron.settings import ExportForm, Score, TrainerSettings
from beam_rl.model_config import named_as_beams
from beam_rl.mxfp8.scheme import Scheme, scheme_of
from beam_rl.samples import MicroBatch

compat.require_installed()

Objective = Callable[[LossInputs], TokenLoss]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "mxfp8": torch.bfloat16}  # outside of MXFP8's products


class Trainer:
    @torch.enable_grad()
    def __init__(self, model_path: str, settings: TrainerSettings, rank: int, world_size: int, master: str) -> None:
        """Loads the checkpoint and joins the other ranks.

        Args:
            model_path: a folder with a checkpoint in HF format. master: "host:port" where the ranks meet.
        Raises:
            InputError: not a checkpoint that can be trained, or not an adapter for it.
            ValueError: `world_size` does not fit `settings.parallel`.
        """
        self.settings = settings
        self.checkpoint = open_family(model_path)
        hf = self.checkpoint.config
        self.hf = named_as_beams(hf.to_dict())
        for problem in check_layout(self.hf, settings.parallel, settings.adapter):
            raise InputError(problem)
        self.device = ranks.start_process(settings)
        ranks.join(settings, rank, world_size, master)
        self.place = place_of(rank, settings.parallel, self.hf["mlp_layer_types"])
        self.scheme = self._scheme(hf)
        layout = layout_fields(settings.parallel, hf.num_hidden_layers, settings.recompute)
        dtype = DTYPES[settings.precision]
        self.config = self.checkpoint.megatron_config(dtype, self.device, self.place, self.scheme, **layout)
        self.config.finalize_model_grads_func = _finalize_gradients
        chunks = self.checkpoint.build(self.config, self.place)
        self.chunks: list[GPTModel] = [chunk.to(self.device) for chunk in chunks]
        self.checkpoint.load_into(self.chunks)
        self.adapted = self._adapted(settings.adapter) if settings.adapter else None
        self.ddp = [with_gradient_buffers(chunk, settings.optimizer.distributed) for chunk in self.chunks]
        self.optimizer = make_optimizer(self.ddp, settings.optimizer, self._nvme_folder(rank))
        self._reference: dict[str, Tensor] | None = None  # on the host
        self._host_copy = checkpoint.HostCopy()
        self._staged: checkpoint.State | None = None  # in it

    @property
    def model(self) -> GPTModel:
        """What this rank holds of the model, where that is one chunk (there are no virtual stages)."""
        (chunk,) = self.chunks
        return chunk

    def _scheme(self, hf: Any) -> Scheme | None:
        """Which weights are MXFP8, if any; the log says who multiplies them."""
        if self.settings.precision != "mxfp8":
            return None
        kept, parallel = self.settings.mxfp8, self.settings.parallel
        try:
            scheme = scheme_of(
                hf, kept.keep_first_layers, kept.keep_last_layers, kept.activations, parallel.tp, parallel.etp
            )
        except ValueError as error:
            raise InputError(f"trainer.precision = mxfp8: {error}") from None
        stage, most = hf.num_hidden_layers // parallel.pp, max(kept.keep_first_layers, kept.keep_last_layers)
        if mxfp8.is_native(scheme) and most > stage:
            raise InputError(
                f"trainer.mxfp8.keep_first_layers, keep_last_layers: {most} layers at one end are more than the {stage} "
                "of a pipeline stage, and on this GPU Megatron keeps no more"
            )
        print(f"trainer.precision = mxfp8: {mxfp8.who_multiplies(scheme)}", flush=True)
        return scheme

    def _adapted(self, adapter: Adapter) -> AdaptedModel:
        """Puts the adapter on the model: a new one, or the one that the settings name."""
        start = self.settings.adapter_folder
        tensors = read_adapter(Path(start), adapter, self.hf, self.checkpoint.folder) if start is not None else None
        adapted = AdaptedModel(self.chunks, adapter, self.hf)
        if tensors is None:
            adapted.start_new(self.settings.seed)
        else:
            adapted.load(tensors)
        return adapted

    def _nvme_folder(self, rank: int) -> Path | None:
        if self.settings.optimizer.offload != "nvme":
            return None
        assert self.settings.nvme_folder is not None
        return Path(self.settings.nvme_folder) / f"rank_{rank}"

    def discard(self) -> None:
        """Removes the optimizer's state, if it is in files; the trainer can make no update after this."""
        if state := streamed_state(self.optimizer):
            state.close(discard=True)
        if (folder := self._nvme_folder(dist.get_rank())) is not None:
            with contextlib.suppress(OSError):  # other ranks' folders are still there
                folder.parent.rmdir()

    def close(self) -> None:
        """Leaves the group of ranks; the process may start another trainer."""
        if state := streamed_state(self.optimizer):
            state.close()
        ranks.leave()

    # --- scoring -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Score]:
        """Log-probabilities and entropies of every position under the policy as it is now.

        The micro-batches are padded and cut for this rank's place (see `beam_rl.layout`). Ranks of the last pipeline
        stage return a score for each; tensor- and context-parallel neighbours the same one. The others return [].
        """
        self._check_counts(len(micro_batches))
        if not micro_batches:
            return []
        for chunk in self.chunks:
            chunk.eval()
        agreements = [self._agreement(batch) for batch in micro_batches]

        def forward(batches: Iterator[tuple[int, MicroBatch]], model: Any) -> tuple[Tensor, Any]:
            i, batch = next(batches)
            pack = self._pack(batch, agreements[i])

            def collect(hidden: Tensor, non_loss_data: bool = False) -> tuple[Tensor, Tensor]:
                logp, entropy = self._logprobs(hidden, batch, pack)
                return logp.cpu(), entropy.cpu()

            return self._hidden(model, batch, pack), collect

        with part("score"):
            found = self._run(forward, micro_batches, forward_only=True)
        counts = torch.tensor([(a.agree, a.total) if a else (0, 0) for a in agreements], device=self.device)
        ranks.sum_over_replica(counts)
        return [
            Score(logp.numpy(), entropy.numpy(), *count)
            for (logp, entropy), count in zip(found, counts.tolist() if found else [], strict=True)
        ]

    def score_reference(self, micro_batches: Sequence[MicroBatch]) -> list[Score]:
        """The same under the frozen starting policy: the weights at `model_path`, also after a resume.

        With an adapter that is the model without it, whichever adapter the training started from.
        """
        if self.adapted:
            self.adapted.switch(on=False)
            try:
                return self.score(micro_batches)
            finally:
                self.adapted.switch(on=True)
        live = self._weights_on_host()
        if self._reference is None:
            self.checkpoint.load_into(self.chunks)
            self._reference = self._weights_on_host()
        else:
            self._put_weights(self._reference)
        try:
            return self.score(micro_batches)
        finally:
            self._put_weights(live)

    # --- learning ------------------------------------------------------------------------------------------

    def update(self, micro_batches: Sequence[MicroBatch], objective: Objective, lr: float) -> dict[str, float]:
        """One optimizer update on the mini-batch of all ranks, of which these are this rank's micro-batches.

        The loss is Σ weight · token loss over every token of every rank; how they are split changes nothing.
        Returns the same metrics on every rank: sums and means are over the whole mini-batch.

        Raises:
            FloatingPointError: the loss or a gradient is not finite; no weight has changed.
        """
        self._check_counts(len(micro_batches))
        prefetch(self.optimizer)
        for chunk, ddp in zip(self.chunks, self.ddp, strict=True):
            chunk.train()
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        totals = torch.zeros(5, dtype=torch.float64)  # loss, response tokens, clipped, entropy, KL

        def forward(batches: Iterator[tuple[int, MicroBatch]], model: Any) -> tuple[Tensor, Any]:
            _, batch = next(batches)
            pack = self._pack(batch, None)

            def loss(hidden: Tensor) -> tuple[Tensor, Tensor, None]:
                total, sums = self._loss(hidden, batch, pack, objective)
                totals.add_(sums)
                return total, torch.tensor(0, dtype=torch.int), None

            return self._hidden(model, batch, pack), loss

        with part("forward and backward"):
            if micro_batches:
                self._run(forward, micro_batches, forward_only=False)
            else:  # a replica without samples still takes part in the gradient's sum
                _finalize_gradients(self.ddp)
        metrics = self._metrics(totals)
        set_lr(self.optimizer, lr)
        with part("optimizer"):
            _, grad_norm, _ = self.optimizer.step()
        return metrics | {"optim/grad_norm": float(grad_norm), "optim/lr": lr} | self._nvme_metrics()

    def _nvme_metrics(self) -> dict[str, float]:
        """What this update moved, over all ranks, and the seconds of the slowest."""
        if self.settings.optimizer.offload != "nvme":
            return {}
        state = streamed_state(self.optimizer)
        moved = state.take_moved() if state else Moved(0, 0, 0.0)
        counts = torch.tensor([moved.read_bytes, moved.write_bytes], device=self.device)
        dist.all_reduce(counts)
        read, written = counts.tolist()
        seconds = ranks.largest(round(moved.seconds * 1e6), self.device) / 1e6
        return {"nvme/read_bytes": read, "nvme/write_bytes": written, "nvme/seconds": seconds}

    def _loss(self, hidden: Tensor, batch: MicroBatch, pack: Pack, objective: Objective) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the loss, and its part of the metrics' sums."""
        logp, entropy = self._logprobs(hidden, batch, pack)
        response = self._tensor(batch.response)
        inputs = LossInputs(
            logp=logp,
            logp_old=logp.detach() if batch.logp_old is None else self._tensor(batch.logp_old),
            logp_engine=self._tensor(batch.logp_engine),
            logp_reference=None if batch.logp_reference is None else self._tensor(batch.logp_reference),
            advantage=self._tensor(batch.advantage),
            response=response,
            sample=self._tensor(batch.sample),
            entropy=entropy,
        )
        token = objective(inputs)
        loss = (self._tensor(batch.weight) * token.loss).sum()
        counted = [loss.detach(), response.sum(), (token.clipped & response).sum(), entropy[response].sum()]
        counted.append(torch.zeros(()) if token.kl is None else token.kl[response].sum())
        return loss, torch.stack([value.double().cpu() for value in counted])

    def _metrics(self, totals: Tensor) -> dict[str, float]:
        """Sums over ranks what each has counted, and looks at the gradients; both must be finite to go on."""
        on_device = totals.to(self.device)
        ranks.sum_over_batch(on_device)
        loss, tokens, clipped, entropy, kl = on_device.tolist()
        buffers = [buffer for ddp in self.ddp for buffer in ddp.buffers + ddp.expert_parallel_buffers]
        finite = ranks.all_of(all(bool(buffer.grad_data.isfinite().all()) for buffer in buffers), self.device)
        if not (finite and math.isfinite(loss)):
            what = "a gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
            raise FloatingPointError(f"{what}; the weights are as they were before this update")
        tokens = max(tokens, 1.0)
        metrics = {
            "loss/policy": loss,
            "loss/clip_fraction": clipped / tokens,
            "loss/entropy": entropy / tokens,
            "loss/kl": kl / tokens,
        }
        if not self.adapted and self.config.num_moe_experts:  # an adapter freezes the routers
            metrics["optim/router_grad_norm"] = router_gradient_norm(self.chunks, self.optimizer)
        return metrics

    # --- weights and state ---------------------------------------------------------------------------------

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its HF name, one after the other, in its own dtype; all ranks call it and get them all.

        An adapter is no part of them: with one they are those of the checkpoint.
        """
        with torch.no_grad():
            yield from self.checkpoint.tensors_of(self.chunks)

    def hf_adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's tensors by their HF names, as in `beam_rl.lora`, without those that repeat another one; all ranks
        call it and get them all."""
        assert self.adapted is not None
        yield from self.adapted.hf_tensors()

    def sync_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What an engine that has the starting policy needs to have this one: the adapter, or else every weight, where
        engines have MXFP8 quantized here."""
        scheme = self.settings.engine_mxfp8
        if self.adapted:
            yield from self.hf_adapter_tensors()
        else:
            sends = scheme is not None and dist.get_rank() == 0  # the others only take part in gathering
            yield from scheme.quantized(self.hf_tensors()) if scheme and sends else self.hf_tensors()

    def sent_checksum(self) -> SentChecksum | None:
        """What works out the checksum that an engine will have of `sync_tensors`; None without an adapter."""
        adapter = self.settings.adapter
        return SentChecksum(adapter, self.hf, DTYPES[self.settings.precision]) if adapter else None

    def held(self) -> Held:
        """What this rank holds on its device between two calls."""
        weights = [tensor for _, tensor in self._weights()]
        gradients = [b.grad_data for ddp in self.ddp for b in ddp.buffers + ddp.expert_parallel_buffers]
        frozen = [t for t in weights if self.adapted and isinstance(t, torch.nn.Parameter) and not t.requires_grad]
        return Held(frozen, weights, gradients, state_tensors(self.optimizer, self.device))

    def offload(self) -> Offload:
        """What takes `held` off the device and back; the room for it is taken now.

        Raises:
            InputError, DiskError: the folder for it can't be used, or has no room.
        """
        nvme = self.settings.optimizer.nvme
        if self.settings.wait_in == "host":
            return Offload(self.held(), HostPlace)
        assert nvme.path is not None
        return Offload(self.held(), partial(FilePlace, folder=Path(nvme.path), block_bytes=nvme.block_bytes))

    def export(self, folder: Path, form: ExportForm = "full") -> None:
        """Writes the policy as HF files; all ranks call it, the first one writes.

        Args:
            form: "full": every weight, without an adapter; "mxfp8": the same in MXFP8, as engines have it; "merged": every
                weight with what the adapter adds; "adapter": a folder that PEFT and vLLM load.
        Raises:
            InputError: the folder exists and is not empty.
        """
        tensors = self.hf_adapter_tensors() if form == "adapter" else self.hf_tensors()
        adapter = self.settings.adapter
        if form == "merged":
            assert adapter is not None
            added = {name: tensor.cpu() for name, tensor in self.hf_adapter_tensors()}
            tensors = merged(tensors, added, adapter, self.hf) if dist.get_rank() == 0 else tensors
        if dist.get_rank() != 0:
            for _ in tensors:
                pass
        elif form == "adapter":
            assert adapter is not None
            write_adapter(tensors, adapter, self.hf, folder, str(self.checkpoint.folder))
        else:
            scheme = self.settings.engine_mxfp8 if form == "mxfp8" else None
            export_checkpoint(tensors, self.checkpoint.folder, folder, self.config.params_dtype, scheme)
        dist.barrier()

    def save(self, folder: Path) -> SavedBy | None:
        """Writes what a resumed run needs to go on as if nothing had happened; all ranks call it.

        With an adapter, that is the adapter's state, and which checkpoint and shape it belongs to. Returns how this rank's
        optimizer state has come there, if it is in files.
        """
        return checkpoint.write(folder, checkpoint.live_state(self.chunks, self.optimizer), self._adapter_about())

    def stage(self) -> None:
        """The first half of a `save` during which training goes on: copies what there is to write to the host, but for an
        optimizer's state in files; all ranks call it. The `write` before must have ended."""
        self._staged = self._host_copy.of(checkpoint.live_state(self.chunks, self.optimizer))

    def write(self, folder: Path) -> SavedBy | None:
        """The second half: writes what `stage` has copied; all ranks call it, from a thread beside the training."""
        assert self._staged is not None, "write before stage"
        return checkpoint.write(folder, self._staged, self._adapter_about())

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote; all ranks call it. InputError if the folder does not fit this model."""
        checkpoint.load(folder, self.chunks, self.optimizer, self._adapter_about())

    def _adapter_about(self) -> dict[str, Any] | None:
        adapter = self.settings.adapter
        return {"base": identity(self.checkpoint.folder), "shape": asdict(adapter)} if adapter else None

    def _weights_on_host(self) -> dict[str, Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._weights()}

    @torch.no_grad()
    def _put_weights(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in self._weights():
            tensor.copy_(weights[name])

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for i, chunk in enumerate(self.chunks):
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):  # buffers: correction biases
                yield f"{i}.{name}", tensor

    # --- one forward pass ----------------------------------------------------------------------------------

    def _run(self, forward: Any, micro_batches: Sequence[MicroBatch], forward_only: bool) -> list[Any]:
        """Megatron's schedule over the micro-batches; `forward` runs the model and says what to do with its output."""
        iterators = [iter(list(enumerate(micro_batches))) for _ in self.chunks]
        schedule = get_forward_backward_func()
        return schedule(
            forward_step_func=forward,
            data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
            model=self.ddp,
            num_microbatches=len(micro_batches),
            seq_length=max(len(batch.tokens) for batch in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _check_counts(self, count: int) -> None:
        """Ranks that wait for each other must have the same number of micro-batches (`layout.even_out` sees to it)."""
        p = self.settings.parallel
        if p.vpp > 1 and count % p.pp:
            raise ValueError(f"{count} micro-batches, but an interleaved pipeline runs a multiple of pp = {p.pp}")
        if p.ep * p.etp > p.tp * p.cp and not ranks.same_over_replicas(count, self.device):
            raise ValueError(f"{count} micro-batches, but replicas that share experts must have equally many")

    def _hidden(self, model: Any, batch: MicroBatch, pack: Pack) -> Tensor:
        """(this rank's tokens, hidden) the final hidden states, or what the next pipeline stage gets."""
        with part("layers"):
            return model(
                self._tensor(batch.tokens)[pack.rows][None],
                None,
                None,
                packed_seq_params=pack,
                output_processor=lambda hidden_states, **_: hidden_states.squeeze(1),
            )

    def _pack(self, batch: MicroBatch, agreement: Agreement | None) -> Pack:
        routes = None
        if self.settings.routing_replay and batch.routes is not None:
            tokens = len(routed_rows(batch.cu_tokens, self.place))
            expected = (tokens, len(self.place.moe_columns), self.config.moe_router_topk)
            if batch.routes.shape != expected:
                raise ValueError(f"routes of shape {batch.routes.shape}, but this rank needs {expected}")
            routes = self._tensor(batch.routes)
        context = (self.settings.parallel.cp, self.place.cp)
        return pack(self._tensor(batch.cu_tokens), routes, agreement if routes is not None else None, context)

    def _agreement(self, batch: MicroBatch) -> Agreement | None:
        if not (self.settings.routing_replay and batch.routes is not None):
            return None
        rows = routed_rows(batch.cu_tokens, self.place)
        return Agreement(self._tensor(batch.sample[rows] != PADDING))

    def _logprobs(self, hidden: Tensor, batch: MicroBatch, pack: Pack) -> tuple[Tensor, Tensor]:
        """(tokens,) of the whole micro-batch: each rank of the last stage goes on with all of it."""
        with part("log-probabilities"):
            return self._head(hidden, batch, pack)

    def _head(self, hidden: Tensor, batch: MicroBatch, pack: Pack) -> tuple[Tensor, Tensor]:
        head = head_of(self.chunks[-1])
        logp, entropy = token_logprobs(
            ranks.whole_sequence(hidden) if self.settings.parallel.sp else hidden,
            head,
            self._tensor(batch.targets)[pack.rows],
            softcap=self.checkpoint.softcap,
            temperature=self.settings.temperature,
            numerics=self.settings.numerics,
            chunk_tokens=self.settings.chunk_tokens,
            tp_group=ranks.vocabulary_group(),
            head_gradient=getattr(head, "main_grad", None),  # where Megatron would add each micro-batch's to it
        )
        if self.settings.parallel.cp > 1:
            logp, entropy = (ranks.whole_context(values, pack.gathered_order) for values in (logp, entropy))
        return logp, entropy

    def _tensor(self, array: Any) -> Tensor:
        return torch.tensor(array, device=self.device)


def _finalize_gradients(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's sum over ranks, without its division by a number of tokens: our weights are normalized already."""
    kwargs.pop("force_all_reduce", None)
    finalize_model_grads(model, None, **kwargs)
