"""Comparisons of SymPy expressions that don't take two small numbers for the same one.

Math-Verify compares numbers after rounding them to a fixed number of *decimals*, so 1/2004! equals 1/2006! and
0.0000001 equals 0.0000002, and compares equations by solving them. Here values are compared relative to their size,
and equations and inequalities up to a constant factor. Knows nothing about LaTeX or responses.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sympy import (
    Basic,
    Eq,
    Expr,
    Float,
    MatrixBase,
    Ne,
    Rational,
    Symbol,
    cancel,
    simplify,
)
from sympy.core.relational import (
    GreaterThan,
    LessThan,
    Relational,
    StrictGreaterThan,
    StrictLessThan,
)
from sympy.logic.boolalg import And

DIGITS = 60  # evaluated
AGREE = Rational(1, 10**40)  # largest relative difference of two evaluations of one number


def with_exact_decimals(expression: Any) -> Any:
    """The expression with every decimal (0.1) replaced by the fraction it spells (1/10)."""
    if not isinstance(expression, Basic | MatrixBase):
        return expression
    return expression.xreplace({f: Rational(str(f)) for f in expression.atoms(Float)})


def with_shared_symbols(a: Any, b: Any) -> tuple[Any, Any]:
    """Both expressions with one symbol per name: the parser takes x for complex where an i stands beside it."""
    symbols = a.free_symbols | b.free_symbols
    by_name = {s.name: [t for t in symbols if t.name == s.name] for s in symbols if isinstance(s, Symbol)}
    swap = {t: Symbol(name) for name, same in by_name.items() if len(same) > 1 for t in same}
    return a.xreplace(swap), b.xreplace(swap)


def differ(a: Any, b: Any) -> bool:
    """Whether two expressions are certainly not equal: at some point they evaluate to different numbers.

    False decides nothing: they may be equal, or evaluation may not be possible.
    """
    if isinstance(a, MatrixBase) and isinstance(b, MatrixBase):
        return a.shape != b.shape or any(differ(x, y) for x, y in zip(a.flat(), b.flat(), strict=True))
    if not (isinstance(a, Expr) and isinstance(b, Expr)):
        return False
    names = sorted({s.name for s in a.free_symbols | b.free_symbols if isinstance(s, Symbol)})
    # Positive irregular fractions: no accidental zeros, and inside the domain of roots and logarithms.
    for offset in (Rational(3, 7), Rational(29, 11)) if names else (Rational(0),):
        values = {name: offset + Rational(13 * (i + 1), 17) for i, name in enumerate(names)}
        x, y = (evaluate(e.subs({s: values[s.name] for s in e.free_symbols if s.name in values})) for e in (a, b))
        if x is not None and y is not None and abs(x - y) > AGREE * max(abs(x), abs(y)):
            return True
    return False


def evaluate(expression: Expr) -> Expr | None:
    """The number with `DIGITS` digits (complex numbers too), or None where it has no finite value."""
    number = expression.evalf(DIGITS)  # before doit(), which writes out all digits of a factorial
    if not _is_finite(number):
        number = expression.doit().evalf(DIGITS)
    return number if _is_finite(number) else None


def _is_finite(number: Expr) -> bool:
    return all(part.is_Number and part.is_finite for part in number.as_real_imag())


Part = tuple[str, Expr]  # how an expression relates to 0: "==", "!=", ">" or ">="


def relation_parts(relation: Basic) -> list[Part] | None:
    """An equation, inequality or chain of them as expressions compared with 0; None where it is something else."""
    if isinstance(relation, And):
        parts = [relation_parts(arg) for arg in getattr(relation, "_unsorted_args", relation.args)]
        return None if any(p is None for p in parts) else [part for p in parts if p for part in p]
    if not (isinstance(relation, Relational) and isinstance(relation.lhs, Expr) and isinstance(relation.rhs, Expr)):
        return None
    difference = relation.lhs - relation.rhs
    signs: dict[type, Part] = {
        Eq: ("==", difference),
        Ne: ("!=", difference),
        StrictGreaterThan: (">", difference),
        GreaterThan: (">=", difference),
        StrictLessThan: (">", -difference),
        LessThan: (">=", -difference),
    }
    return [signs[type(relation)]] if type(relation) in signs else None


def relations_equal(a: Sequence[Part], b: Sequence[Part]) -> bool:
    """Whether the relations pair off, each pair saying the same: `==` up to any factor, `>` up to a positive one."""
    return pair_off(a, b, _same_relation)


def _same_relation(a: Part, b: Part) -> bool:
    if a[0] != b[0]:
        return False
    if a[1].is_zero or b[1].is_zero:
        return bool(a[1].is_zero and b[1].is_zero)
    ratio = cancel(a[1] / b[1])
    if ratio.free_symbols:
        ratio = simplify(ratio)
    if ratio.free_symbols or not ratio.is_finite or ratio.is_zero:
        return False
    return a[0] in ("==", "!=") or bool(ratio.is_positive)


def pair_off[T](a: Sequence[T], b: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Whether every element of `a` finds an element of `b` of its own, in any order."""
    left = list(b)
    for x in a:
        match = next((i for i, y in enumerate(left) if same(x, y)), None)
        if match is None:
            return False
        del left[match]
    return not left
