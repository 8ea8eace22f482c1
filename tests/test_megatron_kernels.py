"""The trainer's fused kernels against plain torch: on a GPU, or in Triton's interpreter on a machine without one."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from beam_rl.megatron import logprobs
from beam_rl.megatron.kernels import gate, norm_residual, qk_norm, swiglu
from beam_rl.megatron.kernels import head as head_kernels

ON_GPU, INTERPRETED = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(not ON_GPU and not INTERPRETED, reason="runs on a GPU, or where TRITON_INTERPRET=1")
DEVICE = "cuda" if ON_GPU else "cpu"
gpu = pytest.mark.gpu  # sizes that are too much for the interpreter
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
EPS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}  # half a unit in the last place
EPSILON = 1e-6
TOKENS = 11 if ON_GPU else 6  # where the interpreter takes a second or more for each


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def exact(*shape: int, dtype: torch.dtype) -> Tensor:
    """Quarters from −2 to 2: any sum of their squares is exact in FP32, so its order does not matter."""
    return (torch.randint(-8, 9, shape, device=DEVICE) / 4).to(dtype).requires_grad_()


def outputs(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
    found = function(*inputs)
    return list(found) if isinstance(found, tuple) else [found]


def gradients(function: Callable[..., Any], inputs: Sequence[Any], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Of a random projection of the outputs, after the tensors among the inputs; computed in `dtype`, if given."""
    own = [x.detach().to(dtype or x.dtype).requires_grad_() if isinstance(x, Tensor) else x for x in inputs]
    found = outputs(function, own)
    generator = torch.Generator().manual_seed(7)
    towards = [torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in found]  # the same in every dtype
    return list(torch.autograd.grad(found, [x for x in own if isinstance(x, Tensor)], towards))


def check_nearly_all_bits(got: Tensor, want: Tensor) -> None:
    """FP32 inside may differ in its last bits, and then rarely rounds to the other neighbour."""
    assert got.dtype == want.dtype and got.shape == want.shape
    units = 4 if got.dtype == torch.float32 else 1
    assert not got.numel() or (got - want).abs().max() <= units * 2 * EPS[got.dtype] * want.abs().max()
    assert got.dtype == torch.float32 or (got != want).sum() <= 1 + got.numel() // 500


def check_bits(got: Tensor, want: Tensor) -> None:
    """All of them in the interpreter. A GPU has other roots and quotients in torch than in Triton."""
    check_nearly_all_bits(got, want)
    assert ON_GPU or torch.equal(got, want)


def check_gradients(
    fused: Callable[..., Any], plain: Callable[..., Any], true: Callable[..., Any], inputs: Sequence[Any]
) -> None:
    """Within the dtype's error of the exact function's in FP64, in BF16 no further from them than plain torch's are."""
    dtype = inputs[0].dtype
    in_bf16 = dtype == torch.bfloat16
    ours, theirs = gradients(fused, inputs), gradients(plain, inputs)
    for got, other, want in zip(ours, theirs, gradients(true, inputs, torch.float64), strict=True):
        assert got.dtype == other.dtype and got.shape == other.shape
        unit = EPS[dtype] * want.norm()
        assert (got - want).norm() < (4 if in_bf16 else 16) * unit
        assert not in_bf16 or (got - want).norm() < 1.1 * (other - want).norm() + unit
        assert (got.double() - other.double()).norm() < (8 if in_bf16 else 16) * unit


# --- norm, residual, norm ---------------------------------------------------------------------------------


def boundary(make: Callable[..., Tensor], tokens: int, width: int, dtype: torch.dtype, parts: int) -> list[Any]:
    """`norm_residual.reference`'s arguments: for y, for h, for h and n."""
    of_next = [random(width, dtype=dtype), EPSILON]
    of_residual = [make(tokens, 1, width, dtype=dtype), 3**-0.5, (2 / 3) ** 0.5]
    return [make(tokens, 1, width, dtype=dtype), random(width, dtype=dtype), EPSILON, *of_residual, *of_next][:parts]


def true_boundary(x: Tensor, weight: Tensor, eps: float, *rest: Any) -> Any:
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    if not rest:
        return y
    residual, x_scale, residual_scale, *following = rest
    h = x_scale * y + residual_scale * residual
    return (h, true_boundary(h, *following)) if following else h


PARTS = pytest.mark.parametrize("parts", [3, 6, 8], ids=["norm", "norm, add", "norm, add, norm"])


