"""Supervised steps that bring a fresh small Beam some way into its task, and the measure of how far it is.

Promises the same bits for the same seed on one machine's CPU: one thread, its own random generators. Knows nothing
about files or RL.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BeamForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.models.beam.modeling_beam import BeamTopKRouter

from beam_rl.tiny import task as digits
from beam_rl.tiny.sizes import Schedule, Task
from beam_rl.tiny.task import Problem

__all__ = ["Outcome", "Progress", "Schedule", "accuracy", "one_thread", "warm_start"]

Progress = Callable[[int, int, float], None]  # step (from 1), steps at most, loss


@dataclass(frozen=True)
class Outcome:
    """How a warm start ended."""

    loss: float  # of the last step, nats a token
    steps: int
    reached: bool  # whether the schedule's target, if it has one, was


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums come out in one order, and at this size a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class MainParameters:
    """FP32 copies of a BF16 model's parameters, which an optimizer updates; an FP32 parameter stands for itself."""

    def __init__(self, model: nn.Module) -> None:
        self._pairs = [
            (p, p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())) for p in model.parameters()
        ]
        self.all = [main for _, main in self._pairs]

    def take_gradients(self) -> None:
        """Moves the model's gradients to the copies."""
        for parameter, main in self._pairs:
            if main is not parameter:
                main.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        """Rounds the copies into the model."""
        for parameter, main in self._pairs:
            if main is not parameter:
                parameter.copy_(main)


