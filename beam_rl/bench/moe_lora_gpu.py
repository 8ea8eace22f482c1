"""Decode speed with LoRA on Beam-shaped layers, on one GPU: without LoRA, padded, at true rank, and with our kernels.

The model is vLLM's Qwen3-MoE in Beam's shape with random weights (vLLM's native Beam has no LoRA): whole experts, or one
of eight tensor-parallel shards. Each engine runs in a process of its own, one after the other; their imports overlap. The
figure is the token rate with our kernels, the limit the rate without LoRA; what each kernel takes comes from a trace.
"""

import json
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from beam_rl.bench.result import Result

HIDDEN, EXPERTS, TOP_K, HEAD_DIM, VOCABULARY = 5120, 256, 8, 128, 32_000
RANK, ADAPTER = 64, 1
PROMPT_TOKENS, NEW_TOKENS, RUNS = 16, 256, 5
TARGETS = ["qkv_proj", "o_proj", "experts"]
A_STD, B_STD = 0.02, 1e-5  # random, and too small to change which experts the tokens go to
TRACED_STEPS = 12


class Mode(StrEnum):
    none = "none"  # no LoRA
    padded = "padded"  # expert slots of the dense modules' rank, as vLLM has them
    exact = "exact"  # expert slots at rank / top_k, vLLM's kernels
    ours = "ours"  # the same with `rollout.kernels`


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int
    inner: int  # of an expert

    def weight_bytes(self, tokens: int) -> int:
        """Bytes of weights that a decode step reads, for uniform routing."""
        attention = HIDDEN * HEAD_DIM * 2 * (self.heads + self.kv_heads)
        experts = 3 * HIDDEN * self.inner * experts_hit(tokens)
        return int(2 * (self.layers * (attention + experts + HIDDEN * EXPERTS) + HIDDEN * VOCABULARY))

    def adapter_bytes(self, tokens: int, expert_rank: int) -> int:
        """Bytes of adapters that a decode step reads."""
        attention = RANK * (4 * HIDDEN + HEAD_DIM * (2 * self.heads + 2 * self.kv_heads))
        experts = 3 * expert_rank * (HIDDEN + self.inner) * experts_hit(tokens)
        return int(2 * self.layers * (attention + experts))


SHAPES = {"whole": Shape(4, 48, 8, 2560), "shard": Shape(8, 6, 1, 320)}


def experts_hit(tokens: int) -> float:
    """Expected number of different experts of a layer that a step's tokens go to."""
    return EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)


def bench(shape: str, concurrency: int, modes: Sequence[Mode] = tuple(Mode)) -> Result:
    """Runs each mode's engine and sets the rates side by side."""
    context = get_context("spawn")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    children = []
    for mode in modes:
        ours, theirs = context.Pipe()
        child = context.Process(target=_child, args=(theirs, shape, mode, concurrency))
        child.start()
        theirs.close()
        children.append((mode, child, ours))
    outcomes: dict[str, Any] = {}
    for mode, child, pipe in children:
        try:
            pipe.send("go")
            outcomes[mode.value] = pipe.recv()
        except EOFError:
            outcomes[mode.value] = {"failed": "its process ended"}
        child.join()
    bandwidth = outcomes[modes[0].value].get("bandwidth_bytes_a_second", 0)
    return _result(shape, concurrency, outcomes, bandwidth)


