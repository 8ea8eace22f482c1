"""The toy task: add and subtract six digits, modulo ten, writing down every running total.

Promises problems, demonstrations and a split between training and held-out problems that hang only on the random
generator passed in. Knows nothing about models, files or tokenizers beyond the list of tokens.

What learning it by RL shows, and what it doesn't: the demonstrator slips now and then, so a model that imitates it
slips as often when it samples, while its *greedy* answer is right 99 times in 100. RL sharpens the distribution (the
slips go away); it teaches no new skill. A rising curve proves the machinery, not a capability.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from beam_rl.verifiers.toy import toy_score

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
DIGITS = [str(d) for d in range(10)]
TERMS = [sign + digit for sign in "+-" for digit in DIGITS]
EQUALS, BOX, CLOSE = "=", "\\boxed{", "}"
TOKENS = [PAD, BOS, EOS, *DIGITS, *TERMS, EQUALS, BOX, CLOSE, UNK]

OPERANDS = 6
PROMPT_TOKENS = OPERANDS + 2  # <bos>, the operands, =
MAX_RESPONSE_TOKENS = 16  # a complete response has 10: six totals, the box of three, <eos>
HELD_OUT_SHARE = 10  # one problem in so many is never trained on

Problem = tuple[str, ...]  # ("3", "+8", "-5", …): a digit, then signed digits; all of them tokens


@dataclass(frozen=True)
class Demonstrator:
    """How the teacher of the warm start errs: it is what RL then has to repair."""

    slip: float = 0.12  # probability that a running total comes out one too high or too low
    direct: float = 0.2  # probability of answering without running totals (right as often as a slip allows)


def is_held_out(problem: Problem) -> bool:
    """Whether the problem is kept for evaluation: a hash decides, so the split is the same everywhere."""
    digest = hashlib.blake2b(" ".join(problem).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def draw_problem(rng: random.Random, held_out: bool) -> Problem:
    """A problem drawn evenly from one side of the split (32 million problems in all)."""
    while True:
        problem = (
            rng.choice(DIGITS),
            *(rng.choice(TERMS) for _ in range(OPERANDS - 1)),
        )
        if is_held_out(problem) == held_out:
            return problem


def draw_distinct(
    rng: random.Random, held_out: bool, count: int, draw: Callable[[random.Random, bool], Problem] = draw_problem
) -> list[Problem]:
    """`count` different problems of one side of the split, in the order drawn; `draw`: of another task."""
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problems[draw(rng, held_out)] = None
    return list(problems)


def level_of(problem: Problem) -> int:
    """1: problems are alike."""
    return 1


def solve(problem: Problem) -> str:
    """The right answer, 0 to 9."""
    return str(sum(int(term) for term in problem) % 10)


def prompt_tokens(problem: Problem) -> list[str]:
    return [BOS, *problem, EQUALS]


def demonstration(rng: random.Random, problem: Problem, teacher: Demonstrator) -> list[str]:
    """A teacher's response: first digit, running totals, the last one again in a box, <eos>."""

    def slipped(total: int) -> int:
        return (total + rng.choice((1, -1))) % 10 if rng.random() < teacher.slip else total

    if rng.random() < teacher.direct:
        return [BOX, str(slipped(int(solve(problem)))), CLOSE, EOS]
    totals = [int(problem[0])]
    for term in problem[1:]:
        totals.append(slipped((totals[-1] + int(term)) % 10))
    return [*map(str, totals), BOX, str(totals[-1]), CLOSE, EOS]


def score(response: str, gold: str, finish_reason: str) -> float:
    """As the `toy` verifier has it."""
    return toy_score(response, gold, finish_reason)
