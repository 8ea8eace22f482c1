"""The MXFP8 format against vLLM's quantizer, and against one element at a time; the GPU kernel; the scheme."""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from beam_rl.mxfp8.format import dequantize, quantize, rounded
from beam_rl.mxfp8.scheme import scheme_of

ON_GPU, INTERPRETED = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16)
E4M3 = {0x7E: 448.0}  # each code's value, by the format's definition
for code in range(0x7E):
    exponent, mantissa = code >> 3, code & 7
    E4M3[code] = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9


def cases() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(std: float, rows: int = 32) -> Tensor:
        return torch.randn(rows, 128, generator=generator) * std

    spread = torch.exp2(torch.randint(-140, 120, (32, 128), generator=generator).float())
    odd = normal(1.0)
    odd[0, 3], odd[1, 40], odd[2, 5], odd[3, 70] = torch.inf, -torch.inf, torch.nan, -torch.nan
    odd[4, 8], odd[4, 9] = torch.inf, torch.nan
    powers = torch.exp2(torch.arange(-149, 107).float()).view(2, 128)
    edges = torch.tensor([448.0, 449.0, 447.0, 464.0, 256.0, 1.0, 1.75, 1.7578125]).repeat_interleave(32).view(2, 128)
    return {
        "random": normal(1.0),
        "tiny": normal(1e-30),
        "huge": normal(1e37).clamp(-3.3e38, 3.3e38),
        "subnormal": normal(1e-39),
        "around the smallest normal": normal(3e-38),
        "zero": torch.zeros(2, 128),
        "negative zero": -torch.zeros(2, 128),
        "spread": normal(1.0) * spread,
        "infinite and NaN": odd,
        "powers of two": powers,
        "largest elements at and around 448": edges,
    }


def raw(x: Tensor) -> Tensor:
    """Bits, with one NaN for all."""
    bits = x.view(torch.uint8)
    return torch.where(x.float().isnan(), 0x7F, bits)


def nearest(value: float) -> int:
    """The E4M3 code next to a magnitude of at most 448, the even one of two that are equally near."""
    return min(E4M3, key=lambda code: (abs(E4M3[code] - value), code & 1))


def one_block(block: list[float]) -> tuple[list[int], int]:
    """Codes and scale byte of one block, by the rule as it is written, in Python's numbers."""
    if any(math.isnan(v) for v in block):
        return [0x7F] * len(block), 0
    amax, scale = max(abs(v) for v in block), -127
    while amax > 448 * 2.0**scale and scale < 127:
        scale += 1
    return [nearest(min(abs(v) / 2.0**scale, 448.0)) | (math.copysign(1, v) < 0) << 7 for v in block], scale + 127


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", cases())
def test_bits_are_those_of_vllms_quantizer(name: str, dtype: torch.dtype) -> None:
    vllm = pytest.importorskip("vllm.model_executor.layers.quantization.utils.mxfp8_utils")
    x = cases()[name].to(dtype)
    q = quantize(x)
    payload, scales = vllm._mxfp8_e4m3_quantize_torch(x)
    assert torch.equal(raw(q.payload), raw(payload)) and torch.equal(q.scales, scales)
    assert torch.equal(dequantize(q).view(torch.int16), vllm.dequant_mxfp8_to_bf16(q.payload, scales).view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", cases())
def test_bits_are_those_of_one_element_at_a_time(name: str, dtype: torch.dtype) -> None:
    x = cases()[name].to(dtype)[:6]
    q = quantize(x)
    blocks, scales = x.float().view(-1, 32).tolist(), q.scales.flatten().tolist()
    for block, codes, scale in zip(blocks, raw(q.payload).view(-1, 32).tolist(), scales, strict=True):
        assert (codes, scale) == one_block(block)


def test_an_element_above_448_is_never_clipped() -> None:
    """The scale is exact where vLLM's rounded logarithm is not: Transformer Engine's rule."""
    x = torch.full((1, 32), 448 * (1 + 2**-23) * 2.0**60)
    assert quantize(x).scales.item() == 127 + 61
    assert quantize(x.bfloat16()).scales.item() == 127 + 60


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_any_dimension_is_quantized_as_the_last_one(dim: int) -> None:
    x = torch.randn(64, 32, 96)
    q, last = quantize(x, dim), quantize(x.movedim(dim, -1).contiguous())
    assert q.payload.shape == x.shape
    assert torch.equal(q.payload.view(torch.uint8), last.payload.movedim(-1, dim).view(torch.uint8))
    assert torch.equal(q.scales, last.scales.movedim(-1, dim))
    assert torch.equal(rounded(x, dim), dequantize(last, x.dtype).movedim(-1, dim))


def test_rounding_loses_at_most_a_sixteenth_and_rounding_twice_nothing_more() -> None:
    x = torch.randn(64, 256).bfloat16()
    once = rounded(x)
    amax = x.float().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    assert ((once - x).float().abs() <= torch.maximum(x.float().abs() / 16, amax * 2**-17)).all()
    assert torch.equal(rounded(once), once) and not torch.equal(once, x)


def test_a_dimension_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks of 32, which do not divide dimension 1 of \(2, 48\)"):
        quantize(torch.zeros(2, 48))


# --- the kernel -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not ON_GPU and not INTERPRETED, reason="runs on a GPU, or where TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", cases())
def test_the_kernel_has_the_bits_of_plain_torch(name: str) -> None:
    from beam_rl.mxfp8 import kernel

    for dtype in DTYPES if ON_GPU else DTYPES[:1]:  # the interpreter computes in numpy, which has no bfloat16
        x = cases()[name].to(dtype)[:, :96].repeat_interleave(16, 0)
        for dim in (0, 1):
            want, there = quantize(x, dim), x.cuda() if ON_GPU else x
            payload, scales = kernel.quantize(there, dim)
            assert torch.equal(raw(payload.cpu()), raw(want.payload)) and torch.equal(scales.cpu(), want.scales)
            values, found = rounded(x, dim), kernel.rounded(there, dim).cpu()
            torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(found.signbit() | found.isnan(), values.signbit() | values.isnan())


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernel itself runs")
def test_the_kernel_passes_in_tritons_interpreter() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "kernel_has",
    ]
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=interpreted, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{len(cases())} passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.gpu
def test_a_gpu_quantizes_every_bf16_value_like_a_cpu() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    shuffled = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].nan_to_num()
    for x, dim in ((every.view(-1, 32), -1), (every.view(32, -1), 0), (shuffled.view(64, 32, 32), 1)):
        want, got = quantize(x, dim), quantize(x.cuda(), dim)
        assert torch.equal(raw(got.payload.cpu()), raw(want.payload)) and torch.equal(got.scales.cpu(), want.scales)
        torch.testing.assert_close(rounded(x.cuda(), dim).cpu(), rounded(x, dim), rtol=0, atol=0, equal_nan=True)


