"""A tiny random Beam and micro-batches for the tests of beam_rl.megatron. Importing it makes Megatron importable.

The weights are large enough for attention, gates and routers to matter, and no bias is zero.
"""

import atexit
import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.beam import BeamConfig, BeamForCausalLM

from beam_rl.algorithms.losses import LossInputs, TokenLoss
from beam_rl.megatron import compat

compat.install()

from beam_rl.megatron.settings import TrainerSettings  # noqa: E402
from beam_rl.megatron.trainer import Trainer  # noqa: E402
from beam_rl.recipe.tree import Optimizer, Parallel  # noqa: E402
from beam_rl.samples import MicroBatch  # noqa: E402
from beam_rl.seats import LOOPBACK, free_port  # noqa: E402

VOCAB, EXPERTS, TOP_K, MOE_LAYERS = 64, 16, 4, 4
replace = dataclasses.replace
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKPOINT = {"mxfp8": "bf16"}  # which one a precision that is not a dtype trains


@functools.cache
def checkpoint(precision: str = "fp32") -> Path:
    """A HF checkpoint folder, made once for this process and the ones that it starts."""
    folder = _folder() / precision
    if folder.exists():
        return folder
    model = make_model()
    model.save_pretrained(folder)
    if precision == "bf16":  # transformers keeps the router FP32 when it loads, not in `.to()`
        model = BeamForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="tiny-beam-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _use_folder(folder: Path) -> None:
    """In a new process: the checkpoints of the one that started it."""
    global _folder
    _folder = lambda: folder  # type: ignore[assignment]  # noqa: E731


def make_model() -> BeamForCausalLM:
    torch.manual_seed(0)
    config = BeamConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=7,
        mlp_layer_types=["dense"] * 3 + ["sparse"] * MOE_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=8,
        moe_intermediate_size=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=4,
        topk_group=2,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    model = BeamForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(5.0)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model


def config() -> dict[str, Any]:
    """The checkpoint's config.json."""
    return json.loads((checkpoint() / "config.json").read_text())


def reference_model(precision: str = "fp32", attention: str = "eager") -> BeamForCausalLM:
    return BeamForCausalLM.from_pretrained(
        checkpoint(precision), dtype=DTYPES[precision], attn_implementation=attention
    ).eval()


def settings(**changes: Any) -> TrainerSettings:
    base: dict[str, Any] = {
        "precision": "fp32",
        "numerics": "reference",
        "temperature": 1.0,
        "routing_replay": True,
        "deterministic": torch.cuda.is_available(),  # a GPU sums gradients in another order each time
        "seed": 0,
        "optimizer": Optimizer(lr=1e-3, weight_decay=0.1),
        "parallel": Parallel(),
    }
    return TrainerSettings(**(base | changes))


def trainer(**changes: Any) -> Trainer:
    """A trainer of one rank; trainers of one process share their process group."""
    s = settings(**changes)
    return Trainer(str(checkpoint(CHECKPOINT.get(s.precision, s.precision))), s, 0, 1, meeting_point())


def micro_batch(lengths: Sequence[int], seed: int = 0, routes: bool = True) -> MicroBatch:
    """Random samples of the given lengths; sample i is the same whichever others it is packed with."""
    return join([_sample(n, seed + i, i, routes) for i, n in enumerate(lengths)])


def _sample(n: int, seed: int, index: int, routes: bool) -> MicroBatch:
    rng = np.random.default_rng(seed)
    response = np.arange(n) >= n // 3
    chosen = [[rng.permutation(EXPERTS)[:TOP_K] for _ in range(MOE_LAYERS)] for _ in range(n)]
    return MicroBatch(
        tokens=rng.integers(0, VOCAB, n),
        targets=rng.integers(0, VOCAB, n),
        cu_tokens=np.array([0, n], np.int32),
        response=response,
        logp_engine=rng.normal(-4, 0.5, n).astype(np.float32),
        advantage=np.full(n, rng.normal(), np.float32),
        weight=np.where(response, 0.01, 0).astype(np.float32),
        sample=np.full(n, index, np.int32),
        routes=np.array(chosen, np.uint8) if routes else None,
        logp_old=rng.normal(-4, 0.5, n).astype(np.float32),
        logp_reference=rng.normal(-4, 0.5, n).astype(np.float32),
    )


def join(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Micro-batches one after the other, as one."""
    parts = {name: [getattr(b, name) for b in batches] for name in MicroBatch.__dataclass_fields__}
    starts = np.cumsum([0, *(len(tokens) for tokens in parts["tokens"])])
    ends = [cu[1:] + start for cu, start in zip(parts.pop("cu_tokens"), starts[:-1], strict=True)]
    cu = np.concatenate([[0], *ends]).astype(np.int32)
    return MicroBatch(cu_tokens=cu, **{k: None if v[0] is None else np.concatenate(v) for k, v in parts.items()})


def squared_objective(inputs: LossInputs) -> TokenLoss:
    """A loss with a gradient everywhere that depends on each input."""
    ratio = torch.exp(0.1 * (inputs.logp - inputs.logp_old))
    assert inputs.logp_reference is not None
    kl = (inputs.logp - inputs.logp_reference).square()
    loss = -inputs.advantage * ratio + 0.01 * kl
    return TokenLoss(loss=torch.where(inputs.response, loss, 0.0), clipped=ratio > 1.05, kl=kl.detach())


def meeting_point() -> str:
    """Where ranks on this machine can meet."""
    return f"{LOOPBACK}:{free_port(LOOPBACK)}"


@functools.cache
def _processes() -> Any:
    """New processes that have Megatron imported already: a server imports it once and is forked."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # the server's way to this module
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_tiny"])
    return context


def in_new_processes(function: Callable[..., Any], *arguments: Sequence[Any], timeout_s: float = 120) -> list[Any]:
    """function(*arguments[i]) each in a process of its own, at the same time."""
    for precision in DTYPES:
        checkpoint(precision)
    share = {"initializer": _use_folder, "initargs": (_folder(),)}
    with ProcessPoolExecutor(len(arguments), mp_context=_processes(), max_tasks_per_child=1, **share) as pool:
        return [future.result(timeout=timeout_s) for future in [pool.submit(function, *a) for a in arguments]]
