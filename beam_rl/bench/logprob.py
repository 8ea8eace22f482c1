"""The log-probability head in chunks: its time beside its bare GEMMs, its memory beside the plain computation's.

Both run forward and backward to the hidden states and the head, with Beam's softcap and the engine's rounding; the chunked
one adds the head's gradient to memory that is there, as the trainer has it.
"""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from beam_rl.bench.result import AsJson, Result, show

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY = 151_936
SOFTCAP = 30.0
PLAIN_BYTES_A_LOGIT = {"bfloat16": 20, "float32": 24}  # the plain computation's peak, to choose how much of it fits
GEMM_TOKENS = 4096  # in the GEMMs whose rate is the limit: enough for the full rate, few enough to fit everywhere


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden: int
    dtype: str
    chunk_tokens: int


def logprob(
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens scored.", show_default="32768 on a GPU, 2048 on a CPU")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, help="The hidden size.", show_default="5120 on a GPU, 256 on a CPU")
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of hidden states and head.", show_default="bfloat16 on a GPU, float32 on a CPU"),
    ] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens whose logits exist at one time.")] = 2048,
    as_json: AsJson = False,
) -> None:
    """Log-probabilities and entropies over a vocabulary of 151,936 tokens, forward and backward.

    The figure is the seconds of the chunked head; the limit is the time its four GEMMs (forward, again in the backward
    pass, two gradients) take at the rate measured for such GEMMs in this run. Beside them the plain computation, with
    the whole FP32 logits in torch's autograd: over as many tokens as its memory allows, where all don't fit.
    """
    from beam_rl.bench import measure

    where = measure.device()
    on_gpu = where.type == "cuda"
    case = Case(
        tokens=tokens or (32768 if on_gpu else 2048),
        hidden=hidden or (5120 if on_gpu else 256),
        dtype=(dtype or (Dtype.bfloat16 if on_gpu else Dtype.float32)).value,
        chunk_tokens=chunk,
    )
    show(bench(case), as_json)


def bench(case: Case) -> Result:
    """Measures the chunked head, the plain one and the bare GEMMs, each in a process of its own."""
    from beam_rl.bench import measure

    where = measure.device()
    typer.echo("measuring the GEMMs alone, the head in chunks and the plain one, one after the other", err=True)
    rate = measure.in_fresh_process(gemm_rate, case)
    held, chunked_s = measure.in_fresh_process(run_chunked, case)
    chunked_peak = held + 4 * VOCABULARY * case.hidden  # with the head's gradient, which plain torch's has, too
    fitting = replace(case, tokens=plain_tokens(case, measure.free_bytes(where)))
    plain_peak, plain_s = measure.in_fresh_process(run_plain, fitting)
    return Result(
        name="logprob",
        figure=chunked_s,
        unit="s",
        limit=4 * gemm_flops(case.tokens, case.hidden) / rate,
        machine=measure.machine(where),
        detail={
            **asdict(case),
            "vocabulary": VOCABULARY,
            "gemm_tflops": rate / 1e12,
            "chunked_peak_bytes": chunked_peak,
            "chunked_extra_bytes": held - hidden_gradient_bytes(case),
            "plain_tokens": fitting.tokens,
            "plain_seconds": plain_s,
            "plain_peak_bytes": plain_peak,
            "plain_to_chunked_peak": plain_peak / chunked_peak,
        },
    )


def hidden_gradient_bytes(case: Case) -> int:
    """What a call leaves behind: all else that it held was extra."""
    import torch

    return case.tokens * case.hidden * getattr(torch, case.dtype).itemsize


def plain_tokens(case: Case, free_bytes: int) -> int:
    """The case's tokens, halved until the plain computation fits into four fifths of the free memory."""
    tokens = case.tokens
    while tokens > 1 and tokens * VOCABULARY * PLAIN_BYTES_A_LOGIT[case.dtype] > 0.8 * free_bytes:
        tokens //= 2
    return tokens


def gemm_flops(tokens: int, hidden: int) -> int:
    return 2 * tokens * hidden * VOCABULARY


def gemm_rate(case: Case) -> float:
    """Floating-point operations a second in the head's GEMMs: logits and the two gradients, into memory at hand.

    As many, one after the other, as all tokens need: a GPU soon slows down to the clock that its power allows.
    """
    import torch

    from beam_rl.bench import measure

    where = measure.device()
    hidden, head, _ = _inputs(replace(case, tokens=min(case.tokens, GEMM_TOKENS)), where)
    hidden, head = hidden.detach(), head.detach()
    logits = hidden @ head.T
    grads = torch.empty_like(hidden), torch.empty_like(head)
    times = max(1, case.tokens // GEMM_TOKENS)

    def gemms() -> None:
        for _ in range(times):
            for _ in range(2):  # forward, and again in the backward pass
                torch.mm(hidden, head.T, out=logits)
            torch.mm(logits, head, out=grads[0])
            torch.mm(logits.T, hidden, out=grads[1])

    _, seconds = measure.peak_and_seconds(gemms, where)
    return times * 4 * gemm_flops(len(hidden), case.hidden) / seconds


def run_chunked(case: Case) -> tuple[int, float]:
    """Peak bytes, but for the memory that the head's gradient is added to, and seconds of the chunked head."""
    import torch

    from beam_rl.bench import measure
    from beam_rl.megatron.logprobs import token_logprobs

    main_gradient = torch.empty(VOCABULARY, case.hidden, device=measure.device()).fill_(0)

    def logprobs(hidden: "Tensor", head: "Tensor", targets: "Tensor") -> Any:
        options: Any = {"softcap": SOFTCAP, "temperature": 1.0, "numerics": "engine"}
        own: Any = {"chunk_tokens": case.chunk_tokens, "head_gradient": main_gradient}
        return token_logprobs(hidden, head, targets, **options, **own)

    return _peak_and_seconds(logprobs, case)


def run_plain(case: Case) -> tuple[int, float]:
    """Peak bytes and seconds of the computation as it is written down."""
    return _peak_and_seconds(_plain, case)


def _plain(hidden: "Tensor", head: "Tensor", targets: "Tensor") -> tuple["Tensor", "Tensor"]:
    import torch

    z = hidden @ head.T
    capped = (torch.tanh(z.float() / SOFTCAP) * SOFTCAP).to(z.dtype)
    logp = capped.float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), entropy


def _peak_and_seconds(logprobs: Any, case: Case) -> tuple[int, float]:
    from beam_rl.bench import measure

    where = measure.device()
    inputs = _inputs(case, where)

    def forward_and_backward() -> None:
        hidden, head, targets = inputs
        hidden.grad = head.grad = None
        logp, _ = logprobs(hidden, head, targets)
        logp.mean().backward()

    return measure.peak_and_seconds(forward_and_backward, where)


def _inputs(case: Case, where: Any) -> tuple["Tensor", "Tensor", "Tensor"]:
    """Hidden states, head (logits of a few units, as a model has them) and targets."""
    import torch

    generator = torch.Generator(where).manual_seed(0)
    options: Any = {"generator": generator, "device": where, "dtype": getattr(torch, case.dtype)}
    hidden = torch.randn(case.tokens, case.hidden, **options)
    head = torch.randn(VOCABULARY, case.hidden, **options).mul_(3 * case.hidden**-0.5)
    targets = torch.randint(VOCABULARY, (case.tokens,), generator=generator, device=where)
    return hidden.requires_grad_(), head.requires_grad_(), targets
