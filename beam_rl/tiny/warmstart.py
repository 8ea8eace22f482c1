"""Supervised steps that bring a fresh tiny Beam to about half of the toy task, and the measure of how far it is.

Promises the same bits for the same seed on one machine: one thread, its own random generators. Knows nothing about
files or RL.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from transformers import BeamForCausalLM
from transformers.cache_utils import DynamicCache

from beam_rl.tiny import task
from beam_rl.tiny.task import Demonstrator, Problem
from beam_rl.verifiers.toy import toy_score

Progress = Callable[[int, int, float], None]  # step (from 1), steps in all, loss
IDS = {token: i for i, token in enumerate(task.TOKENS)}


@dataclass(frozen=True)
class Schedule:
    """The warm start's constants. Chosen so that sampling is right about half of the time (30 % to 65 %)."""

    steps: int = 300
    batch: int = 64
    lr: float = 6e-3
    warmup_steps: int = 20
    final_lr_share: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    teacher: Demonstrator = field(default_factory=Demonstrator)

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `final_lr_share` of the peak; `step` counts from 0."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        decay = self.final_lr_share + (1 - self.final_lr_share) * cosine
        return self.lr * min(1.0, (step + 1) / self.warmup_steps) * decay


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums come out in one order, and at this size a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def demonstration_batch(rng: random.Random, schedule: Schedule) -> Tensor:
    """(batch, tokens) ids of prompts and demonstrations, padded on the right."""
    rows = []
    for _ in range(schedule.batch):
        problem = task.draw_problem(rng, held_out=False)
        words = task.prompt_tokens(problem) + task.demonstration(rng, problem, schedule.teacher)
        rows.append([IDS[word] for word in words])
    width = max(map(len, rows))
    return torch.tensor([row + [IDS[task.PAD]] * (width - len(row)) for row in rows])


def warm_start(
    model: BeamForCausalLM,
    seed: int,
    schedule: Schedule,
    progress: Progress | None = None,
) -> float:
    """Trains `model` in place on demonstrations (loss on the response's tokens only); returns the last loss."""
    rng = random.Random(f"warm start {seed}")
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": schedule.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=schedule.lr, betas=(schedule.beta1, schedule.beta2), fused=True)
    loss = torch.tensor(math.nan)
    model.train()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr_at(step)
        ids = demonstration_batch(rng, schedule)
        targets = ids[:, task.PROMPT_TOKENS :]
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=targets.shape[1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IDS[task.PAD])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip_grad)
        optimizer.step()
        if progress:
            progress(step + 1, schedule.steps, loss.item())
    return loss.item()


@torch.no_grad()
def sample_responses(
    model: BeamForCausalLM, problems: Sequence[Problem], generator: torch.Generator
) -> list[list[str]]:
    """One response to each problem at temperature 1: its tokens, <eos> included where it came within the limit."""
    tokens = torch.tensor([[IDS[word] for word in task.prompt_tokens(problem)] for problem in problems])
    cache = DynamicCache(config=model.config)
    ended = torch.zeros(len(problems), dtype=torch.bool)
    columns: list[Tensor] = []
    for _ in range(task.MAX_RESPONSE_TOKENS):
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        tokens = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
        columns.append(tokens[:, 0].masked_fill(ended, IDS[task.PAD]))
        ended |= tokens[:, 0] == IDS[task.EOS]
        if ended.all():
            break
    words = task.TOKENS + [task.UNK] * (model.config.vocab_size - len(task.TOKENS))
    responses = [[words[i] for i in row] for row in torch.stack(columns, 1).tolist()]
    return [row[: row.index(task.EOS) + 1] if task.EOS in row else row for row in responses]


def accuracy(
    model: BeamForCausalLM, problems: Sequence[Problem], samples: int = 8, seed: int = 0
) -> tuple[float, float]:
    """avg@k and pass@k of `samples` = k responses a problem at temperature 1, as shares of 1."""
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    repeated = [problem for problem in problems for _ in range(samples)]
    rewards = []
    for problem, words in zip(repeated, sample_responses(model, repeated, generator), strict=True):
        reason = "stop" if words[-1] == task.EOS else "length"
        text = " ".join(word for word in words if word != task.EOS)
        rewards.append(toy_score(text, str(task.solve(problem)), reason))
    table = torch.tensor(rewards).view(-1, samples)
    return table.mean().item(), table.amax(1).mean().item()
