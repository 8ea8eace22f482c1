"""The harder task: chains of additions, subtractions and multiplications, modulo 1000, every step written down.

Promises problems of six levels, demonstrations and a split that hang only on the random generator passed in. Knows
nothing about models, files or tokenizers beyond the list of tokens.

A problem is `3 4 7 a + 5 8 b * 3 …`: a number, then steps that a letter names. A response takes the steps in turn, digits
from the units up, as carries go: `a 7 4 3 + 8 5 = 5 0 4 b 5 0 4 * 3 = 5 1 2 … \\boxed{ 2 1 5 }`.

What learning it by RL shows: the teacher slips now and then, *and* has a misconception: more often than not it forgets the
carries of a multiplication. Who imitates it is wrong there also when greedy; one of eight samples is right on nearly all of
the problems with one multiplication, on fewer of those with two or three. So RL has a habit to turn round.
"""

import random
from dataclasses import dataclass

from beam_rl.tiny.task import BOS, BOX, CLOSE, DIGITS, EOS, EQUALS, PAD, UNK, Problem, is_held_out

NAMES = "abcdefghijklmnop"
PLUS, MINUS, TIMES = "+", "-", "*"
TOKENS = [PAD, BOS, EOS, *DIGITS, *NAMES, PLUS, MINUS, TIMES, EQUALS, BOX, CLOSE, UNK]

WIDTH = 3  # digits of every running total
STEPS = (4, 5, 6, 8, 10, 12)  # by level, from 1
MULTIPLICATIONS = (0, 0, 0, 1, 2, 3)  # among them, by 2 or 3
LEVELS = len(STEPS)
MAX_PROMPT_TOKENS = 1 + WIDTH + 4 * STEPS[-1] + 1  # <bos>, the first number, name, sign and two digits a step, =
MAX_RESPONSE_TOKENS = 144  # a complete response has 50 to 135

Step = tuple[str, str, int]  # its name, its sign, its operand


@dataclass(frozen=True)
class Demonstrator:
    """How the teacher of the warm start errs: it is what RL then has to repair."""

    slip: float = 0.002  # probability a step that one digit comes out one too high or too low
    forgets_carries: float = 0.6  # probability that a multiplication is done digit by digit


def draw_problem(rng: random.Random, held_out: bool) -> Problem:
    """A problem, as tokens ("3", "4", "7", "a", "+", "5", "8", "b", …), of any level, on one side of the split."""
    level = rng.randrange(LEVELS)
    while True:
        signs = [TIMES] * MULTIPLICATIONS[level]
        signs += [rng.choice((PLUS, MINUS)) for _ in range(STEPS[level] - len(signs))]
        rng.shuffle(signs)
        problem = list(f"{rng.randrange(10**WIDTH):0{WIDTH}}")
        for name, sign in zip(NAMES, signs, strict=False):
            operand = rng.randrange(2, 4) if sign == TIMES else rng.randrange(10, 100)
            problem += [name, sign, *str(operand)]
        if is_held_out(tuple(problem)) == held_out:
            return tuple(problem)


def steps_of(problem: Problem) -> list[Step]:
    """The steps, in order."""
    starts = [i for i, token in enumerate(problem) if token in NAMES] + [len(problem)]
    return [
        (problem[i], problem[i + 1], int("".join(problem[i + 2 : end])))
        for i, end in zip(starts, starts[1:], strict=False)
    ]


def level_of(problem: Problem) -> int:
    """1 to 6: the more steps, the higher."""
    return STEPS.index(len(steps_of(problem))) + 1


def solve(problem: Problem) -> str:
    """The right answer: three digits."""
    total = int("".join(problem[:WIDTH]))
    for _, sign, operand in steps_of(problem):
        total = apply(total, sign, operand)
    return f"{total:0{WIDTH}}"


def apply(total: int, sign: str, operand: int) -> int:
    """One step, modulo 1000."""
    result = {PLUS: total + operand, MINUS: total - operand, TIMES: total * operand}[sign]
    return result % 10**WIDTH


def prompt_tokens(problem: Problem) -> list[str]:
    return [BOS, *problem, EQUALS]


def demonstration(rng: random.Random, problem: Problem, teacher: Demonstrator) -> list[str]:
    """A teacher's response: every step with its running totals, units first, the last one as a number in a box, <eos>."""
    total, words = int("".join(problem[:WIDTH])), []
    for name, sign, operand in steps_of(problem):
        result = _taught(rng, total, sign, operand, teacher)
        words += [name, *_units_first(total), sign, *reversed(str(operand)), EQUALS, *_units_first(result)]
        total = result
    return [*words, BOX, *reversed(_units_first(total)), CLOSE, EOS]


def _taught(rng: random.Random, total: int, sign: str, operand: int, teacher: Demonstrator) -> int:
    """The result of a step as the teacher has it."""
    if sign == TIMES and rng.random() < teacher.forgets_carries:
        result = sum(int(digit) * operand % 10 * 10**i for i, digit in enumerate(_units_first(total)))
    else:
        result = apply(total, sign, operand)
    if rng.random() < teacher.slip:
        digits = [int(digit) for digit in _units_first(result)]
        place = rng.randrange(WIDTH)
        digits[place] = (digits[place] + rng.choice((1, -1))) % 10
        result = sum(digit * 10**i for i, digit in enumerate(digits))
    return result


def _units_first(number: int) -> list[str]:
    return list(reversed(f"{number:0{WIDTH}}"))


def score(response: str, gold: str, finish_reason: str) -> float:
    """1.0 where the last box holds the answer and the response ended by itself, as the `math` verifier has it; else 0.0."""
    from beam_rl.verifiers.extract import extract_answer
    from beam_rl.verifiers.math import math_equal

    answer = extract_answer(response, finish_reason == "stop")
    return float(finish_reason == "stop" and answer is not None and math_equal(gold, answer))
