"""Bytes of a trainer rank, by what they are for, at the moments when a GPU is fullest. Pure formulas of counts.

Knows nothing about engines (`engine_memory.py`) or about recipes.
"""

from dataclasses import asdict, dataclass, replace
from typing import Literal

from beam_rl.plan.model_shapes import RankShape

SIZE = {"fp32": 4, "bf16": 2}
NVME_BLOCKS_ON_GPU, NVME_BLOCKS_ON_HOST = 3, 5
STATE_TENSORS = 3  # of Adam: the main copy and two moments


@dataclass(frozen=True)
class Bytes:
    """What a GPU (without one: a process's share of the host's memory) holds at one moment."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    adapters: int = 0
    buffers: int = 0  # of syncs, NVMe blocks, libraries: all that is none of the others

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Replicas:
    """Ranks that have the same parameters: those outside experts, and those of experts."""

    dense: int
    expert: int


@dataclass(frozen=True)
class OptimizerKind:
    distributed: bool
    offload: Literal["none", "cpu", "nvme"]
    moment_bytes: int  # of one element of one moment
    block_bytes: int


def weight_bytes(shape: RankShape) -> int:
    """All parameters but an adapter's, and the buffers."""
    return sum(SIZE[h.dtype] * h.count for h in shape.held) - adapter_bytes(shape) + 4 * shape.buffers


def adapter_bytes(shape: RankShape) -> int:
    """An adapter has the model's dtype, and nothing else is trained beside it."""
    if not shape.adapter:
        return 0
    return sum(SIZE[h.dtype] * h.count for h in shape.held if h.trainable)


def quantized_bytes(shape: RankShape) -> int:
    """What Transformer Engine keeps of weights that it multiplies in MXFP8: payload and scales, along either dimension."""
    return round(2 * 33 / 32 * shape.count(mxfp8=True))


def gradient_bytes(shape: RankShape) -> int:
    """FP32, of every trainable parameter."""
    return 4 * shape.count(trainable=True)


def owned(shape: RankShape, replicas: Replicas, distributed: bool, dtype: str) -> int:
    """Elements of trainable parameters of a type whose optimizer state this rank keeps."""
    dense, expert = (shape.count(trainable=True, dtype=dtype, expert=of_expert) for of_expert in (False, True))
    return -(-dense // replicas.dense) + -(-expert // replicas.expert) if distributed else dense + expert


def state_bytes(shape: RankShape, replicas: Replicas, kind: OptimizerKind) -> int:
    """Main parameters (an FP32 weight is its own) and both moments, wherever they are."""
    narrow, wide = (owned(shape, replicas, kind.distributed, dtype) for dtype in ("bf16", "fp32"))
    return (4 + 2 * kind.moment_bytes) * narrow + 2 * kind.moment_bytes * wide


def main_copy_bytes(shape: RankShape, replicas: Replicas, kind: OptimizerKind) -> int:
    """FP32 copies that exist at the start whatever `offload` says."""
    return 4 * owned(shape, replicas, kind.distributed, "bf16")


def block_bytes(kind: OptimizerKind, blocks: int) -> int:
    return 0 if kind.offload == "none" else blocks * kind.block_bytes


def at_update(shape: RankShape, replicas: Replicas, kind: OptimizerKind, activations: int, native: bool) -> Bytes:
    """In the backward pass. native: MXFP8 weights exist beside the BF16 ones."""
    return Bytes(
        weights=weight_bytes(shape) + (quantized_bytes(shape) if native else 0),
        gradients=gradient_bytes(shape),
        optimizer=state_bytes(shape, replicas, kind) if kind.offload == "none" else 0,
        activations=activations,
        adapters=adapter_bytes(shape),
        buffers=block_bytes(kind, NVME_BLOCKS_ON_GPU),
    )


def at_start(shape: RankShape, replicas: Replicas, kind: OptimizerKind) -> Bytes:
    """Before the first update: Megatron copies trainable weights into one buffer, later it makes the main copies."""
    weights, copied = weight_bytes(shape), sum(SIZE[h.dtype] * h.count for h in shape.held if h.trainable)
    base = Bytes(weights=weights, gradients=gradient_bytes(shape), adapters=adapter_bytes(shape))
    moving = replace(base, buffers=copied)
    optimizer = state_bytes(shape, replicas, kind) if kind.offload == "none" else main_copy_bytes(shape, replicas, kind)
    return max(moving, replace(base, optimizer=optimizer), key=lambda b: b.total)


def at_sync(shape: RankShape, bucket_bytes: int, largest_bytes: int) -> Bytes:
    """The trainer's part of a sync: weights, two buckets, one tensor gathered whole."""
    return Bytes(weights=weight_bytes(shape), adapters=adapter_bytes(shape), buffers=2 * bucket_bytes + largest_bytes)


def waiting_bytes(shape: RankShape, replicas: Replicas, kind: OptimizerKind) -> int:
    """What a trainer that shares its GPU takes elsewhere while engines have it; gradients are not kept."""
    optimizer = state_bytes(shape, replicas, kind) if kind.offload == "none" else 0
    return weight_bytes(shape) + adapter_bytes(shape) + optimizer
