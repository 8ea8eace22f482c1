r"""Grades mathematical answers: is the response's final answer equal to the gold one?

Lists, tuples, sets, intervals, percents, units and words are taken apart here; what is left, one expression against
another, is Math-Verify's to judge, and `exact.py` vetoes what it rounds to equality.

A response is data. LaTeX goes through latex2sympy's ANTLR grammar; Math-Verify's plain-expression extractor, which
hands text to SymPy's `parse_expr` (Python's `eval`), is never configured in. There is no time limit in here, and a
hostile answer can take for ever: only `pool.py` calls this on model output, in processes that it can kill.
"""

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, Rational, Set
from sympy.core.relational import Relational
from sympy.logic.boolalg import And

from beam_rl.verifiers import exact
from beam_rl.verifiers.latex import (
    Listing,
    as_listing,
    decimal_digits,
    is_words,
    normalise,
    squash,
    unit_of,
    without_percent,
)

LATEX_ONLY = [LatexExtractionConfig(boxed_match_priority=0)]
_INTEGER = re.compile(r"-?\d+")
SURE_DIGITS = 6  # a decimal with so many significant digits may stand for the number that it rounds

# It warns that its own SIGALRM limits are off. They are: the process is killed from outside instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_equal(gold: str, answer: str) -> bool:
    """Whether `answer` says the same as `gold`; both are what stands in a box, LaTeX or text.

    Decimals must be exact, or round the gold value with at least six significant digits. Equations and inequalities
    are equal up to a constant factor and a swap of sides. Units and a base may be left out, but not be others.
    """
    gold, answer = normalise(gold), normalise(answer)
    if not gold or not answer:
        return False
    if squash(gold) == squash(answer):
        return True
    golds, answers = as_listing(gold), as_listing(answer)
    if golds and answers:
        return _listings_equal(golds, answers)
    if (golds or answers) and not _has_relation(gold + answer):  # (1, 2) and 1 < x < 2 are Math-Verify's to judge
        gold, answer = _only_element(golds, gold), _only_element(answers, answer)
        return bool(gold and answer) and math_equal(gold, answer)
    return _single_equal(gold, answer)


def _only_element(listing: Listing | None, text: str) -> str:
    r"""5 of \{5\}; a single answer as it is; "" for a listing of more."""
    if listing is None:
        return text
    return listing.items[0] if listing.kind == "set" and len(listing.items) == 1 else ""


def _listings_equal(gold: Listing, answer: Listing) -> bool:
    kinds = {gold.kind, answer.kind}
    if len(gold.items) != len(answer.items):
        return False
    if kinds <= {"set", "bare"} or kinds == {"union"}:
        return exact.pair_off(gold.items, answer.items, math_equal)
    if len(kinds) == 1 or (kinds & {"bare"} and not kinds & {"union"}):  # (1, 2) = (1, 2) = 1, 2 ≠ [1, 2)
        return all(math_equal(g, a) for g, a in zip(gold.items, answer.items, strict=True))
    return False


def _has_relation(text: str) -> bool:
    return bool(re.search(r"[<>=]|\\[lg](?:e|t|eq)\b|\\n(?:e|eq)\b", text))


def _single_equal(gold: str, answer: str) -> bool:
    """One value, expression, relation or word against another."""
    gold_number, gold_percent = without_percent(gold)
    answer_number, answer_percent = without_percent(answer)
    if gold_percent or answer_percent:  # 50 % is 50 where the question asks for percents, and 0.5
        hundredths = rf"\frac{{{gold_number if gold_percent else answer_number}}}{{100}}"
        pair = (hundredths, answer_number) if gold_percent else (gold_number, hundredths)
        one_sided = gold_percent != answer_percent
        return math_equal(gold_number, answer_number) or (one_sided and math_equal(*pair))
    gold_unit, answer_unit = unit_of(gold), unit_of(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False  # a missing or unknown unit is forgiven
    if is_words(gold) or is_words(answer):
        return False  # words are right only to the letter, and that was not the case
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return _leading_zeros_off(gold) == _leading_zeros_off(answer)  # the common case, without a parser
    return _expressions_equal(gold, answer)


def _leading_zeros_off(integer: str) -> str:
    return re.sub(r"^(-?)0+(?=\d)", r"\1", integer)


@lru_cache(maxsize=4096)
def _parse(latex: str) -> Any:
    """Math-Verify's reading of one expression, or None. Cached: a group's samples share their gold answer."""
    found = parse(
        rf"\boxed{{{latex}}}",
        LATEX_ONLY,
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return found[0] if found else None


def _expressions_equal(gold_latex: str, answer_latex: str) -> bool:
    gold, answer = _parse(gold_latex), _parse(answer_latex)
    if gold is None or answer is None:
        return False
    gold, answer = exact.with_shared_symbols(gold, answer)
    golds, answers = (exact.relation_parts(_chain_ends(exact.with_exact_decimals(e))) for e in (gold, answer))
    if golds is not None and answers is not None:
        return exact.relations_equal(golds, answers)
    names_no_unknown = isinstance(answer, Eq) and not answer.lhs.free_symbols
    if names_no_unknown and not isinstance(gold, Relational | And | Set) and exact.differ(answer.lhs, answer.rhs):
        return False  # 9 = 5 is not 5
    if _rounds(gold_latex, answer_latex, gold, answer):
        return True
    exact_gold, exact_answer = (exact.with_exact_decimals(_right_side(e)) for e in (gold, answer))
    if exact.differ(exact_gold, exact_answer):
        return False
    return bool(verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True))


def _chain_ends(expression: Any) -> Any:
    """x = 2 + 3 = 5 as x = 5; anything else unchanged."""
    parts: Sequence[Any] = getattr(expression, "_unsorted_args", ()) if isinstance(expression, And) else ()
    if len(parts) > 1 and all(isinstance(part, Eq) for part in parts):
        return Eq(parts[0].lhs, parts[-1].rhs, evaluate=False)
    return expression


def _right_side(expression: Any) -> Any:
    """5 of x = 5, for a comparison with a bare 5."""
    expression = _chain_ends(expression)
    return expression.rhs if isinstance(expression, Eq) else expression


def _rounds(gold_latex: str, answer_latex: str, gold: Any, answer: Any) -> bool:
    """Whether one of the two is a decimal that correctly rounds the other, and Math-Verify takes them for equal too."""
    decimals = [decimal_digits(text) for text in (gold_latex, answer_latex)]
    places = [places for places, significant in decimals if significant >= SURE_DIGITS]
    if not places:
        return False
    a, b = (exact.evaluate(exact.with_exact_decimals(_right_side(e))) for e in (gold, answer))
    if a is None or b is None or not a.is_real or not b.is_real:
        return False
    if abs(a - b) > Rational(1, 2 * 10 ** min(places)):
        return False
    return bool(verify(gold, answer, timeout_seconds=None))
