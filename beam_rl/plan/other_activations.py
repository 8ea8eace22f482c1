"""What autograd keeps of the layers that Megatron-Bridge builds for other models than Beam.

As `activations.py`: read off Megatron's layers, with `megatron/bridged.py`'s norms and attention on a CPU, and Transformer
Engine's on a GPU. A SwiGLU is plain torch on both.
"""

from beam_rl.plan.activations import FP32, ROUTER_BYTES, Parts, Sizes, Tokens

ROW_BYTES = 40  # of a routed row: where it goes, and where it came from


def other_parts(sizes: Sizes, tokens: Tokens) -> Parts:
    v, h = sizes.value_bytes, sizes.hidden
    normed = norm(sizes) + v * h  # and what goes on into a product
    rows = tokens.routed * (v * h + v * 6 * sizes.expert + ROW_BYTES)  # the SwiGLU's output once more, weighted
    router = tokens.stream * ROUTER_BYTES * sizes.experts
    shared = tokens.attended * gated_mlp(sizes, sizes.shared)
    stream = tokens.stream * 3 * v * h
    return Parts(
        norm(sizes),
        tokens.stream * 2 * normed + tokens.attended * attention(sizes),
        {True: router + rows + shared, False: tokens.attended * gated_mlp(sizes, sizes.dense)},
        {True: stream + tokens.routed * 2 * v * h, False: stream},
    )


def norm(sizes: Sizes) -> int:
    """Bytes a token that RMSNorm keeps: its input, or in plain torch that in FP32 and the normalized values."""
    return sizes.hidden * (sizes.value_bytes if sizes.fused else FP32 + sizes.value_bytes)


def attention(sizes: Sizes) -> int:
    """Bytes a token between the first norm and the residual add."""
    v, q, k = sizes.value_bytes, sizes.queries, sizes.keys
    projected = v * (q + 2 * k)  # one matrix, of which values are a view
    placed = 4 * v * sizes.rotary + v * (q + k)  # sines and cosines of queries and keys
    if sizes.fused:
        return projected + placed + (v * (q + k) if sizes.head_norms else 0) + v * q
    normed = (FP32 + v) * q + (FP32 + v if v < FP32 else v) * k if sizes.head_norms else 0  # FP32 keys are views
    core = v * (q + 2 * k) + v * q  # samples are padded and stacked
    return projected + placed + normed + core + v * q  # the output taken apart again


def gated_mlp(sizes: Sizes, width: int) -> int:
    """Bytes a token of a SwiGLU: the first product, SiLU's output, a copy of the other half, the second one's input."""
    return sizes.value_bytes * 5 * width