@runs_kernels
@DTYPES
@PARTS
@pytest.mark.parametrize(
    ("tokens", "width"), [(5, 64), (3, 100), (1, 1), (7, 1536), pytest.param(999, 5120, marks=gpu)]
)
def test_norm_and_residual_have_the_bits_of_plain_torch(
    tokens: int, width: int, dtype: torch.dtype, parts: int
) -> None:
    torch.manual_seed(0)
    inputs = boundary(exact, tokens, width, dtype, parts)
    got, want = outputs(norm_residual.Fused.apply, inputs), outputs(norm_residual.reference, inputs)
    check_bits(got[0], want[0])
    for n, expected in zip(got[1:], want[1:], strict=True):  # the squares of h have no exact sum
        check_nearly_all_bits(n, expected)


@runs_kernels
@DTYPES
@PARTS
@pytest.mark.parametrize(
    ("tokens", "width"),
    [(5, 64), (5, 100), (7, 1536), pytest.param(999, 5120, marks=gpu), pytest.param(99, 8192, marks=gpu)],
)
def test_gradients_of_norm_and_residual(tokens: int, width: int, dtype: torch.dtype, parts: int) -> None:
    torch.manual_seed(0)
    inputs = boundary(random, tokens, width, dtype, parts)
    check_gradients(norm_residual.Fused.apply, norm_residual.reference, true_boundary, inputs)


# --- SwiGLU -----------------------------------------------------------------------------------------------


def true_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@runs_kernels
@DTYPES
@pytest.mark.parametrize(
    "shape", [(5, 1, 64), (3, 2 * 1200), (2, 2), (0, 64), pytest.param((999, 2 * 2560), marks=gpu)]
)
def test_swiglu_has_the_bits_and_gradients_of_plain_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (3 * random(*shape, dtype=dtype)).detach()
    check_nearly_all_bits(swiglu.Fused.apply(gate_up), swiglu.reference(gate_up))
    if len(gate_up):
        check_gradients(swiglu.Fused.apply, swiglu.reference, true_swiglu, [gate_up])


# --- norm and position of Q and K -------------------------------------------------------------------------