def _result(shape: str, concurrency: int, outcomes: dict[str, Any], bandwidth: float) -> Result:
    from beam_rl.bench import measure

    rate = {mode: outcome.get("tokens_a_second", 0.0) for mode, outcome in outcomes.items()}
    limit = rate.get("none", 0.0) or float("nan")
    size = SHAPES[shape]
    for mode, outcome in outcomes.items():
        ranks = {"none": 0, "padded": RANK}
        read = size.weight_bytes(concurrency)
        read += size.adapter_bytes(concurrency, ranks.get(mode, RANK // TOP_K)) if mode != "none" else 0
        outcome["share_of_no_lora"] = rate[mode] / limit
        if bandwidth:
            outcome["floor_ms_a_step"] = read / bandwidth * 1e3
    return Result(
        name="moe-lora",
        figure=rate.get("ours", 0.0),
        unit="tokens/s",
        limit=limit,
        machine=measure.machine(measure.device()),
        detail={
            "shape": shape, **asdict(size), "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K, "rank": RANK,
            "expert_rank": RANK // TOP_K, "concurrency": concurrency, "new_tokens": NEW_TOKENS,
            "bandwidth_bytes_a_second": bandwidth, "modes": outcomes,
        },
    )  # fmt: skip


def _child(pipe: Any, shape: str, mode: Mode, concurrency: int) -> None:
    import vllm  # noqa: F401  # takes half a minute, while others run

    pipe.recv()
    try:
        pipe.send(run(SHAPES[shape], mode, concurrency))
    except Exception as error:
        pipe.send({"failed": f"{type(error).__name__}: {error}"[:500]})
        raise


def run(shape: Shape, mode: Mode, concurrency: int) -> dict[str, Any]:
    """One engine: its rate, its step, its slots' bytes and a table of its kernels."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    began = time.perf_counter()
    llm = _engine(shape, mode, concurrency)
    started_s = time.perf_counter() - began
    request = None if mode == Mode.none else LoRARequest("adapter", ADAPTER, "/held in memory")
    if request:
        llm.collective_rpc(_add_adapter)
    prompts = [
        {"prompt_token_ids": [(7919 * i + 104_729 * j) % VOCABULARY for j in range(PROMPT_TOKENS)]}
        for i in range(1, concurrency + 1)
    ]

    def seconds(new_tokens: int) -> float:
        options = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        done = llm.generate(prompts, options, use_tqdm=False, lora_request=request)
        took = time.perf_counter() - start
        assert all(len(o.outputs[0].token_ids) == new_tokens for o in done)
        return took

    seconds(32)
    slot_bytes = llm.collective_rpc(_fill_slots)[0] if request else 0
    seconds(32)
    short = statistics.median(seconds(32) for _ in range(RUNS))
    runs = sorted(seconds(NEW_TOKENS) for _ in range(RUNS))
    took = statistics.median(runs)
    return {
        "tokens_a_second": concurrency * NEW_TOKENS / took,
        "spread": [concurrency * NEW_TOKENS / runs[-1], concurrency * NEW_TOKENS / runs[0]],
        "step_ms": (took - short) / (NEW_TOKENS - 32) * 1e3,
        "expert_slot_bytes": slot_bytes,
        "engine_start_seconds": started_s,
        "bandwidth_bytes_a_second": _bandwidth() if mode == Mode.none else None,
        "trace": _trace(lambda: seconds(32), 2 * shape.layers),
    }


def _engine(shape: Shape, mode: Mode, concurrency: int) -> Any:
    from vllm import LLM

    from beam_rl.rollout import compat_gpu

    if mode in (Mode.exact, Mode.ours):
        compat_gpu.hold_experts_at_true_rank()
    if mode == Mode.ours:
        compat_gpu.install()
    folder = Path(tempfile.mkdtemp())
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": HEAD_DIM,
        "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_theta": 10000.0, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "moe_intermediate_size": shape.inner, "norm_topk_prob": True,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK, "lora_target_modules": TARGETS}
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= concurrency]
    return LLM(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024,
        max_num_seqs=concurrency, max_num_batched_tokens=2048, gpu_memory_utilization=0.85, seed=0,
        enable_prefix_caching=False, compilation_config={"cudagraph_capture_sizes": sizes},
        **({} if mode == Mode.none else lora),
    )  # fmt: skip


def _add_adapter(worker: Any) -> None:
    from vllm.lora.request import LoRARequest

    manager = worker.model_runner.lora_manager
    manager.add_dummy_lora(LoRARequest("adapter", ADAPTER, "/held in memory"), rank=RANK // TOP_K)


def _fill_slots(worker: Any) -> int:
    """Random values in every slot of the adapter that is active; returns the bytes of the experts' slots."""
    experts = 0
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "w13_lora_a_stacked"):
            a = (*module.w13_lora_a_stacked, *module.w2_lora_a_stacked)
            b = (*module.w13_lora_b_stacked, *module.w2_lora_b_stacked)
            experts += sum(t.numel() * t.element_size() for t in (*a, *b))
        elif hasattr(module, "lora_a_stacked"):
            a, b = module.lora_a_stacked, module.lora_b_stacked
        else:
            continue
        for tensors, std in ((a, A_STD), (b, B_STD)):
            for tensor in tensors:
                tensor.normal_(std=std)
    return experts


def _bandwidth() -> float:
    """Bytes a second of a large device copy, read and written."""
    import torch
    from triton.testing import do_bench

    torch.cuda.empty_cache()
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_(256)
    target = torch.empty_like(source)
    return 2 * source.numel() / (do_bench(lambda: target.copy_(source), return_mode="median") * 1e-3)


def _trace(work: Any, gemms_a_step: int) -> dict[str, Any]:
    """Microseconds of each kernel in a decode step, from a trace of `work`'s last steps.

    A step is told by its expert GEMMs: the window is from the first GEMM of one step to that of a later one.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    kernels = [e for e in trace.profiler.kineto_results.events() if e.device_type() == cuda]
    kernels = sorted((e.start_ns(), e.duration_ns(), e.name()) for e in kernels)
    starts = [start for start, _, name in kernels if "fused_moe_kernel" in name]
    steps = min(TRACED_STEPS, len(starts) // gemms_a_step - 3)
    first, last = starts[-(steps + 2) * gemms_a_step], starts[-2 * gemms_a_step]
    window = [(d, _short(name)) for start, d, name in kernels if first <= start < last]
    busy, launches = Counter(), Counter()
    for duration, name in window:
        busy[name] += duration
        launches[name] += 1
    return {
        "steps": steps,
        "step_ms": (last - first) / steps / 1e6,
        "kernels_ms": sum(busy.values()) / steps / 1e6,
        "launches": len(window) / steps,
        "us_a_step": {n: [round(d / steps / 1e3, 1), launches[n] / steps] for n, d in busy.most_common(30)},
    }


def _short(name: str) -> str:
    name = re.sub(r"^void |\(.*$|<.*$", "", name)
    return name[:60]
