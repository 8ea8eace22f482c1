"""Log-probabilities and entropies of given tokens, straight from the final hidden states.

The logits of all tokens never exist at once: the head, the softcap, the temperature and the log-softmax run over chunks
of tokens, and the backward pass computes them again; on a GPU of four chunks' tokens and a quarter of the vocabulary at a
time, so that the head's gradient is read and written a quarter as often. With a tensor-parallel group the vocabulary is
cut over its ranks, and what they exchange is four numbers a token. What lies between the head's product and the softmax's
sums is a kernel on a GPU, plain torch elsewhere; there a product of another shape may round a logit to its neighbour, in the
gradient alone. Knows nothing about Megatron.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from beam_rl.megatron.kernels import covers
from beam_rl.megatron.kernels import head as kernels

Numerics = Literal["engine", "reference", "fp32_head"]
PARTS = 4  # of the vocabulary, one after the other in a GPU's backward pass, for as many chunks of tokens together
WHOLE_COLUMNS = 64  # a part is a multiple of it: matrix products want their rows to begin at whole memory lines


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    softcap: float | None,
    temperature: float,
    numerics: Numerics,
    chunk_tokens: int = 2048,
    tp_group: dist.ProcessGroup | None = None,
    head_gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each target and the entropy of each distribution.

    Beyond its inputs, results and gradients a call holds `chunk_tokens` × vocabulary (the rank's part of it) ×
    `workspace_bytes(dtype, device, numerics)`, forward and backward, and backward a chunk's gradient of `hidden` in FP32, on
    a GPU that of `PARTS` chunks. The gradient of `head` adds up in FP32, in `head_gradient` or in memory of its own; for a
    BF16 head on a CPU each chunk's share exists beside it in BF16. A frozen head costs neither.

    With `tp_group` every rank calls with the same `hidden` and `targets` and gets the same results, bit for bit. The
    gradient of `hidden` is the whole one on every rank: **it is summed over the group here**, so nothing upstream may
    sum it again (a gather of the sequence in front must split its gradient, not reduce-scatter it). The gradient of
    `head` is the rank's own part and is not exchanged. It supposes that all ranks compute the same loss from the
    results.

    Args:
        hidden: (tokens, hidden) final hidden states, after the last norm; all tokens on every rank.
        head: (vocabulary, hidden), or with `tp_group` the rank's rows of it: equal parts, in the order of the ranks.
        targets: (tokens,) token ids in the whole vocabulary.
        softcap: c in c·tanh(z/c); None: the logits are z. temperature: > 0, as at sampling.
        numerics: "engine" rounds the softcapped logits to the activation dtype, as vLLM does, and the gradient passes
            through the rounding; "reference" keeps FP32 from the softcap on; "fp32_head" keeps it from the head's product
            on, whose sums are FP32 in any case (a CPU makes an FP32 copy of `head` for it, chunk by chunk).
        chunk_tokens: tokens whose logits exist at one time.
        tp_group: the ranks that share the vocabulary.
        head_gradient: FP32, of `head`'s shape. The backward pass adds the gradient of `head` to it, and autograd gets none.
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
        softcap=softcap,
        temperature=temperature,
        rounded=numerics == "engine" and hidden.dtype != wide,
        wide_product=numerics == "fp32_head" and hidden.dtype != wide,
        chunk_tokens=chunk_tokens,
        tp_group=tp_group,
        head_gradient=head_gradient,
        first=len(head) * dist.get_rank(tp_group) if tp_group else 0,
    )
    return _TokenLogprobs.apply(hidden, head, targets, options)


def workspace_bytes(dtype: torch.dtype, device: torch.device, numerics: Numerics = "engine") -> int:
    """Bytes a logit of the current chunk takes.

    On a GPU the head's product, which its gradient overwrites; with "fp32_head" the gradient lies beside it. In plain
    torch two FP32 buffers, and for a BF16 head one in BF16; CPUs take a third FP32 one then: torch's operators convert there
    through a copy.
    """
    wide = _wide(dtype)
    if device.type == "cuda" and dtype != torch.double:
        return dtype.itemsize + (wide.itemsize if numerics == "fp32_head" and dtype != wide else 0)
    return 2 * wide.itemsize + (wide.itemsize + dtype.itemsize if dtype != wide else 0)


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


def _product(hidden: Tensor, head: Tensor, out: Tensor) -> Tensor:
    """hidden · headᵀ, in the dtype of `out`."""
    return torch.mm(hidden, head.T, out=out) if out.dtype == hidden.dtype else wide_product(hidden, head, out)


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
    softcap: float | None
    temperature: float
    rounded: bool
    wide_product: bool
    chunk_tokens: int
    tp_group: dist.ProcessGroup | None
    head_gradient: Tensor | None
    first: int  # the lowest token id in this rank's part of the vocabulary

    def local(self, targets: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Row of `head` for each target (0 where another rank has it), and whether this rank has it."""
        row = targets - self.first
        owned = (row >= 0) & (row < len(head))
        return row.where(owned, 0), owned


