"""`beam-rl bench moe-lora`: one of its engines, small; and wrong input."""

import subprocess
import sys

import pytest
import torch

from beam_rl.bench import measure
from beam_rl.bench.moe_lora import SHAPES, Case, model_config, run
from beam_rl.lora import ALL_TARGETS, Adapter, adapter_tensors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU")

CASE = Case(64, 2, 2, 1, 64, 32, 16, 4, 64, "fp32", rank=16, concurrency=2, tokens=4)


def test_engine_holds_the_adapters_bytes_and_samples() -> None:
    [measured] = measure.in_fresh_process(run, CASE, [4])
    shapes = adapter_tensors(Adapter(16, 16, 4, 4, ALL_TARGETS), model_config(CASE))
    bytes_of = {name: 4 * rows * columns for name, (rows, columns) in shapes.items()}
    assert measured.slot_bytes == sum(bytes_of.values())
    assert measured.expert_slot_bytes == sum(size for name, size in bytes_of.items() if ".experts." in name)
    assert measured.tokens_s > 0 and measured.sync_s > 0


def test_shapes_fit_together() -> None:
    for case in SHAPES.values():
        assert case.layers % 2 == 0 and case.heads % case.kv_heads == 0 and case.rank % case.top_k == 0


def test_rank_that_the_experts_cannot_have_is_refused() -> None:
    command = [sys.executable, "-m", "beam_rl.cli", "bench", "moe-lora", "--shape", "small", "--rank", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "top-k, which is 8" in done.stderr
