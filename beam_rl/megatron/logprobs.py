"""Log-probabilities and entropies of given tokens, straight from the final hidden states.

The logits of all tokens never exist at once: the head, the softcap, the temperature and the log-softmax run over chunks
of tokens, and the backward pass computes each chunk again. Plain torch: knows nothing about Megatron.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Numerics = Literal["engine", "reference"]


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    softcap: float,
    temperature: float,
    numerics: Numerics,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each target and the entropy of each distribution.

    Args:
        hidden: (tokens, hidden) final hidden states, after the last norm. head: (vocab, hidden).
        targets: (tokens,) token ids. softcap: c in c·tanh(z/c). temperature: > 0, as at sampling.
        numerics: "engine" rounds the softcapped logits to the activation dtype, as vLLM does; "reference" keeps FP32.
        chunk_tokens: tokens whose FP32 logits exist at one time.
    Returns:
        (tokens,) FP32 log-probabilities, with gradient to `hidden` and `head`, and (tokens,) FP32 entropies, without.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature}: log-probabilities need a temperature above 0")
    return _TokenLogprobs.apply(hidden, head, targets, softcap, temperature, numerics == "engine", chunk_tokens)


def scaled_logits(hidden: Tensor, head: Tensor, softcap: float, temperature: float, rounded: bool) -> Tensor:
    """(tokens, vocab) logits in FP32 (FP64 for FP64 input), as the softmax sees them."""
    z = F.linear(hidden, head)
    wide = z.double() if z.dtype == torch.double else z.float()
    wide = torch.tanh(wide / softcap) * softcap
    if rounded:
        wide = wide.to(z.dtype).to(wide.dtype)
    return wide / temperature


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        softcap: float,
        temperature: float,
        rounded: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, head, targets)
        ctx.options = (softcap, temperature, rounded, chunk_tokens)
        chosen, entropy = [], []
        for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            logp = scaled_logits(h, head, softcap, temperature, rounded).log_softmax(-1)
            chosen.append(logp.gather(-1, t[:, None]).squeeze(-1))
            entropy.append(-(logp.exp() * logp).sum(-1))
        out = torch.cat(chosen), torch.cat(entropy)
        ctx.mark_non_differentiable(out[1])
        return out

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Any, ...]:
        hidden, head, targets = ctx.saved_tensors
        softcap, temperature, rounded, chunk_tokens = ctx.options
        grad_hidden = torch.empty_like(hidden)
        wide = torch.double if hidden.dtype == torch.double else torch.float
        grad_head = torch.zeros_like(head, dtype=wide)
        for start in range(0, len(targets), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            h, t, g = hidden[part], targets[part], grad_logp[part]
            z = scaled_logits(h, head, softcap, temperature, rounded)
            grad = -z.softmax(-1) * g[:, None]
            grad.scatter_add_(-1, t[:, None], g[:, None].to(grad.dtype))
            # Through the temperature and the softcap; rounding passes the gradient on.
            capped = z * (temperature / softcap)
            grad = (grad / temperature * (1 - capped.square())).to(h.dtype)
            grad_hidden[part] = grad @ head
            grad_head += (grad.T @ h).to(wide)
        return grad_hidden, grad_head.to(head.dtype), None, None, None, None, None