def _slices(n: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, n)) for i in range(0, n, size))


class _Softmax(Protocol):
    """The chunks' way from the head's product to the softmax and back, in buffers made once for all chunks of a pass."""

    parts: int  # of the vocabulary, that a gradient is asked for

    def sums(self, hidden: Tensor, head: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        """As `kernels.sums`."""

    def gradient(
        self, hidden: Tensor, head: Tensor, row: Tensor, highest: Tensor, total: Tensor, upstream: Tensor, at: Tensor
    ) -> Tensor:
        """(chunk, vocabulary) of the product, in the activations' dtype, as `kernels.gradient`; `at` is its `at_target`.

        Where there are parts, a token's row may lie in another one: below 0 or past the end.
        """


class _Fused:
    parts = PARTS

    def __init__(self, hidden: Tensor, head: Tensor, options: _Options) -> None:
        rows, wide = min(options.chunk_tokens, len(hidden)), options.wide_product
        size = rows * PARTS * _columns(len(head), PARTS)
        self.product = hidden.new_empty(size, dtype=_wide(hidden.dtype) if wide else hidden.dtype)
        self.out = hidden.new_empty(size) if wide else self.product
        self.form = options.softcap, options.temperature, options.rounded

    def _logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return _product(hidden, head, _matrix(self.product, hidden, head))

    def sums(self, hidden: Tensor, head: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        return kernels.sums(self._logits(hidden, head), row, *self.form)

    def gradient(
        self, hidden: Tensor, head: Tensor, row: Tensor, highest: Tensor, total: Tensor, upstream: Tensor, at: Tensor
    ) -> Tensor:
        logits, out = self._logits(hidden, head), _matrix(self.out, hidden, head)
        return kernels.gradient(logits, row, *self.form, highest, total, upstream, at, out)


def _matrix(buffer: Tensor, hidden: Tensor, head: Tensor) -> Tensor:
    """(tokens, vocabulary) in the buffer, from its beginning and without gaps."""
    return buffer[: len(hidden) * len(head)].view(len(hidden), len(head))


def _columns(vocabulary: int, parts: int) -> int:
    """Of a part of the vocabulary; the last one may have fewer."""
    return -(-vocabulary // (parts * WHOLE_COLUMNS)) * WHOLE_COLUMNS


class _Plain:
    """Softcap and temperature are tensors of one element: dividing BF16 by one computes in FP32 without a copy, and divides
    truly on every device (CUDA multiplies by the reciprocal of a plain number)."""

    parts = 1

    def __init__(self, hidden: Tensor, head: Tensor, options: _Options) -> None:
        shape, wide = (min(options.chunk_tokens, len(hidden)), len(head)), _wide(hidden.dtype)
        self.options = options
        self.softcap, self.temperature = (
            torch.tensor([value or 1.0], dtype=wide, device=hidden.device)
            for value in (options.softcap, options.temperature)
        )
        self.tanh = hidden.new_empty(shape, dtype=wide)
        self.spare = torch.empty_like(self.tanh)
        self.z = self.tanh if hidden.dtype == wide else hidden.new_empty(shape)

    def _logits(self, hidden: Tensor, head: Tensor, keep_tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The chunk's logits as the softmax sees them, tanh(z/c) where it is kept and there, and the other wide buffer.

        The logits lie in `z` (in the activation dtype, if they are rounded) or in a wide buffer; all three are views
        that the caller may overwrite.
        """
        z, tanh, spare = (buffer[: len(hidden)] for buffer in (self.z, self.tanh, self.spare))
        logits = _product(hidden, head, tanh if self.options.wide_product else z)
        wide = spare if keep_tanh else tanh
        if self.options.softcap is not None:
            torch.div(logits, self.softcap, out=tanh).tanh_()
            logits = torch.mul(tanh, self.softcap, out=z if self.options.rounded else wide)
        if self.options.temperature != 1:
            logits = torch.div(logits, self.temperature, out=wide)
        return logits, tanh, spare

    def sums(self, hidden: Tensor, head: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        logits, shifted, exp = self._logits(hidden, head, keep_tanh=False)
        chosen = logits.gather(-1, row[:, None]).squeeze(-1).to(exp.dtype)
        highest = logits.amax(-1).to(exp.dtype)
        torch.sub(logits, highest[:, None], out=shifted)
        torch.exp(shifted, out=exp)
        return highest, exp.sum(-1), shifted.mul_(exp).sum(-1), chosen

    def gradient(
        self, hidden: Tensor, head: Tensor, row: Tensor, highest: Tensor, total: Tensor, upstream: Tensor, at: Tensor
    ) -> Tensor:
        logits, tanh, grad = self._logits(hidden, head, keep_tanh=True)
        torch.sub(logits, highest[:, None], out=grad).exp_().mul_((-upstream / total)[:, None])
        grad[torch.arange(len(grad), device=grad.device), row] += at
        into = self.z[: len(grad)] if self.z is not self.tanh else grad
        if self.options.softcap is None:
            return grad if into is grad else into.copy_(grad)
        # grad · (1 − tanh²), rounded
        return torch.ops.aten.tanh_backward.grad_input(grad, tanh, grad_input=into)


def _softmax(hidden: Tensor, head: Tensor, options: _Options) -> _Softmax:
    return (_Fused if covers(hidden, head) else _Plain)(hidden, head, options)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
        softmax = _softmax(hidden, head, options)
        row, owned = options.local(targets, head)
        # Over this rank's vocabulary, with x the logits: max x, Σ exp(x − max), Σ (x − max) exp(x − max), x at the target.
        found = hidden.new_empty(4, len(hidden), dtype=_wide(hidden.dtype))
        for part in _slices(len(hidden), options.chunk_tokens):
            found[:, part] = torch.stack(softmax.sums(hidden[part], head, row[part]))
        highest, total, weighted, chosen = found
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
        grad_head = options.head_gradient if for_head else None
        if for_head and grad_head is None:
            grad_head = torch.zeros_like(head, dtype=_wide(head.dtype))
        row, owned = options.local(targets, head)
        upstream = (grad_logp if options.temperature == 1 else grad_logp / options.temperature).contiguous()
        at_target = upstream.where(owned, 0)
        sums = []
        softmax = _softmax(hidden, head, options)
        vocabulary = list(_slices(len(head), _columns(len(head), softmax.parts)))
        together = max(1, min(options.chunk_tokens * softmax.parts, len(hidden)))
        added = hidden.new_empty(together, hidden.size(1), dtype=_wide(hidden.dtype)) if for_hidden else None
        for tokens in _slices(len(hidden), together):
            of_tokens = [each[tokens] for each in (highest, total, upstream, at_target)]
            of_hidden = added[: tokens.stop - tokens.start].zero_() if added is not None else None
            for columns in vocabulary:
                grad = softmax.gradient(hidden[tokens], head[columns], row[tokens] - columns.start, *of_tokens)
                if grad_head is not None:
                    _add_product(grad_head[columns], grad.T, hidden[tokens])
                if of_hidden is not None:
                    _add_product(of_hidden, grad, head[columns])
            if grad_hidden is not None and of_hidden is not None:
                grad_hidden[tokens] = of_hidden
                if options.tp_group is not None:  # goes on beside the next chunk
                    sums.append(dist.all_reduce(grad_hidden[tokens], group=options.tp_group, async_op=True))
        for handle in sums:
            handle.wait()
        if grad_head is None or grad_head is options.head_gradient:
            return grad_hidden, None, None, None
        return grad_hidden, grad_head.to(head.dtype), None, None


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
    """total += a b, with `total` in FP32 whatever `a` and `b` are in."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # no such product on CPUs
        total += a @ b
