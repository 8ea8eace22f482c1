"""`beam-rl bench moe-lora`: one of its engines, small; and wrong input."""

import subprocess
import sys

import pytest
import torch

from beam_rl.bench import measure
from beam_rl.bench.moe_lora import Case, model_config, run
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


def test_layers_of_beams_size_are_refused_on_a_cpu() -> None:
    command = [sys.executable, "-m", "beam_rl.cli", "bench", "moe-lora", "--shape", "whole"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--shape whole: layers of Beam's size are for a GPU" in done.stderr
