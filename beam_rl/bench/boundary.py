"""The trainer's fused kernels at Beam's sizes: bytes a second beside the copy bandwidth of the same run.

Bytes are those that a kernel must move: each input read once, each output written once. Plain torch does the same
computation with its own kernels one after the other, and is counted for as many bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from beam_rl.bench.result import AsJson, Result, show
from beam_rl.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, EXPERT, TOP_K = 48, 8, 128, 2560, 8
EPS = 1e-6
COPY_BYTES = 2**31
RUNS = 10  # the fastest counts


@dataclass(frozen=True)
class Piece:
    """A kernel and plain torch's way to the same; bytes of the forward pass, and of the backward pass alone."""

    fused: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: list[Any]
    forward_bytes: int
    backward_bytes: int


def boundary(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch.")] = 32768,
    hidden: Annotated[int, typer.Option(min=1, max=8192, help="The hidden size.")] = 5120,
    as_json: AsJson = False,
) -> None:
    """The fused kernels between a layer's matrix products, forward and backward, in BF16 at the sizes of Beam.

    The figure is the lowest rate among the kernels, forward and backward; the limit is the rate of a copy on the device,
    reading and writing counted.
    """
    from beam_rl.bench import measure

    if measure.device().type != "cuda":
        raise InputError("bench boundary measures kernels of an NVIDIA GPU: there is none here")
    show(bench(tokens, hidden), as_json)


def bench(tokens: int, hidden: int) -> Result:
    """Measures the copy and each piece on this machine's GPU."""

    from beam_rl.bench import measure

    where = measure.device()
    typer.echo("measuring a copy, then each kernel and plain torch's way to the same", err=True)
    copy = copy_rate(where)
    detail: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "dtype": "bfloat16"}
    rates = []
    for name, make in pieces(tokens, hidden, where).items():
        found = measured(make())
        rates += [found["forward_gb_s"], found["backward_gb_s"]]
        detail |= {f"{name}_{key}": value for key, value in found.items()}
    return Result("boundary", min(rates), "GB/s", copy, measure.machine(where), detail)


def copy_rate(where: Any) -> float:
    """GB/s of a copy on the device, reading and writing counted."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source)) / 1e9


def measured(piece: Piece) -> dict[str, float]:
    """GB/s of the fused kernel, each way and both together, and how much faster it is than plain torch."""
    forward, both = times(piece.fused, piece.inputs)
    plain_forward, plain_both = times(piece.plain, piece.inputs)
    return {
        "forward_gb_s": piece.forward_bytes / forward / 1e9,
        "backward_gb_s": piece.backward_bytes / (both - forward) / 1e9,
        "both_gb_s": (piece.forward_bytes + piece.backward_bytes) / both / 1e9,
        "forward_over_plain": plain_forward / forward,
        "both_over_plain": plain_both / both,
    }


def times(function: Callable[..., Any], inputs: list[Any]) -> tuple[float, float]:
    """Seconds of the forward pass, and of forward and backward."""
    import torch

    needing = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]

    def outputs() -> tuple[Any, ...]:
        found = function(*inputs)
        return found if isinstance(found, tuple) else (found,)

    towards = [torch.ones_like(y) for y in outputs()]
    return seconds(outputs), seconds(lambda: torch.autograd.grad(outputs(), needing, towards))


def seconds(work: Callable[[], Any]) -> float:
    """By the GPU's own clock, the fastest of some runs; the first, which compiles, is not counted."""
    import torch

    work()
    found = []
    for _ in range(RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000)  # cycles, while the launches queue up
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return min(found)


def pieces(tokens: int, hidden: int, where: Any) -> dict[str, Callable[[], Piece]]:
    """By name, each made when it is needed: together they would hold more than a small GPU has."""
    import torch

    from beam_rl.megatron.kernels import gate, norm_residual, qk_norm, swiglu

    def random(*shape: int) -> "Tensor":
        return torch.randn(*shape, device=where, dtype=torch.bfloat16).requires_grad_()

    def boundary(parts: int, moved: tuple[int, int]) -> Piece:
        """parts: how many of the function's arguments; moved: tensors like x that each pass reads or writes."""
        x = [random(tokens, hidden), random(hidden), EPS, random(tokens, hidden), 0.5, 0.8, random(hidden), EPS]
        one = 2 * tokens * hidden
        return Piece(norm_residual.Fused.apply, norm_residual.reference, x[:parts], moved[0] * one, moved[1] * one)

    def activation() -> Piece:
        rows = tokens * TOP_K
        one = 2 * rows * EXPERT
        return Piece(swiglu.Fused.apply, swiglu.reference, [random(rows, 2 * EXPERT)], 3 * one, 5 * one)

    def heads(count: int, rope: bool, scale: bool) -> Piece:
        table = torch.rand(tokens, HEAD_DIM, device=where)
        position = (table, table, None) if rope else (None, None, table[:, 0].contiguous() if scale else None)
        one = 2 * tokens * count * HEAD_DIM
        of_position = 4 * tokens * (HEAD_DIM if rope else 1 if scale else 0)
        inputs = [random(tokens, count, HEAD_DIM), random(HEAD_DIM), EPS, *position]
        return Piece(qk_norm.Fused.apply, qk_norm.reference, inputs, 2 * one + of_position, 3 * one + of_position)

    def output_gate() -> Piece:
        one = 2 * tokens * HEADS * HEAD_DIM
        inputs = [random(tokens, HEADS * HEAD_DIM), random(tokens, HEADS, HEAD_DIM), random(HEADS)]
        return Piece(gate.Fused.apply, gate.reference, inputs, 3 * one, 5 * one)

    return {
        "norm": lambda: boundary(3, (2, 3)),
        "norm_add": lambda: boundary(6, (3, 4)),
        "norm_add_norm": lambda: boundary(8, (4, 6)),
        "swiglu": activation,
        "q_rope": lambda: heads(HEADS, True, False),
        "q_ssmax": lambda: heads(HEADS, False, True),
        "k_rope": lambda: heads(KV_HEADS, True, False),
        "k": lambda: heads(KV_HEADS, False, False),
        "output_gate": output_gate,
    }
