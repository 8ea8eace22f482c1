"""One rank of the policy: scores samples, learns from them, hands out its weights, saves and restores itself.

A rank is driven from outside with micro-batches; every rank gets the same calls in the same order. The loss is
injected. Knows nothing about Ray, vLLM, rewards or recipes.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from beam_rl.algorithms.losses import LossInputs, TokenLoss
from beam_rl.megatron import checkpoint, compat
from beam_rl.megatron.bridge import BeamCheckpoint
from beam_rl.megatron.export import export_checkpoint
from beam_rl.megatron.logprobs import token_logprobs
from beam_rl.megatron.model import BeamModel, build_model, config_from_hf
from beam_rl.megatron.optimizer import make_optimizer, set_lr, with_gradient_buffers
from beam_rl.megatron.packing import Agreement, Pack, pack
from beam_rl.megatron.settings import Score, TrainerSettings
from beam_rl.samples import MicroBatch

compat.require_installed()

Objective = Callable[[LossInputs], TokenLoss]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Trainer:
    @torch.enable_grad()
    def __init__(self, model_path: str, settings: TrainerSettings, rank: int, world_size: int, master: str) -> None:
        """Loads the checkpoint and joins the other ranks.

        Args:
            model_path: a folder with a Beam checkpoint in HF format. master: "host:port" where the ranks meet.
        Raises:
            InputError: not a Beam checkpoint. ValueError: `world_size` does not fit `settings.parallel`.
        """
        self.settings = settings
        self.checkpoint = BeamCheckpoint(model_path)
        self.device = _start_process(settings)
        _join_ranks(settings, rank, world_size, master)
        self.config = config_from_hf(self.checkpoint.config, DTYPES[settings.precision], self.device)
        self.config.finalize_model_grads_func = _finalize_gradients
        first, last = (parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())
        self.model: BeamModel = build_model(self.config, first, last).to(self.device)
        self.checkpoint.load_into(self.model)
        self.ddp = with_gradient_buffers(self.model)
        self.optimizer = make_optimizer(self.ddp, settings.optimizer)
        self._reference: dict[str, Tensor] | None = None  # on the host

    def close(self) -> None:
        """Leaves the group of ranks; the process may start another trainer."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

    # --- scoring -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Score]:
        """Log-probabilities and entropies of every position under the policy as it is now."""
        if not micro_batches:
            return []
        self.model.eval()

        def forward(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            batch, agreement = next(batches), Agreement()
            hidden = self._hidden(model, batch, agreement)

            def collect(hidden: Tensor, non_loss_data: bool = False) -> Score:
                logp, entropy = self._logprobs(hidden, batch)
                return Score(logp.cpu().numpy(), entropy.cpu().numpy(), agreement.agree, agreement.total)

            return hidden, collect

        return self._run(forward, micro_batches, forward_only=True)

    def score_reference(self, micro_batches: Sequence[MicroBatch]) -> list[Score]:
        """The same under the frozen starting policy: the weights at `model_path`, also after a resume."""
        live = self._weights_on_host()
        if self._reference is None:
            self.checkpoint.load_into(self.model)
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
        self.model.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        totals = torch.zeros(5, dtype=torch.float64)  # loss, response tokens, clipped, entropy, KL

        def forward(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            batch = next(batches)
            hidden = self._hidden(model, batch, None)

            def loss(hidden: Tensor) -> tuple[Tensor, Tensor, None]:
                total, sums = self._loss(hidden, batch, objective)
                totals.add_(sums)
                return total, torch.tensor(0, dtype=torch.int), None

            return hidden, loss

        if micro_batches:
            self._run(forward, micro_batches, forward_only=False)
        else:  # a rank without samples still takes part in the gradient's sum
            _finalize_gradients([self.ddp])
        metrics = self._metrics(totals)
        set_lr(self.optimizer, lr)
        _, grad_norm, _ = self.optimizer.step()
        return metrics | {"optim/grad_norm": float(grad_norm), "optim/lr": lr}

    def _loss(self, hidden: Tensor, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the loss, and its part of the metrics' sums."""
        logp, entropy = self._logprobs(hidden, batch)
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
        dist.all_reduce(on_device, group=parallel_state.get_data_parallel_group())
        loss, tokens, clipped, entropy, kl = on_device.tolist()
        router = [p.main_grad for name, p in self.model.named_parameters() if name.endswith("router.weight")]
        router_norm = float(torch.stack([grad.square().sum() for grad in router]).sum().sqrt()) if router else 0.0
        buffers = self.ddp.buffers + self.ddp.expert_parallel_buffers
        finite = all(bool(buffer.grad_data.isfinite().all()) for buffer in buffers)
        if not (finite and math.isfinite(loss)):
            what = "a gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
            raise FloatingPointError(f"{what}; the weights are as they were before this update")
        tokens = max(tokens, 1.0)
        return {
            "loss/policy": loss,
            "loss/clip_fraction": clipped / tokens,
            "loss/entropy": entropy / tokens,
            "loss/kl": kl / tokens,
            "optim/router_grad_norm": router_norm,
        }

    # --- weights and state ---------------------------------------------------------------------------------

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its HF name, one after the other, in its own dtype; all ranks call it and get them all."""
        with torch.no_grad():
            yield from self.checkpoint.tensors_of(self.model)

    def export(self, folder: Path) -> None:
        """Writes the policy as a HF checkpoint; all ranks call it, the first one writes.

        Raises:
            InputError: the folder exists and is not empty.
        """
        if dist.get_rank() == 0:
            export_checkpoint(self.hf_tensors(), self.checkpoint.folder, folder, self.config.params_dtype)
        else:
            for _ in self.hf_tensors():
                pass
        dist.barrier()

    def save(self, folder: Path) -> None:
        """Writes what a resumed run needs to go on as if nothing had happened; all ranks call it."""
        checkpoint.save(folder, self.model, self.optimizer)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote; all ranks call it. InputError if the folder does not fit this model."""
        checkpoint.load(folder, self.model, self.optimizer)

    def _weights_on_host(self) -> dict[str, Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._weights()}

    @torch.no_grad()
    def _put_weights(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in self._weights():
            tensor.copy_(weights[name])

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()  # the routers' correction biases

    # --- one forward pass ----------------------------------------------------------------------------------

    def _run(self, forward: Any, micro_batches: Sequence[MicroBatch], forward_only: bool) -> list[Any]:
        """Megatron's schedule over the micro-batches; `forward` runs the model and says what to do with its output."""
        schedule = get_forward_backward_func()
        return schedule(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=[self.ddp],
            num_microbatches=len(micro_batches),
            seq_length=max(len(batch.tokens) for batch in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _hidden(self, model: Any, batch: MicroBatch, agreement: Agreement | None) -> Tensor:
        """(tokens, hidden) the final hidden states, or what the next pipeline stage gets."""
        return model(
            self._tensor(batch.tokens)[None],
            None,
            None,
            packed_seq_params=self._pack(batch, agreement),
            output_processor=lambda hidden_states, **_: hidden_states.squeeze(1),
        )

    def _pack(self, batch: MicroBatch, agreement: Agreement | None) -> Pack:
        routes = None
        if self.settings.routing_replay and batch.routes is not None:
            expected = (len(batch.tokens), len(self.config.moe_layers), self.config.moe_router_topk)
            if batch.routes.shape != expected:
                raise ValueError(f"routes of shape {batch.routes.shape}, but the model needs {expected}")
            routes = self._tensor(batch.routes).long()
        return pack(self._tensor(batch.cu_tokens), routes, agreement if routes is not None else None)

    def _logprobs(self, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden,
            self.model.output_layer.weight,
            self._tensor(batch.targets),
            softcap=self.config.final_logit_softcapping,
            temperature=self.settings.temperature,
            numerics=self.settings.numerics,
            chunk_tokens=self.settings.chunk_tokens,
        )

    def _tensor(self, array: Any) -> Tensor:
        return torch.tensor(array, device=self.device)


def _finalize_gradients(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's sum over ranks, without its division by a number of tokens: our weights are normalized already."""
    kwargs.pop("force_all_reduce", None)
    finalize_model_grads(model, None, **kwargs)


def _start_process(settings: TrainerSettings) -> torch.device:
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # whoever starts the process shows it one GPU
        return torch.device("cuda", 0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return torch.device("cpu")


def _join_ranks(settings: TrainerSettings, rank: int, world_size: int, master: str) -> None:
    if world_size != settings.parallel.dp:
        raise ValueError(f"trainer.parallel.dp = {settings.parallel.dp}, but there are {world_size} trainer ranks")
    if dist.is_initialized():  # by an earlier trainer of this process
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ValueError(f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already")
    else:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://{master}", rank=rank, world_size=world_size)
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)
