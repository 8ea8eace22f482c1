"""What a micro-batch's activations take on a rank: the tensors that autograd keeps, op by op, as the model is written.

Pure functions of sizes. The counts follow `megatron/model.py`, `attention.py`, `kernels` and `logprobs.py`; those of other
models than Beam (`other_activations.py`) Megatron's own layers.
`tests/test_plan_memory.py` compares them with what a real update has alive. Knows nothing about recipes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FP32 = 4
EXPERT_IMBALANCE = 1.3  # the busiest expert-parallel rank's tokens over the mean; there is no capacity limit
ROUTER_BYTES = 20  # a token and expert: scores, weights, and the rows' places
HEAD_PARTS = 4  # `megatron.logprobs.PARTS`
HELD_BESIDE = 2  # layers' inputs that a pipeline stage has in send and receive buffers


@dataclass(frozen=True)
class Sizes:
    """Of the model on one rank: what tensor parallelism splits is divided already."""

    hidden: int
    queries: int  # heads · head_dim
    keys: int  # KV heads · head_dim
    dense: int  # a dense MLP's width
    expert: int  # an expert's width
    experts: int  # of the whole layer
    top_k: int
    vocabulary: int
    value_bytes: int  # of an activation
    fused: bool  # on a GPU: this project's kernels between products, Transformer Engine's attention
    head_norms: bool = True  # of Q and K; Beam has them
    rotary: int = 0  # values of a head that get a position by Megatron's own code; Beam: none
    shared: int = 0  # width of the experts that every token meets


@dataclass(frozen=True)
class Tokens:
    """Of one micro-batch."""

    stream: float  # on the residual stream of a rank: a part of the pack with sequence or context parallelism
    attended: float  # whose attention and dense MLP the rank computes a part of
    routed: float  # rows that the rank's experts get, a token's top-k counted one by one
    scored: float  # whose log-probabilities the rank computes


def norm(sizes: Sizes) -> int:
    """Bytes a token that RMSNorm keeps: its input, or in plain torch that in FP32 and the normalized values."""
    return sizes.hidden * (sizes.value_bytes if sizes.fused else 2 * FP32)


def attention(sizes: Sizes, tokens: Tokens) -> float:
    """Kept between the layer's input and the first residual add, both norms included."""
    v, h, q, k = sizes.value_bytes, sizes.hidden, sizes.queries, sizes.keys
    on_stream = norm(sizes) + v * h + norm(sizes)
    projected = v * (2 * q + 2 * k)  # one matrix, of which values and gate are views
    core = v * (q + k) + v * q  # with positions, and the output
    gated = v * q
    if not sizes.fused:
        projected += 2 * FP32 * (q + k) if v < FP32 else 2 * FP32 * q + FP32 * k  # norms; FP32 keys are views, too
        core += v * (q + 2 * k) + v * q  # samples are padded and stacked, and the output is taken apart again
        gated += v * q  # the sigmoid
    return tokens.stream * on_stream + tokens.attended * (projected + core + gated)


def gated_mlp(sizes: Sizes, width: int) -> int:
    """Bytes a row between a SwiGLU's input and its output: the first product (plain torch: in FP32, and SiLU's output),
    and what the second one takes."""
    v = sizes.value_bytes
    return v * 2 * width + v * width if sizes.fused else FP32 * 2 * width + FP32 * width + v * width


def feed_forward_input(sizes: Sizes, tokens: Tokens) -> float:
    """The norm before an MLP, whose output goes in, and the one after it."""
    return tokens.stream * (2 * norm(sizes) + sizes.value_bytes * sizes.hidden)


def dense_mlp(sizes: Sizes, tokens: Tokens) -> float:
    return tokens.attended * gated_mlp(sizes, sizes.dense)


def experts(sizes: Sizes, tokens: Tokens) -> float:
    """The router in FP32, and each routed row's input, inside and output."""
    v, h = sizes.value_bytes, sizes.hidden
    router = tokens.stream * ((FP32 * h if v < FP32 else 0) + ROUTER_BYTES * sizes.experts)
    return router + tokens.routed * (2 * v * h + gated_mlp(sizes, sizes.expert))


