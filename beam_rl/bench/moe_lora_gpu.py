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

import typer

from beam_rl.bench.result import Result

HIDDEN, EXPERTS, TOP_K, HEAD_DIM, VOCABULARY = 5120, 256, 8, 128, 32_000
RANK, ADAPTER = 64, 1
PROMPT_TOKENS, NEW_TOKENS, FEW_TOKENS, RUNS = 16, 256, 32, 3
TARGETS = ["qkv_proj", "o_proj", "experts"]
A_STD, B_STD = 0.02, 1e-5  # random, and too small to change which experts the tokens go to
PROBE_B_STD = 0.01  # LoRA as large as the base: to compare values
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

    def bytes(self) -> int:
        """Bytes of the model's weights."""
        return self._bytes(EXPERTS, 0) + 2 * HIDDEN * VOCABULARY

    def step_bytes(self, tokens: int, expert_rank: int) -> int:
        """Bytes of weights and adapters that a decode step reads, for uniform routing; rank 0: no LoRA at all."""
        return self._bytes(EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens), expert_rank)

    def _bytes(self, experts: float, expert_rank: int) -> int:
        wide, narrow = HEAD_DIM * self.heads, HEAD_DIM * self.kv_heads
        layer = 2 * HIDDEN * (wide + narrow) + 3 * HIDDEN * self.inner * experts + HIDDEN * EXPERTS
        if expert_rank:
            layer += RANK * (4 * HIDDEN + 2 * wide + 2 * narrow) + 3 * expert_rank * (HIDDEN + self.inner) * experts
        return int(2 * (self.layers * layer + HIDDEN * VOCABULARY))


SHAPES = {"whole": Shape(4, 48, 8, 2560), "shard": Shape(8, 6, 1, 320)}


def bench(shapes: Sequence[str] = tuple(SHAPES), concurrency: int = 32) -> Result:
    """Measures each shape in each mode, every engine in a process of its own; the figure is the first shape's.

    As many engines as fit start together; each is measured alone.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_PLUGINS"] = ""  # ours would give every engine our kernels
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as folder:
        return _result(_measure(shapes, concurrency, Path(folder)), concurrency)


def _measure(shapes: Sequence[str], concurrency: int, folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """What each engine said, by shape and mode."""
    import torch

    context = get_context("spawn")
    engines = {shape: [_Engine(context, shape, mode, concurrency, folder) for mode in Mode] for shape in shapes}
    outcomes = {}
    for shape in shapes:
        fit = max(1, int(torch.cuda.mem_get_info()[0] / (1.2 * SHAPES[shape].bytes() + 6 * 2**30)))
        for first in range(0, len(Mode), fit):
            group = engines[shape][first : first + fit]
            for engine in group:
                engine.tell("start")
            for engine in group:
                engine.answer()
            for engine in group:
                engine.tell("measure")
                engine.finish()
        outcomes[shape] = {engine.mode.value: engine.outcome for engine in engines[shape]}
    return outcomes


class _Engine:
    """One engine's process, and what came out of it. It imports vLLM at once, starts and measures when told."""

    def __init__(self, context: Any, shape: str, mode: Mode, concurrency: int, folder: Path) -> None:
        self.mode = mode
        self.outcome: dict[str, Any] = {}
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(theirs, shape, mode, concurrency, folder), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, word: str) -> None:
        self._pipe.send(word)

    def answer(self) -> None:
        """Waits for the child's next word; RuntimeError if it failed."""
        try:
            self.outcome = self._pipe.recv()
        except EOFError:
            self.outcome = {"failed": "its process ended"}
        if "failed" in self.outcome:
            raise RuntimeError(f"moe-lora, {self.mode.value}: {self.outcome['failed']}")

    def finish(self) -> None:
        self.answer()
        self._process.join()


def _child(pipe: Any, shape: str, mode: Mode, concurrency: int, folder: Path) -> None:
    import vllm  # noqa: F401  # takes half a minute, while others run

    try:
        pipe.recv()
        began = time.perf_counter()
        llm = _engine(SHAPES[shape], mode, concurrency, folder / f"{shape}-{mode.value}")
        started_s = time.perf_counter() - began
        pipe.send({})
        pipe.recv()
        outcome = run(llm, SHAPES[shape], mode, concurrency) | {"engine_start_seconds": started_s}
        typer.echo(f"moe-lora, {shape}, {mode.value}: {outcome['tokens_a_second']:.0f} tokens/s", err=True)
        pipe.send(outcome)
        os._exit(0)  # an orderly end of the engine takes many seconds, and nothing is left to keep
    except Exception as error:
        pipe.send({"failed": f"{type(error).__name__}: {error}"[:500]})
        raise


