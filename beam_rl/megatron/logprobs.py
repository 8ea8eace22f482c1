"""Log-probabilities and entropies of given tokens, straight from the final hidden states.

The logits of all tokens never exist at once: the head, the softcap, the temperature and the log-softmax run over chunks
of tokens, and the backward pass computes each chunk again. With a tensor-parallel group the vocabulary is cut over its
ranks, and what they exchange is four numbers a token. Plain torch: knows nothing about Megatron.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Numerics = Literal["engine", "reference", "fp32_head"]


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    softcap: float,
    temperature: float,
    numerics: Numerics,
    chunk_tokens: int = 1024,
    tp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each target and the entropy of each distribution.

    Beyond its inputs, results and gradients a call holds `chunk_tokens` × vocabulary (the rank's part of it) ×
    `workspace_bytes(dtype, device)`, forward and backward. The gradient of `head` adds up in FP32, once as large as
    `head`; for a BF16 head on a CPU each chunk's share exists beside it in BF16. A frozen head costs neither.

    With `tp_group` every rank calls with the same `hidden` and `targets` and gets the same results, bit for bit. The
    gradient of `hidden` is the whole one on every rank: **it is summed over the group here**, so nothing upstream may
    sum it again (a gather of the sequence in front must split its gradient, not reduce-scatter it). The gradient of
    `head` is the rank's own part and is not exchanged. It supposes that all ranks compute the same loss from the
    results.

    Args:
        hidden: (tokens, hidden) final hidden states, after the last norm; all tokens on every rank.
        head: (vocabulary, hidden), or with `tp_group` the rank's rows of it: equal parts, in the order of the ranks.
        targets: (tokens,) token ids in the whole vocabulary.
        softcap: c in c·tanh(z/c). temperature: > 0, as at sampling.
        numerics: "engine" rounds the softcapped logits to the activation dtype, as vLLM does, and the gradient passes
            through the rounding; "reference" keeps FP32 from the softcap on; "fp32_head" keeps it from the head's product
            on, whose sums are FP32 in any case (a CPU makes an FP32 copy of `head` for it, chunk by chunk).
        chunk_tokens: tokens whose logits exist at one time.
        tp_group: the ranks that share the vocabulary.
    Returns:
        (tokens,) FP32 log-probabilities, with gradient to `hidden` and `head`, and (tokens,) FP32 entropies in nats,
        without. FP64 input gives FP64.
    Raises:
        ValueError: a temperature or chunk that is not above 0, or a target outside the vocabulary.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature}: log-probabilities need a temperature above 0")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens = {chunk_tokens}: a chunk needs at least 1 token")
    _check_targets(targets, len(head) * (dist.get_world_size(tp_group) if tp_group else 1))
    wide = _wide(hidden.dtype)
    options = _Options(
        softcap=torch.tensor([softcap], dtype=wide, device=hidden.device),
        temperature=None if temperature == 1 else torch.tensor([temperature], dtype=wide, device=hidden.device),
        rounded=numerics == "engine" and hidden.dtype != wide,
        wide_product=numerics == "fp32_head" and hidden.dtype != wide,
        chunk_tokens=chunk_tokens,
        tp_group=tp_group,
        first=len(head) * dist.get_rank(tp_group) if tp_group else 0,
    )
    return _TokenLogprobs.apply(hidden, head, targets, options)


def workspace_bytes(dtype: torch.dtype, device: torch.device) -> int:
    """Bytes a logit of the current chunk takes: two FP32 buffers, and for a BF16 head one in BF16.

    CPUs take a third FP32 one then: torch's operators convert there through a copy, on a GPU in registers.
    """
    wide = _wide(dtype)
    if dtype == wide:
        return 2 * wide.itemsize
    return (3 if device.type == "cpu" else 2) * wide.itemsize + dtype.itemsize


def scaled_logits(hidden: Tensor, head: Tensor, softcap: float, temperature: float, rounded: bool) -> Tensor:
    """(tokens, vocabulary) logits in FP32 (FP64 for FP64 input) as the softmax sees them, all at once."""
    z = hidden @ head.T
    capped = torch.tanh(z.to(_wide(z.dtype)) / softcap) * softcap
    if rounded:
        capped = capped.to(z.dtype).to(capped.dtype)
    return capped / temperature


def wide_product(hidden: Tensor, head: Tensor, out: Tensor) -> Tensor:
    """hidden · headᵀ of two BF16 matrices into an FP32 one, nothing rounded on the way."""
    if hidden.is_cuda:
        return torch.mm(hidden, head.T, out_dtype=out.dtype, out=out)
    return torch.mm(hidden.to(out.dtype), head.T.to(out.dtype), out=out)  # no such product on CPUs


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.double if dtype == torch.double else torch.float


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    if not targets.numel():
        return
    low, high = (int(bound) for bound in torch.stack(targets.aminmax()).tolist())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"target {low if low < 0 else high}: outside the vocabulary of {vocabulary} tokens")


@dataclass(frozen=True)
class _Options:
    # Tensors of one element: dividing BF16 by one computes in FP32 without a copy, and divides truly on every device
    # (CUDA multiplies by the reciprocal of a plain number).
    softcap: Tensor
    temperature: Tensor | None  # None: 1
    rounded: bool
    wide_product: bool
    chunk_tokens: int
    tp_group: dist.ProcessGroup | None
    first: int  # the lowest token id in this rank's part of the vocabulary

    def chunks(self, tokens: int) -> Iterator[slice]:
        return (slice(i, min(i + self.chunk_tokens, tokens)) for i in range(0, tokens, self.chunk_tokens))

    def local(self, targets: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Row of `head` for each target (0 where another rank has it), and whether this rank has it."""
        row = targets - self.first
        owned = (row >= 0) & (row < len(head))
        return row.where(owned, 0), owned