def backward_peak(sizes: Sizes, tokens: Tokens, sparse: bool) -> float:
    """Gradients alive at one time beside what is kept: of experts' outputs (plain torch: weighted, in FP32) and insides, or
    of an MLP's inside, and some of the residual stream's (plain torch: in FP32)."""
    v, h = sizes.value_bytes, sizes.hidden
    stream = tokens.stream * 4 * (v if sizes.fused else FP32) * h
    if sparse:
        return stream + tokens.routed * (v * (h + 3 * sizes.expert) if sizes.fused else (2 * FP32 + v) * h)
    return stream + tokens.attended * (2 * FP32 + v) * sizes.dense


def beam_parts(sizes: Sizes, tokens: Tokens) -> "Parts":
    return Parts(
        norm(sizes),
        attention(sizes, tokens) + feed_forward_input(sizes, tokens),
        {True: experts(sizes, tokens), False: dense_mlp(sizes, tokens)},
        {sparse: backward_peak(sizes, tokens, sparse) for sparse in (True, False)},
    )


def head(
    sizes: Sizes, tokens: Tokens, norm_bytes: int, chunk_tokens: int, trainable: bool, workspace_bytes: int
) -> float:
    """The final norm, the gathered hidden states and their gradient, which adds up in FP32, one chunk of logits.

    The head's gradient goes straight to where Megatron adds them up; on a CPU each BF16 chunk's lies beside it first.
    """
    v, h = sizes.value_bytes, sizes.hidden
    of_head = v * sizes.vocabulary * h if trainable and v < FP32 and not sizes.fused else 0
    logits = min(chunk_tokens, tokens.scored) * sizes.vocabulary * workspace_bytes
    of_hidden = min(chunk_tokens * (HEAD_PARTS if sizes.fused else 1), tokens.scored) * FP32 * h
    return tokens.stream * norm_bytes + tokens.scored * 2 * v * h + of_head + of_hidden + logits


@dataclass(frozen=True)
class Parts:
    """Bytes of a layer, by what is kept when; by whether it has experts."""

    norm: int  # a token's, of the norm before the head
    around: float  # outside the MLP or the experts
    inside: Mapping[bool, float]
    backward: Mapping[bool, float]  # gradients, beside what is kept


@dataclass(frozen=True)
class Stage:
    """The layers that a rank holds."""

    dense: int
    sparse: int
    in_flight: float  # micro-batches whose activations it keeps at one time, in units of all its layers
    last: bool


def peak(
    parts: Parts,
    sizes: Sizes,
    tokens: Tokens,
    stage: Stage,
    recompute: Literal["none", "selective", "full"],
    chunk_tokens: int,
    head_trainable: bool,
    workspace_bytes: int,
) -> float:
    """Bytes that a rank's activations take at most in an update."""
    kinds = {True: stage.sparse, False: stage.dense}
    inside, around = parts.inside, parts.around
    layer_input = tokens.stream * sizes.value_bytes * sizes.hidden
    kept = {
        "none": {sparse: around + inside[sparse] for sparse in kinds},
        "selective": {sparse: around for sparse in kinds},
        "full": {sparse: layer_input for sparse in kinds},
    }[recompute]
    again = {
        "none": {sparse: 0.0 for sparse in kinds},
        "selective": inside,
        "full": {sparse: around + inside[sparse] for sparse in kinds},
    }[recompute]
    present = [sparse for sparse, count in kinds.items() if count]
    held = stage.in_flight * sum(kinds[sparse] * kept[sparse] for sparse in present) + HELD_BESIDE * layer_input
    layer = max((again[sparse] + parts.backward[sparse] for sparse in present), default=0.0)
    if not stage.last:
        return held + layer
    return held + max(layer, head(sizes, tokens, parts.norm, chunk_tokens, head_trainable, workspace_bytes))