class Balance:
    """Spreads a layer's tokens over its experts by the bias of their choice, without a loss (arXiv:2408.15664)."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self._rate, self._real = rate, torch.empty(0)
        self._loads: dict[BeamTopKRouter, Tensor] = {}
        self._routers = [m for m in model.modules() if isinstance(m, BeamTopKRouter)] if rate else []
        self._hooks = [router.register_forward_hook(self._count) for router in self._routers]

    def real(self, tokens: Tensor) -> None:
        """Which tokens of the coming training pass count: (batch, tokens) booleans; the others are padding."""
        self._real = tokens.flatten()

    def _count(self, router: BeamTopKRouter, _: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if router.training:
            chosen = output[2][self._real]
            self._loads[router] = torch.bincount(chosen.flatten(), minlength=router.num_experts).float()

    def step(self) -> None:
        """Experts with fewer tokens than the mean become likelier, those with more unlikelier."""
        for router in self._routers:
            load = self._loads[router]
            router.e_score_correction_bias += self._rate * torch.sign(load.mean() - load)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def demonstration_batch(rng: random.Random, schedule: Schedule, task: Task) -> tuple[Tensor, Tensor]:
    """(batch, tokens) ids of prompts and demonstrations, padded on the right, and the last columns to be learned.

    Those begin where the shortest prompt ends; what is still a prompt there is padding in them.
    """
    ids = {token: i for i, token in enumerate(task.TOKENS)}
    rows, prompts = [], []
    for _ in range(schedule.batch):
        problem = task.draw_problem(rng, held_out=False)
        prompt = task.prompt_tokens(problem)
        rows.append([ids[word] for word in prompt + task.demonstration(rng, problem, schedule.teacher)])
        prompts.append(len(prompt))
    width, shortest = max(map(len, rows)), min(prompts)
    batch = torch.tensor([row + [ids[task.PAD]] * (width - len(row)) for row in rows])
    targets = batch[:, shortest:].clone()
    targets[torch.arange(shortest, width) < torch.tensor(prompts)[:, None]] = ids[task.PAD]
    return batch, targets


def warm_start(
    model: BeamForCausalLM,
    seed: int,
    schedule: Schedule,
    progress: Progress | None = None,
    task: Task = digits,
) -> Outcome:
    """Trains `model` in place on demonstrations (loss on the response's tokens only), on the device where it is.

    A schedule with a target ends when that share of responses to held-out problems, sampled at temperature 1, is right.
    """
    rng = random.Random(f"warm start {seed}")
    main, balance = MainParameters(model), Balance(model, schedule.balance)
    optimizer = optimizer_of(main.all, schedule)
    pad, loss, reached, step = task.TOKENS.index(task.PAD), torch.tensor(math.nan), schedule.target is None, -1
    for step in range(schedule.steps):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr_at(step)
        ids, targets = (part.to(model.device) for part in demonstration_batch(rng, schedule, task))
        balance.real(ids[:, :-1] != pad)
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=targets.shape[1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=pad)
        optimizer.zero_grad()
        loss.backward()
        main.take_gradients()
        torch.nn.utils.clip_grad_norm_(main.all, schedule.clip_grad)
        optimizer.step()
        main.give_weights()
        balance.step()
        if progress:
            progress(step + 1, schedule.steps, loss.item())
        if schedule.target and (step + 1) % schedule.check_every == 0 and loss < schedule.check_below:
            reached = look(model, schedule, task) >= schedule.target
            if reached:
                break
    balance.close()
    return Outcome(loss.item(), step + 1, reached)


def optimizer_of(parameters: Sequence[nn.Parameter], schedule: Schedule) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": schedule.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=schedule.lr, betas=(schedule.beta1, schedule.beta2), fused=True)


def look(model: BeamForCausalLM, schedule: Schedule, task: Task) -> float:
    """The share of right responses to the schedule's held-out problems."""
    rng = random.Random("a look at a warm start")
    problems = digits.draw_distinct(rng, True, schedule.check_problems, task.draw_problem)
    return accuracy(model, problems, schedule.check_samples, task=task)[0]


@torch.no_grad()
def sample_responses(
    model: BeamForCausalLM,
    problems: Sequence[Problem],
    generator: torch.Generator,
    task: Task = digits,
    greedy: bool = False,
) -> list[list[str]]:
    """One response to each problem at temperature 1: its tokens, <eos> included where it came within the limit."""
    ids = {token: i for i, token in enumerate(task.TOKENS)}
    prompts = [[ids[word] for word in task.prompt_tokens(problem)] for problem in problems]
    width = max(map(len, prompts))
    tokens = torch.tensor([[ids[task.PAD]] * (width - len(row)) + row for row in prompts], device=model.device)
    lengths = torch.tensor([len(row) for row in prompts], device=model.device)
    # None where no prompt is shorter than another: attention kernels are faster without a mask.
    mask = (
        None
        if min(map(len, prompts)) == width
        else torch.arange(width, device=model.device) >= width - lengths[:, None]
    )
    cache = DynamicCache(config=model.config)
    ended = torch.zeros(len(problems), dtype=torch.bool, device=model.device)
    columns: list[Tensor] = []
    for _ in range(task.MAX_RESPONSE_TOKENS):
        where = {}
        if mask is not None:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            where = {"attention_mask": mask.long(), "position_ids": positions}
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1, **where).logits[:, -1]
        shares = logits.float().softmax(-1)
        tokens = shares.argmax(-1, keepdim=True) if greedy else torch.multinomial(shares, 1, generator=generator)
        columns.append(tokens[:, 0].masked_fill(ended, ids[task.PAD]))
        ended |= tokens[:, 0] == ids[task.EOS]
        if ended.all():
            break
    words = task.TOKENS + [task.UNK] * (model.config.vocab_size - len(task.TOKENS))
    responses = [[words[i] for i in row] for row in torch.stack(columns, 1).tolist()]
    return [row[: row.index(task.EOS) + 1] if task.EOS in row else row for row in responses]


def graded(
    model: BeamForCausalLM,
    problems: Sequence[Problem],
    samples: int,
    seed: int = 0,
    task: Task = digits,
    greedy: bool = False,
) -> Tensor:
    """(problems, samples) scores of responses, 0 or 1."""
    generator = torch.Generator(model.device).manual_seed(seed)
    model.eval()
    repeated = [problem for problem in problems for _ in range(samples)]
    rewards = []
    for problem, words in zip(repeated, sample_responses(model, repeated, generator, task, greedy), strict=True):
        reason = "stop" if words[-1] == task.EOS else "length"
        text = " ".join(word for word in words if word != task.EOS)
        rewards.append(task.score(text, task.solve(problem), reason))
    return torch.tensor(rewards).view(-1, samples)


def accuracy(
    model: BeamForCausalLM, problems: Sequence[Problem], samples: int = 8, seed: int = 0, task: Task = digits
) -> tuple[float, float]:
    """avg@k and pass@k of `samples` = k responses a problem at temperature 1, as shares of 1."""
    table = graded(model, problems, samples, seed, task)
    return table.mean().item(), table.amax(1).mean().item()
