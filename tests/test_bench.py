"""`beam-rl bench`: what it prints, and that the chunked head's memory keeps to what it states."""

import json
import os
import subprocess
import sys

import pytest
import torch

from beam_rl.bench import measure
from beam_rl.bench.logprob import PLAIN_BYTES_A_LOGIT, VOCABULARY, Case, plain_tokens, run_chunked
from beam_rl.bench.result import Result, show
from beam_rl.megatron.logprobs import workspace_bytes

MIB = 2**20
# The GEMM library's own buffers, and code that loads on first use; without chunks it would be 400 MB more.
SLACK_BYTES = 48 * MIB


def beam_rl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "beam_rl.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)


def bound_bytes(case: Case) -> int:
    """What a call may hold on a CPU: workspace, the hidden states' gradient, a BF16 chunk's share of the head's."""
    dtype = getattr(torch, case.dtype)
    head = VOCABULARY * case.hidden if dtype == torch.bfloat16 else 0
    workspace = case.chunk_tokens * VOCABULARY * workspace_bytes(dtype, torch.device("cpu"))
    return workspace + (head + case.tokens * case.hidden) * dtype.itemsize


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_of_the_chunked_head_is_bounded_by_the_chunk(dtype: str) -> None:
    case = Case(tokens=256, hidden=8, dtype=dtype, chunk_tokens=64)
    peak, seconds = measure.in_fresh_process(run_chunked, case)
    assert 0.8 * bound_bytes(case) < peak < bound_bytes(case) + SLACK_BYTES
    assert seconds > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU")
def test_json_has_the_fixed_fields_and_the_plain_computation_beside() -> None:
    done = beam_rl("bench", "logprob", "--tokens", "128", "--hidden", "8", "--chunk", "16", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == ["name", "figure", "unit", "limit", "ratio", "machine", "detail"]
    assert (result["name"], result["unit"]) == ("logprob", "s")
    assert result["ratio"] == pytest.approx(result["limit"] / result["figure"]) and 0 < result["ratio"] < 1
    detail = result["detail"]
    assert (detail["tokens"], detail["plain_tokens"], detail["hidden"], detail["chunk_tokens"]) == (128, 128, 8, 16)
    assert (detail["dtype"], detail["vocabulary"]) == ("float32", 151_936)
    logits = 128 * VOCABULARY * 4
    assert detail["chunked_peak_bytes"] < logits < 4 * logits < detail["plain_peak_bytes"]
    assert detail["plain_peak_bytes"] < 128 * VOCABULARY * PLAIN_BYTES_A_LOGIT["float32"] + SLACK_BYTES
    assert detail["plain_to_chunked_peak"] == detail["plain_peak_bytes"] / detail["chunked_peak_bytes"]
    assert detail["plain_seconds"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU")
def test_a_layer_is_measured_beside_megatrons_own_of_as_many_operations() -> None:
    done = beam_rl("bench", "layer", "--tokens", "256", "--experts", "16", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    detail = result["detail"]
    assert result["figure"] == detail["beam_both_seconds"] > detail["beam_forward_seconds"] > 0
    assert result["limit"] == detail["plain_both_seconds"] > 0 and detail["plain_peak_bytes"] > 0
    hidden, wide, expert = 256, 4 * 128, 128
    products = hidden * (3 * wide + wide + 16) + 8 * 3 * hidden * expert + 2 * 128 * wide  # 128 keys on average
    assert detail["beam_tflops"] == pytest.approx(3 * 2 * 256 * products / result["figure"] / 1e12)
    assert beam_rl("bench", "layer", "--tokens", "100").stderr.startswith("beam-rl: --tokens 100: samples have")


def test_plain_computation_is_measured_over_as_many_tokens_as_fit() -> None:
    case = Case(tokens=32768, hidden=64, dtype="float32", chunk_tokens=1024)
    everything = 32768 * VOCABULARY * PLAIN_BYTES_A_LOGIT["float32"]
    assert plain_tokens(case, 2 * everything) == 32768
    assert plain_tokens(case, everything) == 16384
    assert plain_tokens(case, 1000) == 1


def test_ratio_is_the_share_of_the_limit_for_times_and_for_rates() -> None:
    assert Result("x", 4.0, "s", 3.0, "one GPU", {}).ratio == 0.75
    assert Result("x", 3.0, "GB/s", 4.0, "one GPU", {}).ratio == 0.75


def test_table_shows_figure_limit_and_detail(capsys: pytest.CaptureFixture[str]) -> None:
    show(Result("x", 4.0, "s", 3.0, "one GPU", {"tokens": 32768, "plain_peak_bytes": 2**31, "dtype": "float32"}), False)
    out = capsys.readouterr().out
    for part in ("x on one GPU", "4 s", "3 s", "75.0%", "32,768", "2.000 GiB", "float32"):
        assert part in out


def kill_me() -> None:
    os.kill(os.getpid(), 9)


def test_measurement_whose_process_is_killed_says_so() -> None:
    with pytest.raises(MemoryError, match="kill_me: its process was killed"):
        measure.in_fresh_process(kill_me)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [("nothing", "'nothing'"), ("logprob --tokens 0", "'--tokens'"), ("logprob --dtype int8", "'--dtype'")],
)
def test_wrong_input_exits_with_2(arguments: str, part: str) -> None:
    done = beam_rl("bench", *arguments.split())
    assert done.returncode == 2 and not done.stdout and part in done.stderr
