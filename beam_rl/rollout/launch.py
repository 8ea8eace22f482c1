"""How an engine's settings become a running vLLM: environment, arguments, process.

The only module that knows vLLM's argument names. Imports vLLM late, because the environment has to stand before.
"""

import difflib
import logging
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from beam_rl.errors import InputError
from beam_rl.lora import Adapter
from beam_rl.mxfp8.scheme import Scheme
from beam_rl.recipe.tree import EngineParallel, Speculative
from beam_rl.rollout import compat, process

CPU_BLOCK_TOKENS = 32  # the smallest KV-cache block that vLLM's CPU attention is fast with
CPU_ENVIRONMENT = {
    # The engine core keeps the model in its own process instead of starting another one: half the start-up time, and one
    # process less to lose. vLLM would insist on that process to bind threads to cores; we bind none.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # needs Triton; the route recorder reads the first one's tables
    "TORCHDYNAMO_DISABLE": "1",  # vLLM's samplers would compile for half a minute at the first step
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class EngineSettings:
    """Everything an engine has to know."""

    model: str  # a checkpoint's folder
    dtype: Literal["fp32", "bf16"]
    max_model_len: int  # tokens, prompt and response together
    max_num_seqs: int
    max_batched_tokens: int  # in one step
    kv_cache_gib: float  # CPU engines
    gpu_memory_utilization: float  # GPU engines
    seed: int
    routing_replay: bool
    host: str  # this machine's address for its peers
    log_dir: str
    name: str = "engine"  # of the log file
    adapter: Adapter | None = None  # served beside the checkpoint; None: no LoRA
    fp32_head: bool = False  # the head's product in FP32, and the logits
    mxfp8: Scheme | None = None  # the weights that are MXFP8; None: none is
    random_weights: bool = False  # in the place of the checkpoint's, to measure with
    parallel: EngineParallel = EngineParallel()
    devices: str | None = None  # CUDA_VISIBLE_DEVICES; None: those that this process sees
    sleeps: bool = False  # GPU engines: can give back the GPU's memory for a while
    speculative: Speculative | None = None
    tokenizer: str | None = None  # a folder, for requests with stop strings; None: there are none
    traces: Literal["none", "operations", "python"] = "none"  # can write such, of what it does
    extra: dict[str, Any] = field(default_factory=dict)  # vLLM's arguments, from the recipe's `rollout.engine_args`

    @property
    def log(self) -> Path:
        return Path(self.log_dir, f"{self.name}.log")


def set_environment(settings: EngineSettings) -> None:
    """Sets what vLLM reads from the environment, before it is imported; children inherit it."""
    os.environ.update(
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_ALLOW_INSECURE_SERIALIZATION="0",  # whatever the user's shell says: nothing is unpickled
        VLLM_HOST_IP=settings.host,
        VLLM_LOGGING_COLOR="0",
        NO_COLOR="1",
    )
    if compat.installed()[0] == "vllm-cpu":
        os.environ.update(CPU_ENVIRONMENT)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if settings.devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.devices
    if settings.host == "127.0.0.1":  # or they listen on the interface that the machine's name resolves to
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    if Path(settings.model).is_dir():
        os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    process.own_children()


def launch(settings: EngineSettings, stat_loggers: list[Any] | None = None) -> Any:
    """Starts vLLM and returns its `AsyncLLM`; everything that its processes print goes to the engine's log.

    stat_loggers: what vLLM makes its loggers of numbers by; None: it keeps none.
    """
    settings.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with process.output_to(settings.log):
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            config = AsyncEngineArgs(**engine_args(settings)).create_engine_config()
            compat.fork_processes()
            # Into no variable: an exception that an import of these keeps holds on to this frame, and so to the engine.
            return AsyncLLM.from_vllm_config(config, stat_loggers=stat_loggers, disable_log_stats=not stat_loggers)
    finally:
        for handler in logging.getLogger("vllm").handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(settings.log.open("a"))


def engine_args(settings: EngineSettings) -> dict[str, Any]:
    """vLLM's arguments."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.platforms import current_platform

    from beam_rl.rollout.mxfp8 import MXFP8, to_plain
    from beam_rl.rollout.plugin import TRANSFER_BACKEND

    args: dict[str, Any] = {
        "model": settings.model,
        "dtype": DTYPES[settings.dtype],
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_batched_tokens,
        **({"tokenizer": settings.tokenizer} if settings.tokenizer else {"skip_tokenizer_init": True}),
        "generation_config": "vllm",  # sampling follows the request alone, not the checkpoint's defaults
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "weight_transfer_config": WeightTransferConfig(backend=TRANSFER_BACKEND),
        "worker_extension_cls": "beam_rl.rollout.extension.Extension",
        "load_format": "dummy" if settings.random_weights else "auto",
        **_parallel_args(settings.parallel),
    }
    args |= _cpu_args(settings) if current_platform.is_cpu() else _gpu_args(settings)
    overrides: dict[str, Any] = {"head_dtype": "float32"} if settings.fp32_head else {}
    if settings.mxfp8 is not None:
        args |= {"additional_config": args["additional_config"] | {MXFP8: to_plain(settings.mxfp8)}}
        overrides |= _mxfp8_overrides(settings.mxfp8)
    if overrides:
        args["hf_overrides"] = overrides
    if settings.adapter is not None:
        args |= _adapter_args(settings.adapter, args["additional_config"])
    if settings.traces != "none":
        args["profiler_config"] = _profiler_args(settings)
    if settings.speculative is not None:
        args |= _speculative_args(settings.speculative)
    return args | _checked(settings.extra, args)


def _profiler_args(settings: EngineSettings) -> dict[str, Any]:
    """Of the engine's own processes, not of the one that hands it requests."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": settings.log_dir,
        "torch_profiler_with_stack": settings.traces == "python",
        "torch_profiler_use_gzip": False,
        "ignore_frontend": True,
    }


