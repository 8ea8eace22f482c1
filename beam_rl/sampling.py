"""From prompts to groups of verified samples: the rollout half of a step.

Knows nothing about how engines sample or verifiers judge; a sample's random numbers hang on the recipe's seed, the
prompt's position and the sample's number alone.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from beam_rl.algorithms.rewards import overlong_punishment
from beam_rl.recipe.tree import Recipe
from beam_rl.samples import Completion, Group, Prompt, Request, Sample
from beam_rl.step import Step
from beam_rl.verifiers import Verdict, VerifyItem


class Sampler(Protocol):
    def generate(
        self, groups: Sequence[Sequence[Request]], on_progress: Callable[[int], None] | None = None
    ) -> dict[str, Completion]: ...


class Judge(Protocol):
    def score(self, items: list[VerifyItem]) -> list[Verdict]: ...


class Source(Protocol):
    def take(self, n: int) -> list[Prompt]: ...


@dataclass
class Rollout:
    """A step's groups and what it took to get them."""

    groups: list[Group] = field(default_factory=list)
    tokens: int = 0  # sampled, dropped groups included
    truncated: int = 0
    dropped_groups: int = 0
    timeouts: int = 0
    errors: int = 0  # responses that the verifier could not judge; score 0
    generate_s: float = 0.0

    @property
    def samples(self) -> list[Sample]:
        return [s for g in self.groups for s in g.samples]


def sampling_seed(*parts: object) -> int:
    """A 63-bit seed from the parts' text: stable over processes and versions of Python."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_groups(
    prompts: Source,
    engines: Sampler,
    verifier: Judge,
    decode: Callable[[Sequence[int]], str],
    recipe: Recipe,
    step: Step,
) -> Rollout:
    """Samples and verifies `rollout.prompts_per_step` groups.

    With dynamic sampling, groups whose rewards are all alike (they carry no gradient) are dropped and other prompts are
    sampled in their place, at most `algorithm.dynamic_sampling.max_rounds` rounds; then the step goes on with what
    there is (DAPO, arXiv:2503.14476, section 3.2).
    """
    wanted, dynamic = recipe.rollout.prompts_per_step, recipe.algorithm.dynamic_sampling
    rollout = Rollout()
    for _ in range(dynamic.max_rounds if dynamic.enabled else 1):
        batch = prompts.take(wanted - len(rollout.groups))
        requests = [_requests(p, recipe) for p in batch]
        with step.phase("sampling", "generate", sum(map(len, requests))) as phase:
            completions = engines.generate(requests, phase.advance)
        groups = [_group(p, r, completions, decode) for p, r in zip(batch, requests, strict=True)]
        with step.phase("verifying", "verify"):
            judge_groups(groups, verifier, recipe, rollout)
        kept = [g for g in groups if not dynamic.enabled or len({s.reward for s in g.samples}) > 1]
        rollout.dropped_groups += len(groups) - len(kept)
        rollout.groups += kept
        if len(rollout.groups) == wanted:
            break
    rollout.generate_s = step.metrics["time/generate_s"]
    return rollout


def judge_groups(groups: Sequence[Group], verifier: Judge, recipe: Recipe, counts: Rollout) -> None:
    """Fills in every sample's score and reward, exactly one each, and counts tokens, truncations and time-outs."""
    samples = [s for g in groups for s in g.samples]
    items = [VerifyItem(s.text, s.prompt.answer, s.completion.finish_reason) for s in samples]
    limit, overlong = recipe.rollout.max_response_tokens, recipe.algorithm.overlong
    lengths = torch.tensor([s.response_tokens for s in samples])
    punishments = overlong_punishment(lengths, limit, overlong.buffer_tokens, overlong.penalty).tolist()
    for sample, verdict, punishment in zip(samples, verifier.score(items), punishments, strict=True):
        sample.score, sample.reward = verdict.score, verdict.score + punishment
        counts.timeouts += verdict.timed_out
        counts.errors += verdict.error is not None and not verdict.timed_out
        counts.tokens += sample.response_tokens
        counts.truncated += sample.completion.finish_reason == "length"


def _requests(prompt: Prompt, recipe: Recipe) -> list[Request]:
    r = recipe.rollout
    return [
        Request(
            id=f"train-{prompt.position}-{k}",
            prompt_ids=prompt.token_ids,
            seed=sampling_seed(recipe.seed, "train", prompt.position, k),
            max_tokens=r.max_response_tokens,
            temperature=r.temperature,
            top_p=r.top_p,
        )
        for k in range(r.samples_per_prompt)
    ]


def _group(
    prompt: Prompt,
    requests: Sequence[Request],
    completions: dict[str, Completion],
    decode: Callable[[Sequence[int]], str],
) -> Group:
    samples = [Sample(prompt, completions[r.id], decode(completions[r.id].token_ids.tolist())) for r in requests]
    return Group(prompt, samples)