def heads_of(make: Callable[..., Tensor], tokens: int, heads: int, dim: int, position: str, dtype: torch.dtype) -> Any:
    """`qk_norm.reference`'s arguments; x is a part of a wider tensor, as Megatron hands K over."""
    x = make(tokens, heads, 3 * dim, dtype=dtype).detach()[:, :, dim : 2 * dim]
    angle = torch.rand(tokens, dim // 2, device=DEVICE) * 7
    cos, sin = (torch.cat((half, half), -1) for half in (angle.cos(), angle.sin()))
    scale = 1 + torch.rand(tokens, device=DEVICE)
    positions = {"rope": (cos, sin, None), "ssmax": (None, None, scale), "none": (None, None, None)}
    return [x, random(dim, dtype=dtype), EPSILON], positions[position]


def true_heads(x: Tensor, weight: Tensor, eps: float, cos: Any, sin: Any, scale: Any) -> Tensor:
    x = true_boundary(x, weight, eps)
    if cos is not None:
        first, second = x.chunk(2, dim=-1)
        x = x * cos.double()[:, None] + torch.cat((-second, first), -1) * sin.double()[:, None]
    return x if scale is None else x * scale.double()[:, None, None]


@runs_kernels
@DTYPES
@pytest.mark.parametrize("position", ["rope", "ssmax", "none"])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"),
    [(5, 3, 32), (1, 1, 2), (13, 2, 96), (33, 3, 128), pytest.param(999, 48, 128, marks=gpu)],
)
def test_norm_and_position_of_heads_have_the_bits_of_plain_torch(
    tokens: int, heads: int, dim: int, position: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    inputs, where = heads_of(exact, tokens, heads, dim, position, dtype)
    check_bits(qk_norm.Fused.apply(*inputs, *where), qk_norm.reference(*inputs, *where))


@runs_kernels
@DTYPES
@pytest.mark.parametrize("position", ["rope", "ssmax", "none"])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(5, 3, 32), (13, 2, 96), (33, 3, 128), pytest.param(999, 48, 128, marks=gpu)]
)
def test_gradients_of_norm_and_position_of_heads(
    tokens: int, heads: int, dim: int, position: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    inputs, where = heads_of(random, tokens, heads, dim, position, dtype)
    functions = (qk_norm.Fused.apply, qk_norm.reference, true_heads)
    check_gradients(*(lambda *own, f=f: f(*own, *where) for f in functions), inputs)


@runs_kernels
@DTYPES
def test_gradients_are_the_same_beside_frozen_norms(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, where = heads_of(random, TOKENS, 2, 96, "rope", dtype)
    for function, inputs in (
        (norm_residual.Fused.apply, boundary(random, TOKENS, 100, dtype, 8)),
        (lambda *own: qk_norm.Fused.apply(*own, *where), heads),
    ):
        whole = gradients(function, inputs)
        moving = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.dim() > 1]

        def frozen(*own: Tensor, function: Any = function, inputs: Any = inputs, moving: Any = moving) -> Any:
            of = dict(zip(moving, own, strict=True))
            return function(*(of.get(i, x.detach() if isinstance(x, Tensor) else x) for i, x in enumerate(inputs)))

        for got, want in zip(
            gradients(frozen, [inputs[i] for i in moving]), [g for g in whole if g.dim() > 1], strict=True
        ):
            assert torch.equal(got, want)


# --- output gate ------------------------------------------------------------------------------------------


def true_gate(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return x * torch.sigmoid(gate + bias[:, None]).flatten(1)


@runs_kernels
@DTYPES
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"),
    [(5, 3, 32), (1, 1, 1), (13, 2, 96), (67, 3, 128), pytest.param(999, 48, 128, marks=gpu)],
)
def test_output_gate_has_the_bits_and_gradients_of_plain_torch(
    tokens: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, bias = random(tokens, heads * dim, dtype=dtype), random(heads, dtype=dtype)
    inputs = [x, random(tokens, 2 * heads, dim, dtype=dtype).detach()[:, ::2], bias]
    check_nearly_all_bits(gate.Fused.apply(*inputs), gate.reference(*inputs))
    check_gradients(gate.Fused.apply, gate.reference, true_gate, inputs)


# --- the head -------------------------------------------------------------------------------------------------


@runs_kernels
@DTYPES
@pytest.mark.parametrize("numerics", ["engine", "reference", "fp32_head"])
@pytest.mark.parametrize(
    ("softcap", "temperature", "vocabulary"),
    [(5.0, 1.0, 50), (5.0, 0.7, 4133), (None, 1.0, 9001), pytest.param(30.0, 1.0, 151_936, marks=gpu)],
)
def test_head_has_the_log_probabilities_and_gradients_of_plain_torch(
    softcap: float | None,
    temperature: float,
    vocabulary: int,
    numerics: Any,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    hidden, head = random(TOKENS, 24, dtype=dtype), random(vocabulary, 24, dtype=dtype)
    targets = torch.randint(vocabulary, (TOKENS,), device=DEVICE)
    form: Any = {"softcap": softcap, "temperature": temperature, "numerics": numerics, "chunk_tokens": 5}

    def computed(covered: bool) -> Callable[..., tuple[Tensor, Tensor]]:
        def values(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
            monkeypatch.setattr(logprobs, "covers", lambda *_: covered)
            return logprobs.token_logprobs(hidden, head, targets, **form)

        return values

    fused, plain = computed(True), computed(False)
    for got, want in zip(fused(hidden, head), plain(hidden, head), strict=True):
        assert got.dtype == want.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
    only = [lambda *own, f=f: f(*own)[0] for f in (fused, plain, plain)]  # an entropy has no gradient
    check_gradients(*only, [hidden, head])
    (of_sum,), (dense,) = (  # the gradient of a bare sum is one number, seen as many
        torch.autograd.grad(fused(hidden, head)[0], hidden, towards.expand(TOKENS) if bare else towards.repeat(TOKENS))
        for towards, bare in ((torch.ones(1, device=DEVICE), True), (torch.ones(1, device=DEVICE), False))
    )
    assert torch.equal(of_sum, dense)
    there = torch.ones(head.shape, device=DEVICE)
    (own,) = torch.autograd.grad(fused(hidden, head)[0].sum(), head)
    form["head_gradient"] = there
    fused(hidden, head)[0].sum().backward()
    torch.testing.assert_close(
        (there - 1).to(dtype), own, rtol=2 * EPS[dtype] if dtype == torch.bfloat16 else 1e-4, atol=2e-5
    )


@runs_kernels
@DTYPES
def test_gradients_in_groups_of_tokens_and_parts_of_the_vocabulary_are_those_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 4 and 2 tokens; parts of 128, 128 and 44 entries. A product of another shape rounds in another way."""
    monkeypatch.setattr(logprobs, "covers", lambda *_: True)
    torch.manual_seed(0)
    hidden, head = random(6, 24, dtype=dtype), random(300, 24, dtype=dtype)
    targets = torch.tensor([0, 127, 128, 255, 256, 299], device=DEVICE)

    def found(chunk_tokens: int) -> list[Tensor]:
        logp, _ = logprobs.token_logprobs(
            hidden, head, targets, softcap=5.0, temperature=0.7, numerics="engine", chunk_tokens=chunk_tokens
        )
        return list(torch.autograd.grad((logp * torch.arange(1.0, 7.0, device=DEVICE)).sum(), (hidden, head)))

    for parted, whole in zip(found(1), found(6), strict=True):
        assert (parted - whole).norm() < (16 if dtype == torch.float32 else 4) * EPS[dtype] * whole.norm()


@runs_kernels
def test_gradients_of_a_part_of_the_vocabulary_leave_out_targets_of_others() -> None:
    logits, row = torch.randn(3, 70, device=DEVICE), torch.tensor([5, 0, 69], device=DEVICE)
    highest, total, _, _ = head_kernels.sums(logits, row, None, 1.0, False)
    upstream = torch.tensor([1.0, -2.0, 0.5], device=DEVICE)
    at_target = torch.tensor([1.0, 0.0, 0.5], device=DEVICE)
    want = -upstream[:, None] * logits.softmax(-1)
    want[[0, 2], [5, 69]] += at_target[[0, 2]]
    got = head_kernels.gradient(logits.clone(), row, None, 1.0, False, highest, total, upstream, at_target, logits)
    assert got is logits
    torch.testing.assert_close(got, want)


@runs_kernels
def test_bits_of_a_small_logits_softcap_are_not_lost() -> None:
    """c · tanh(z / c) of a tiny z is z to the last bits; 1 − 2 / (exp(2 z) + 1) alone would keep three digits of it."""
    z = torch.tensor([[1e-3, -1e-3, 0.5, -3.0, 29.0, 400.0, -400.0]], device=DEVICE)
    for column in range(z.size(1)):
        row = torch.tensor([column], device=DEVICE)
        chosen = head_kernels.sums(z, row, 30.0, 1.0, False)[3]
        torch.testing.assert_close(chosen, 30 * torch.tanh(z[:, column] / 30), rtol=3e-6, atol=0)


# --- all of them ------------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels themselves run")
def test_the_kernels_pass_in_tritons_interpreter() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    kernels = [__file__, "-k", "bits or gradients", "-m", "not gpu"]
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *kernels]
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=interpreted, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]


@runs_kernels
def test_a_model_has_the_logits_and_gradients_of_one_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In BF16 on a GPU, where Transformer Engine attends in nothing wider; the experts are replayed, not chosen."""
    import megatron_tiny as tiny

    from beam_rl.megatron.packing import pack

    model = tiny.trainer(precision="bf16" if ON_GPU else "fp32").model.eval()
    weights = dict(model.named_parameters())
    torch.manual_seed(0)
    tokens = torch.randint(tiny.VOCAB, (1, TOKENS), device=DEVICE)
    cu = torch.tensor([0, 4, TOKENS], device=DEVICE)
    routes = torch.rand(TOKENS, tiny.MOE_LAYERS, tiny.EXPERTS, device=DEVICE).topk(tiny.TOP_K).indices

    def computed(covered: bool) -> tuple[Tensor, dict[str, Tensor]]:
        calls = []
        for kernel in (norm_residual, swiglu, qk_norm, gate):
            monkeypatch.setattr(kernel, "covers", lambda *tensors: covered)
            launch = kernel.Fused.apply
            monkeypatch.setattr(kernel.Fused, "apply", lambda *own, f=launch, k=kernel: calls.append(k) or f(*own))
        logits = model(tokens, None, None, packed_seq_params=pack(cu, routes)).float()
        grads = torch.autograd.grad(logits.square().mean(), list(weights.values()), allow_unused=True)
        layers = len(model.decoder.layers) * covered
        assert calls.count(norm_residual) == 3 * layers + covered  # and the last norm
        assert (calls.count(qk_norm), calls.count(gate)) == (2 * layers, layers)
        assert calls.count(swiglu) >= layers
        return logits.detach(), {name: g for name, g in zip(weights, grads, strict=True) if g is not None}

    (logits, grads), (plain_logits, plain_grads) = computed(True), computed(False)
    bound = 0.03 if ON_GPU else 1e-5
    assert (logits - plain_logits).norm() < bound * plain_logits.norm()
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        assert (grad - plain_grads[name]).norm() <= 3 * bound * plain_grads[name].norm(), name


def test_a_model_on_a_cpu_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from beam_rl.megatron.kernels import gate, norm_residual, qk_norm, swiglu\n"
        "print(norm_residual.norm(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0).square().sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(2.0)


@pytest.mark.skipif(ON_GPU, reason="measures the GPU")
def test_bench_says_that_it_needs_a_gpu() -> None:
    done = subprocess.run([sys.executable, "-m", "beam_rl.cli", "bench", "boundary"], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "beam-rl: bench boundary measures kernels of an NVIDIA GPU: there is none here\n"
