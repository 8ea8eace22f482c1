"""The small Beams that can be made: for each its task, its shape and how it is warm-started.

Knows nothing about files or devices.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from beam_rl.tiny import chains, task
from beam_rl.tiny.task import Problem


class Task(Protocol):
    """What a task's module gives; problems and responses are words, each a token."""

    PAD: str
    BOS: str
    EOS: str
    UNK: str
    TOKENS: list[str]
    MAX_RESPONSE_TOKENS: int

    def draw_problem(self, rng: random.Random, held_out: bool) -> Problem: ...
    def level_of(self, problem: Problem) -> int: ...
    def solve(self, problem: Problem) -> str: ...
    def prompt_tokens(self, problem: Problem) -> list[str]: ...
    def demonstration(self, rng: random.Random, problem: Problem, teacher: Any) -> list[str]: ...
    def score(self, response: str, gold: str, finish_reason: str) -> float: ...


@dataclass(frozen=True)
class Schedule:
    """The warm start's constants. Tiny's are chosen so that sampling is right about half of the time (30 % to 65 %)."""

    steps: int = 300
    batch: int = 64
    lr: float = 6e-3
    warmup_steps: int = 20
    final_lr_share: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    teacher: Any = field(default_factory=task.Demonstrator)
    balance: float = 0.0  # what a step adds to, or takes from, the choice of an expert with few, or many, tokens
    target: float | None = None  # stop when sampling is right so often; `steps` is then a bound
    check_every: int = 25  # steps between looks at that
    check_below: float = 0.05  # nats a token; no look at a higher loss: hardly a response of 100 tokens would be right
    check_problems: int = 192  # held-out problems of a look
    check_samples: int = 4  # of each of them

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `final_lr_share` of the peak; `step` counts from 0."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        decay = self.final_lr_share + (1 - self.final_lr_share) * cosine
        return self.lr * min(1.0, (step + 1) / self.warmup_steps) * decay


@dataclass(frozen=True)
class Size:
    """A small Beam.

    Bounds that a shape's users impose: head_dim 32 is the least that vLLM's CPU attention takes, hidden sizes must be
    multiples of 32 for its MoE kernel, and Megatron's group choice equals Beam's only where top-k = 2 · topk_group.
    """

    name: str
    task: Task
    vocabulary: int  # tokens that the task leaves over are spelled out, so that a decoded response shows them
    shape: Mapping[str, Any]  # of BeamConfig, without tokens
    schedule: Schedule
    eval_rows: int
    train_rows: int = 20_000
    trained_in: Literal["fp32", "bf16"] = "fp32"  # bf16: with FP32 main parameters
    experts: Literal["eager", "grouped_mm"] = "eager"  # of transformers; eager is the fastest where all is tiny
    gpu: bool = False  # whether it takes one to make it


# Every kind of layer of the 501B model: dense and sparse, sliding and full, grouped routing.
TINY = Size(
    name="tiny",
    task=task,
    vocabulary=64,
    shape=dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=7,
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=8,
        max_position_embeddings=128,
        moe_intermediate_size=32,
        num_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
    ),
    schedule=Schedule(),
    eval_rows=128,
)

TO_TARGET = Schedule(
    steps=1200,
    batch=128,  # up to 23,700 tokens with padding: some 45 GB of activations
    lr=1e-3,
    warmup_steps=100,
    final_lr_share=0.1,
    teacher=chains.Demonstrator(),
    balance=1e-3,
    target=0.61,
)

# The 501B model's layer pattern (three dense, each sixth full and the last), its choice of 8 experts from 4 of 8 groups, its
# head size and its ratios of MLP widths to the hidden size, at 12 of its 52 layers. The window is a quarter of its, so that
# samples of up to 185 tokens leave it.
SMALL = Size(
    name="small",
    task=chains,
    vocabulary=1024,
    shape=dict(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        sliding_window=128,
        max_position_embeddings=1024,
        moe_intermediate_size=384,
        num_experts=64,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
    ),
    schedule=TO_TARGET,
    eval_rows=240,
    trained_in="bf16",
    experts="grouped_mm",
    gpu=True,
)

# As many experts as the 501B model has; narrower, so that the whole stays below a billion parameters.
SMALL_256 = replace(
    SMALL,
    name="small256",
    shape=dict(
        SMALL.shape,
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=6,
        moe_intermediate_size=256,
        num_experts=256,
    ),
)

SIZES: Mapping[str, Size] = {size.name: size for size in (TINY, SMALL, SMALL_256)}
