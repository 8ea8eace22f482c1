"""avg@k and pass@k of a set of prompts with a confidence interval. Plain torch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Z95 = 1.96  # standard errors to each side of a mean


@dataclass(frozen=True)
class Evaluation:
    avg: float  # avg@k, whose k is all samples: the mean score
    pass_rate: float  # pass@k: the expected share of prompts with a full score among k samples
    samples: int  # of a prompt
    k: int
    prompts: int
    ci95: tuple[float, float] | None  # of the mean score over prompts; None with a single prompt

    def record(self, task: str) -> dict[str, object]:
        """The JSON object of `beam-rl eval --json`: `k` is that of pass@k, of avg@k it is `samples`."""
        return {
            "task": task,
            "avg@k": self.avg,
            "pass@k": self.pass_rate,
            "k": self.k,
            "prompts": self.prompts,
            "ci95": None if self.ci95 is None else list(self.ci95),
            "samples": self.samples,
        }


def evaluate(scores: Tensor, k: int | None = None) -> Evaluation:
    """Summarises the verifier's scores.

    The interval is mean ± 1.96 · standard error of the per-prompt means, cut to [0, 1]: the samples of one prompt are
    not independent, so the prompt is the unit that is drawn (clustered standard error, arXiv:2411.00640). Where all
    prompts have 0, or all have 1, that error is 0 and says nothing: the interval then is Wilson's for so many prompts.

    Args:
        scores: (prompts, samples) in [0, 1]; a sample passes with a score of 1.
        k: of pass@k, at most the number of samples, which is the default.
    Raises:
        ValueError: no prompts or samples, k out of range, or a score outside [0, 1].
    """
    if scores.ndim != 2 or scores.numel() == 0:
        raise ValueError(f"evaluation needs scores of (prompts, samples), got shape {tuple(scores.shape)}")
    values = scores.double()
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("evaluation needs scores between 0 and 1")
    prompts, samples = values.shape
    k = samples if k is None else k
    means = values.mean(1)
    return Evaluation(
        avg=means.mean().item(),
        pass_rate=pass_at_k((values == 1).sum(1), samples, k).mean().item(),
        samples=samples,
        k=k,
        prompts=prompts,
        ci95=_interval(means),
    )


def pass_at_k(passed: Tensor, samples: int, k: int) -> Tensor:
    """1 − C(samples − passed, k) / C(samples, k): the unbiased estimator (Chen et al., arXiv:2107.03374, eq. 1).

    With k = samples it is 1 for every prompt that any sample passes.

    Args:
        passed: (prompts,) int, how many of the samples passed.
    Returns:
        (prompts,) FP64.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a prompt, there are {samples}")
    total = math.comb(samples, k)
    return torch.tensor(
        [1 - math.comb(samples - int(c), k) / total for c in passed],
        dtype=torch.float64,
    )


def standard_error(means: Tensor) -> float | None:
    """Of the mean of independent values (n,), such as prompts' mean scores; None for a single one."""
    return means.double().std().item() / math.sqrt(len(means)) if len(means) > 1 else None


def _interval(means: Tensor) -> tuple[float, float] | None:
    error, centre, count = standard_error(means), means.mean().item(), len(means)
    if error is None:
        return None
    if error == 0 and centre in (0.0, 1.0):
        sure = count / (count + Z95**2)  # Wilson's end where all of `count` are alike
        return (sure, 1.0) if centre else (0.0, 1 - sure)
    return max(0.0, centre - Z95 * error), min(1.0, centre + Z95 * error)