# --- the scheme -------------------------------------------------------------------------------------------


def shape(**changes: int) -> SimpleNamespace:
    sizes = dict(hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_attention_heads=4, head_dim=32)
    return SimpleNamespace(**{"num_hidden_layers": 7, **sizes, **changes})


def test_projections_are_mxfp8_and_nothing_else_is() -> None:
    scheme, layer = scheme_of(shape()), "model.layers.3."
    attention = [f"self_attn.{part}_proj" for part in ("q", "k", "v", "gate", "o")]
    mlps = [f"{mlp}.{part}_proj" for mlp in ("mlp", "mlp.experts.15") for part in ("gate", "up", "down")]
    assert all(scheme.has(f"{layer}{name}.weight") for name in attention + mlps)
    plain = ["self_attn.gate_bias", "self_attn.q_norm.weight", "self_attn.k_norm.weight", "input_layernorm.weight"]
    plain += ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", "self_attn.q_proj.lora_A.weight"]
    assert not any(scheme.has(layer + name) for name in plain)
    assert not any(scheme.has(name) for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"))


def test_whole_layers_at_either_end_can_stay_as_they_are() -> None:
    scheme = scheme_of(shape(), keep_first_layers=2, keep_last_layers=1)
    mxfp8 = [scheme.has(f"model.layers.{i}.self_attn.q_proj.weight") for i in range(7)]
    assert mxfp8 == [False, False, True, True, True, True, False] == [scheme.has_layer(i) for i in range(7)]


def test_a_stream_of_weights_gets_scales_and_keeps_what_is_not_mxfp8() -> None:
    weights = {
        "model.layers.0.mlp.gate.weight": torch.randn(16, 64),
        "model.layers.0.mlp.experts.3.down_proj.weight": torch.randn(64, 32, dtype=torch.bfloat16),
    }
    router, expert = weights
    found = dict(scheme_of(shape()).quantized(weights.items()))
    assert list(found) == [router, expert, f"{expert}_scale"] and found[router] is weights[router]
    assert found[expert].dtype == torch.float8_e4m3fn and found[f"{expert}_scale"].shape == (64, 1)


def test_a_part_of_a_weight_has_the_bits_of_the_whole() -> None:
    weight = torch.randn(64, 128).bfloat16()
    whole = quantize(weight)
    for dim in (0, 1):
        parts = [quantize(part) for part in weight.chunk(2, dim)]
        for want, got in ((whole.payload, [q.payload for q in parts]), (whole.scales, [q.scales for q in parts])):
            assert torch.equal(torch.cat([part.view(torch.uint8) for part in got], dim), want.view(torch.uint8))


def test_what_blocks_do_not_divide_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="do not divide the model's hidden_size = 48$"):
        scheme_of(shape(hidden_size=48))
    with pytest.raises(ValueError, match="the model's moe_intermediate_size = 32 over 2 tensor-parallel ranks$"):
        scheme_of(shape(), tp=4, expert_tp=2)
    with pytest.raises(ValueError, match="num_attention_heads · head_dim = 128 over 8 tensor-parallel ranks$"):
        scheme_of(shape(), tp=8)
    with pytest.raises(ValueError, match=r"keep_last_layers = 7: the model has 7 layers, so none"):
        scheme_of(shape(), 4, 3)