def _result(outcomes: dict[str, dict[str, Any]], concurrency: int) -> Result:
    from beam_rl.bench import measure

    bandwidth = max(o["bandwidth_bytes_a_second"] for modes in outcomes.values() for o in modes.values())
    detail = {}
    for shape, modes in outcomes.items():
        size = SHAPES[shape]
        base = modes["none"]["tokens_a_second"]
        for mode, outcome in modes.items():
            rank = {"none": 0, "padded": RANK}.get(mode, RANK // TOP_K)
            outcome["share_of_no_lora"] = outcome["tokens_a_second"] / base
            read = size.step_bytes(concurrency, rank) - size.step_bytes(concurrency, 0)
            outcome |= {"adapter_bytes_a_step": read, "adapter_floor_us_a_step": read / bandwidth * 1e6}
        detail[shape] = asdict(size) | {
            "modes": {mode: {k: v for k, v in o.items() if k != "probe"} for mode, o in modes.items()},
            "logprob_difference_ours_exact": _difference(modes["ours"], modes["exact"]),
            "logprob_difference_none_exact": _difference(modes["none"], modes["exact"]),
        }
    first = next(iter(outcomes.values()))
    return Result(
        name="moe-lora",
        figure=first["ours"]["tokens_a_second"],
        unit="tokens/s",
        limit=first["none"]["tokens_a_second"],
        machine=measure.machine(measure.device()),
        detail={
            "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K, "vocabulary": VOCABULARY, "rank": RANK,
            "expert_rank": RANK // TOP_K, "concurrency": concurrency, "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": NEW_TOKENS, "bandwidth_bytes_a_second": bandwidth, "shapes": detail,
        },
    )  # fmt: skip


def run(llm: Any, shape: Shape, mode: Mode, concurrency: int) -> dict[str, Any]:
    """One engine's rate, its step, its slots' bytes and a table of its kernels."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

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

    seconds(FEW_TOKENS)
    slot_bytes = llm.collective_rpc(_fill_slots, args=(B_STD,))[0] if request else 0
    seconds(FEW_TOKENS)
    few = statistics.median(seconds(FEW_TOKENS) for _ in range(RUNS))
    runs = sorted(seconds(NEW_TOKENS) for _ in range(RUNS))
    took = statistics.median(runs)
    return {
        "tokens_a_second": concurrency * NEW_TOKENS / took,
        "slowest_and_fastest": [concurrency * NEW_TOKENS / runs[-1], concurrency * NEW_TOKENS / runs[0]],
        "step_ms": (took - few) / (NEW_TOKENS - FEW_TOKENS) * 1e3,
        "expert_slots_bytes": slot_bytes,
        "trace": _trace(lambda: seconds(FEW_TOKENS), 2 * shape.layers),
        "bandwidth_bytes_a_second": _bandwidth(),
        "probe": _probe(llm, request, prompts),
    }


def _probe(llm: Any, request: Any, prompts: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """Each prompt's first two tokens, greedily, and the second's log-probability: one decode step, with a large adapter."""
    from vllm import SamplingParams

    if request:
        llm.collective_rpc(_fill_slots, args=(PROBE_B_STD,))
    options = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = [o.outputs[0] for o in llm.generate(prompts, options, use_tqdm=False, lora_request=request)]
    return [(*o.token_ids, o.logprobs[1][o.token_ids[1]].logprob) for o in outputs]


def _difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of the probes' log-probabilities, where both engines chose the same tokens."""
    pairs = list(zip(one["probe"], other["probe"], strict=True))
    same = [abs(a[2] - b[2]) for a, b in pairs if a[:2] == b[:2]]
    return {"same_tokens": len(same), "of": len(pairs), "mean": statistics.mean(same) if same else None}


def _engine(shape: Shape, mode: Mode, concurrency: int, folder: Path) -> Any:
    from vllm import LLM

    from beam_rl.rollout import compat, compat_gpu

    if mode in (Mode.exact, Mode.ours):
        compat.size_adapter_slots(lambda config, is_experts: RANK // TOP_K if is_experts else None)
    if mode == Mode.ours:
        compat_gpu.install()
    folder.mkdir()
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
    return LLM(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024,
        max_num_seqs=concurrency, max_num_batched_tokens=2048, seed=0, enable_prefix_caching=False,
        gpu_memory_utilization=0.15, kv_cache_memory_bytes=2**30,  # several engines are held at one time
        compilation_config={"cudagraph_capture_sizes": [concurrency], "cudagraph_mode": "FULL_DECODE_ONLY"},
        **({} if mode == Mode.none else lora),
    )  # fmt: skip


def _add_adapter(worker: Any) -> None:
    from vllm.lora.request import LoRARequest

    manager = worker.model_runner.lora_manager
    manager.add_dummy_lora(LoRARequest("adapter", ADAPTER, "/held in memory"), rank=RANK // TOP_K)


def _fill_slots(worker: Any, b_std: float) -> int:
    """The same random values in every engine's slots; returns the bytes of the experts' slots."""
    import torch

    experts = 0
    random = torch.Generator(worker.device).manual_seed(0)
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "w13_lora_a_stacked"):
            a = (*module.w13_lora_a_stacked, *module.w2_lora_a_stacked)
            b = (*module.w13_lora_b_stacked, *module.w2_lora_b_stacked)
            experts += sum(t.numel() * t.element_size() for t in (*a, *b))
        elif hasattr(module, "lora_a_stacked"):
            a, b = module.lora_a_stacked, module.lora_b_stacked
        else:
            continue
        for tensors, std in ((a, A_STD), (b, b_std)):
            for tensor in tensors:
                tensor.normal_(std=std, generator=random)
    return experts


def _bandwidth() -> float:
    """Bytes a second of a large device copy, read and written."""
    import torch
    from triton.testing import do_bench

    torch.cuda.empty_cache()
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_(256)
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
    busy: Counter[str] = Counter()
    launches: Counter[str] = Counter()
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