class _Workspace:
    """The (chunk, vocabulary) buffers, one allocation for all chunks of a pass."""

    def __init__(self, hidden: Tensor, head: Tensor, chunk_tokens: int) -> None:
        shape, wide = (min(chunk_tokens, len(hidden)), len(head)), _wide(hidden.dtype)
        self.tanh = torch.empty(shape, dtype=wide, device=hidden.device)
        self.spare = torch.empty_like(self.tanh)
        self.z = self.tanh if hidden.dtype == wide else torch.empty(shape, dtype=hidden.dtype, device=hidden.device)

    def logits(self, hidden: Tensor, head: Tensor, options: _Options, keep_tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The chunk's logits as the softmax sees them, tanh(z/c) where it is kept, and the other wide buffer.

        The logits lie in `z` (in the activation dtype, if they are rounded) or in a wide buffer; all three are views
        that the caller may overwrite.
        """
        z, tanh, spare = (buffer[: len(hidden)] for buffer in (self.z, self.tanh, self.spare))
        if options.wide_product:
            wide_product(hidden, head, out=tanh)
            tanh.div_(options.softcap).tanh_()
        else:
            torch.mm(hidden, head.T, out=z)
            torch.div(z, options.softcap, out=tanh).tanh_()
        wide = spare if keep_tanh else tanh
        logits = torch.mul(tanh, options.softcap, out=z if options.rounded else wide)
        if options.temperature is not None:
            logits = torch.div(logits, options.temperature, out=wide)
        return logits, tanh, spare


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
        work = _Workspace(hidden, head, options.chunk_tokens)
        row, owned = options.local(targets, head)
        # Over this rank's vocabulary, with x the logits: max x, Σ exp(x − max), Σ (x − max) exp(x − max), x at the target.
        highest, total, weighted, chosen = hidden.new_empty(4, len(hidden), dtype=work.spare.dtype)
        for part in options.chunks(len(hidden)):
            logits, shifted, exp = work.logits(hidden[part], head, options, keep_tanh=False)
            chosen[part] = logits.gather(-1, row[part, None]).squeeze(-1)
            highest[part] = logits.amax(-1)
            torch.sub(logits, highest[part, None], out=shifted)
            torch.exp(shifted, out=exp)
            torch.sum(exp, -1, out=total[part])
            torch.sum(shifted.mul_(exp), -1, out=weighted[part])
        chosen = chosen.where(owned, 0)
        if options.tp_group is not None:
            highest, total, weighted, chosen = _over_group(highest, total, weighted, chosen, options.tp_group)
        log_total = total.log()
        logp, entropy = chosen - highest - log_total, log_total - weighted / total
        ctx.save_for_backward(hidden, head, targets, highest, total)
        ctx.options = options
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, head, targets, highest, total = ctx.saved_tensors
        options: _Options = ctx.options
        for_hidden, for_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_head = torch.zeros_like(head, dtype=_wide(head.dtype)) if for_head else None
        row, owned = options.local(targets, head)
        upstream = grad_logp if options.temperature is None else grad_logp / options.temperature
        sums = []
        work = _Workspace(hidden, head, options.chunk_tokens)
        for part in options.chunks(len(hidden)):
            logits, tanh, grad = work.logits(hidden[part], head, options, keep_tanh=True)
            torch.sub(logits, highest[part, None], out=grad).exp_().mul_((-upstream[part] / total[part])[:, None])
            each = torch.arange(len(grad), device=grad.device)
            grad[each, row[part]] += upstream[part].where(owned[part], 0)
            into = work.z[: len(grad)] if work.z is not work.tanh else grad
            grad = torch.ops.aten.tanh_backward.grad_input(grad, tanh, grad_input=into)  # grad · (1 − tanh²), rounded
            if grad_head is not None:
                _add_product(grad_head, grad, hidden[part])
            if grad_hidden is not None:
                torch.mm(grad, head, out=grad_hidden[part])
                if options.tp_group is not None:  # goes on beside the next chunk
                    sums.append(dist.all_reduce(grad_hidden[part], group=options.tp_group, async_op=True))
        for handle in sums:
            handle.wait()
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None


def _over_group(highest: Tensor, total: Tensor, weighted: Tensor, chosen: Tensor, group: Any) -> tuple[Tensor, ...]:
    """The four numbers a token over the whole vocabulary, from every rank's own."""
    top = highest.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    lower = highest - top
    scale = lower.exp()
    sums = torch.stack([scale * total, scale * (weighted + lower * total), chosen])
    dist.all_reduce(sums, group=group)
    return top, *sums


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += aᵀ b, with `total` in FP32 whatever `a` and `b` are in."""
    if a.dtype == total.dtype:
        total.addmm_(a.T, b)
    elif total.is_cuda:
        torch.addmm(total, a.T, b, out_dtype=total.dtype, out=total)
    else:  # no such product on CPUs
        total += a.T @ b
