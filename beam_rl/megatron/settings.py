"""What a trainer is told and what it gives back. Plain: importing it starts neither torch nor Megatron."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from beam_rl.lora import Adapter
from beam_rl.mxfp8.scheme import Scheme
from beam_rl.recipe.tree import Mxfp8, Optimizer, Parallel

ExportForm = Literal["adapter", "merged", "full", "mxfp8"]


@dataclass(frozen=True)
class TrainerSettings:
    precision: Literal["fp32", "bf16", "mxfp8"]  # of every weight but the router's; mxfp8: BF16, projections in MXFP8
    numerics: Literal["engine", "reference", "fp32_head"]  # of the logits, see `logprobs.token_logprobs`
    temperature: float  # as at sampling
    routing_replay: bool  # use a micro-batch's routes where it has them
    deterministic: bool
    seed: int
    optimizer: Optimizer
    parallel: Parallel
    mxfp8: Mxfp8 = Mxfp8()  # with precision mxfp8: the layers that are not
    engine_mxfp8: Scheme | None = None  # the weights that engines get in MXFP8; None: none
    recompute: Literal["none", "selective", "full"] = "none"
    collective_timeout_s: float = 600.0  # for one rank to wait for the others in one operation
    chunk_tokens: int = 2048  # tokens whose logits exist at one time
    adapter: Adapter | None = None  # train this and leave the checkpoint's weights as they are; None: train them all
    wait_in: Literal["host", "nvme"] = "host"  # what the device holds, while others have it; nvme: in `nvme.path`
    nvme_folder: str | None = None  # this run's own, on each node; every rank makes one of its own in it
    adapter_folder: str | None = None  # the HF adapter to start from; None: a new one, which adds nothing


@dataclass(frozen=True)
class Score:
    """One micro-batch under the policy; position i is about predicting `targets[i]`."""

    logp: NDArray[np.float32]  # (tokens,) natural-log probability of the target
    entropy: NDArray[np.float32]  # (tokens,) nats
    # Over the whole model, whichever ranks hold its layers, and without padding:
    routes_agree: int  # (token, MoE layer) pairs whose replayed set of experts is the router's own choice too
    routes_total: int  # pairs that were replayed