def _speculative_args(speculative: Speculative) -> dict[str, Any]:
    config = {"method": speculative.method, "num_speculative_tokens": speculative.tokens, **speculative.options}
    return {"speculative_config": config | ({"model": speculative.model} if speculative.model else {})}


def _checked(extra: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The recipe's own arguments for vLLM. InputError for one that vLLM lacks or that is set here."""
    from vllm import AsyncEngineArgs

    known = [f.name for f in fields(AsyncEngineArgs)]
    for name in extra:
        if name in own:
            raise InputError(f"rollout.engine_args.{name}: this is set for these engines already; leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"rollout.engine_args.{name}: {' '.join(compat.installed())} has no such argument{hint}")
    return extra


def _parallel_args(parallel: EngineParallel) -> dict[str, Any]:
    """An engine's workers are processes of one machine, whoever starts it."""
    args: dict[str, Any] = {
        "tensor_parallel_size": parallel.tp,
        "pipeline_parallel_size": parallel.pp,
        "data_parallel_size": parallel.dp,
        "enable_expert_parallel": parallel.ep > 1,
    }
    return args | ({"distributed_executor_backend": "mp"} if parallel.workers > 1 else {})


def _adapter_args(adapter: Adapter, additional_config: dict[str, Any]) -> dict[str, Any]:
    from beam_rl.rollout.adapter import ADAPTER, to_plain
    from beam_rl.rollout.names import adapted_modules

    return {
        "enable_lora": True,
        "max_loras": 1,  # an update waits until nothing samples, so one slot is enough and memory is what slots cost
        "max_lora_rank": compat.allowed_rank(max(adapter.rank, adapter.expert_rank)),
        "lora_target_modules": adapted_modules(adapter.targets),
        "additional_config": additional_config | {ADAPTER: to_plain(adapter)},
    }


def _mxfp8_overrides(scheme: Scheme) -> dict[str, Any]:
    """vLLM quantizes on a GPU alone; whatever the checkpoint says, the scheme says which weights."""
    from vllm.platforms import current_platform

    return {"quantization_config": None if current_platform.is_cpu() else scheme.hf_config()}


def refuse_on_cpu(parallel: EngineParallel) -> None:
    """ValueError for what an engine on a CPU lacks: its own experts and the recorder of routes know no other replicas."""
    for key, use in (("dp", "rollout.engines"), ("ep", "rollout.parallel.tp alone")):
        if (size := getattr(parallel, key)) > 1:
            raise ValueError(f"rollout.parallel.{key} = {size}: needs GPUs; on a CPU use {use}")


def _cpu_args(settings: EngineSettings) -> dict[str, Any]:
    from beam_rl.rollout.worker import RECORD_ROUTES

    refuse_on_cpu(settings.parallel)
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30),
        "block_size": CPU_BLOCK_TOKENS,
        "worker_cls": "beam_rl.rollout.worker.CpuWorker",
        "additional_config": {RECORD_ROUTES: settings.routing_replay},
    }


def _gpu_args(settings: EngineSettings) -> dict[str, Any]:
    return {
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "additional_config": {},
        "enable_return_routed_experts": settings.routing_replay,
        "enable_sleep_mode": settings.sleeps,
    }
