"""From the head's product to log-probabilities and entropies, and back: softcap, rounding, temperature, softmax.

Forward, a row of logits is read once and leaves four numbers. Backward it is read once, and its gradient written in its
place or beside it; what lies between is computed again. Bytes of a logit of b bytes: b forward, 2·b backward. A logit
takes some twenty instructions each way, more time than its bytes: hence `fp_fusion`, and a softcap without divisions.
"""

import torch
from torch import Tensor

from beam_rl.megatron.kernels import INTERPRETED, rounded, store_rounded, tl, triton

BLOCK, WARPS = 2048, 4  # values that a program takes at a time: of a row one after the other forward, one backward
LOWEST = -1e30  # before there is a maximum; an infinity would make 0 · ∞


@triton.jit
def _reciprocal(x):
    """To a unit in the last place: one instruction in the place of a division's six."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _tanh(x):
    """In FP32, to a part in a million; by its series where the usual form would lose what is small."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, series, 1.0 - 2.0 * _reciprocal(tl.exp(2.0 * x) + 1.0))


@triton.jit
def _as_softmax_sees(z, softcap, temperature, ROUND: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    """(logits, tanh(z / softcap)) of a block z of the head's product."""
    tanh = z
    if SOFTCAP:
        tanh = _tanh(z * (1.0 / softcap))
        z = tanh * softcap
        if ROUND:
            z = rounded(z, tl.bfloat16)
    if TEMPERATURE:
        z = tl.div_rn(z, temperature)
    return z, tanh


@triton.jit
def _counted(x, top, total, weighted):
    """The softmax's sums with the logits x, each lane's own; what there is is corrected when x has a higher one."""
    highest = tl.max(x, 0)
    if highest > top:
        down = top - highest
        scale = tl.exp(down)
        weighted = scale * (weighted + down * total)
        total = scale * total
        top = highest
    shifted = x - top
    exp = tl.exp(shifted)
    return top, total + exp, weighted + shifted * exp


@triton.jit
def _forward_kernel(
    logits, rows, highest, total, weighted, chosen, vocabulary, softcap, temperature,
    ROUND: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """A token a program."""
    token = tl.program_id(0).to(tl.int64)
    line, lane = logits + token * vocabulary, tl.arange(0, BLOCK)
    top = tl.full((), LOWEST, tl.float32)
    sum_, sum_weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    whole = vocabulary // BLOCK * BLOCK
    for start in tl.range(0, whole, BLOCK):
        z = tl.load(line + start + lane).to(tl.float32)
        x, _ = _as_softmax_sees(z, softcap, temperature, ROUND, SOFTCAP, TEMPERATURE)
        top, sum_, sum_weighted = _counted(x, top, sum_, sum_weighted)
    if whole < vocabulary:
        inside = whole + lane < vocabulary
        z = tl.load(line + whole + lane, mask=inside, other=0.0).to(tl.float32)
        x, _ = _as_softmax_sees(z, softcap, temperature, ROUND, SOFTCAP, TEMPERATURE)
        top, sum_, sum_weighted = _counted(tl.where(inside, x, LOWEST), top, sum_, sum_weighted)
    tl.store(highest + token, top)
    tl.store(total + token, tl.sum(sum_, 0))
    tl.store(weighted + token, tl.sum(sum_weighted, 0))
    one = tl.arange(0, 1)
    z = tl.load(line + tl.load(rows + token) + one).to(tl.float32)
    x, _ = _as_softmax_sees(z, softcap, temperature, ROUND, SOFTCAP, TEMPERATURE)
    tl.store(chosen + token + one, x)


@triton.jit
def _backward_kernel(
    logits, rows, highest, total, upstream, at_target, out, vocabulary, softcap, temperature,
    ROUND: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a token's logits a program. upstream: the gradient of the log-probability, by the temperature."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < vocabulary
    at = token * vocabulary + column
    z = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    x, tanh = _as_softmax_sees(z, softcap, temperature, ROUND, SOFTCAP, TEMPERATURE)
    grad = tl.exp(x - tl.load(highest + token)) * (-tl.load(upstream + token) / tl.load(total + token))
    target = tl.load(rows + token)
    if (target >= first) & (target < first + BLOCK):
        grad += tl.where(column == target, tl.load(at_target + token), 0.0)
    if SOFTCAP:
        grad *= 1.0 - tanh * tanh
    store_rounded(out + at, grad, inside)


def sums(
    logits: Tensor, row: Tensor, softcap: float | None, temperature: float, round_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each token, with x its logits as the softmax sees them: max x, Σ exp(x − max), Σ (x − max) exp(x − max), x at row.

    Args:
        logits: (tokens, vocabulary) the head's product, without gaps. row: (tokens,) of a logit of each.
        softcap: c in c·tanh(z/c), None: none. round_: what that gives, to BF16.
    Returns:
        (tokens,) FP32 each.
    """
    out = logits.new_empty(4, len(logits), dtype=torch.float32)
    _forward_kernel[(len(logits),)](
        logits, row, *out, logits.size(1), softcap or 1.0, temperature,
        **_kinds(softcap, temperature, round_), LOWEST=LOWEST, num_warps=WARPS,
    )  # fmt: skip
    return out[0], out[1], out[2], out[3]


def gradient(
    logits: Tensor,
    row: Tensor,
    softcap: float | None,
    temperature: float,
    round_: bool,
    highest: Tensor,
    total: Tensor,
    upstream: Tensor,
    at_target: Tensor,
    out: Tensor,
) -> Tensor:
    """Into `out`, which may be `logits`: the gradient of the head's product, through a rounding as if there were none.

    Args:
        highest, total: of `sums`, over the whole vocabulary. upstream: (tokens,) FP32 gradients of the log-probabilities,
            divided by the temperature. at_target: the same, 0 where the target is in another part of the vocabulary.
    """
    grid = (len(logits), triton.cdiv(logits.size(1), BLOCK))
    _backward_kernel[grid](
        logits, row, highest, total, upstream, at_target, out, logits.size(1), softcap or 1.0, temperature,
        **_kinds(softcap, temperature, round_), num_warps=WARPS,
    )  # fmt: skip
    return out


def _kinds(softcap: float | None, temperature: float, round_: bool) -> dict[str, int | bool]:
    return {"ROUND": round_, "SOFTCAP": softcap is not None, "TEMPERATURE": temperature != 1, "BLOCK": BLOCK}
