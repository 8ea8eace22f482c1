"""Evaluation: avg@k and pass@k of the weights that the engines serve. The same seeds every time, so that steps compare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beam_rl.algorithms import evaluation
from beam_rl.recipe.tree import Recipe
from beam_rl.samples import Prompt, Request, Sample, sampling_seed
from beam_rl.sampling import Judge, Sampler, sample_of, verdicts_of


@dataclass(frozen=True)
class Answers:
    """Every prompt's responses, judged."""

    prompts: Sequence[Prompt]
    samples: list[Sample]  # prompt by prompt, as many of each
    scores: Tensor  # (prompts, samples)

    def summary(self, k: int | None = None) -> evaluation.Evaluation:
        """k: of pass@k; default: all samples of a prompt."""
        return evaluation.evaluate(self.scores, k)

    def records(self, decode: Callable[[Sequence[int]], str], shown: int) -> list[dict[str, object]]:
        """A JSON object a prompt: the scores of its responses; of the first `shown` prompts also what was said."""
        rows: list[dict[str, object]] = []
        for i, (prompt, scores) in enumerate(zip(self.prompts, self.scores.tolist(), strict=True)):
            row: dict[str, object] = {"row": prompt.row, "scores": scores}
            if i < shown:
                first = self.samples[i * len(scores)]
                row |= {"prompt": decode(prompt.token_ids), "answer": prompt.answer}
                row |= {"text": first.text, "finish_reason": first.completion.finish_reason}
                row |= {"turns": [list(turn) for turn in first.episode]} if first.episode else {}
            rows.append(row)
        return rows


def evaluate(
    prompts: Sequence[Prompt],
    engines: Sampler,
    verifier: Judge,
    decode: Callable[[Sequence[int]], str],
    recipe: Recipe,
    on_progress: Callable[[int], None] | None = None,
) -> Answers:
    """Samples `eval.samples_per_prompt` responses for every prompt at `eval.temperature` and scores them."""
    k = recipe.eval.samples_per_prompt
    requests = [
        [
            Request(
                id=f"eval-{p.row}-{i}",
                prompt_ids=p.token_ids,
                seed=sampling_seed(recipe.seed, "eval", p.row, i),
                max_tokens=recipe.rollout.max_response_tokens,
                temperature=recipe.eval.temperature,
                prompt=p if recipe.environment else None,
            )
            for i in range(k)
        ]
        for p in prompts
    ]
    done = engines.generate(requests, on_progress)
    samples = [sample_of(p, done[r.id], decode) for p, group in zip(prompts, requests, strict=True) for r in group]
    scores = torch.tensor([v.score for v in verdicts_of(samples, verifier)], dtype=torch.float64)
    return Answers(prompts, samples, scores.clamp(0, 1).view(-1, k))  # an environment's rewards may be any numbers
