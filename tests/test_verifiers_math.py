r"""The mathematics of the verifier: every published fault of its peers, and what answers commonly look like.

Gold answer first. Tables run in this process: none of these answers is hostile (`test_verifiers_pool.py` has those).
"""

import random

import math_verify.parser
import pytest
import sympy.parsing.sympy_parser

from beam_rl.verifiers.extract import extract_answer
from beam_rl.verifiers.math import math_equal

RIGHT = [
    ("p - q", "-q + p"),
    ("xy", "y x"),
    ("[-2,7]", r"-2 \leq x \leq 7"),
    (r"2^{2010}-1", "2^{2010}-1.0"),
    (r"\{(1,2),(3,4)\}", "(3,4),(1,2)"),
    ("12 \\text{ and } 13", "13,12"),
    (r"1,\!000", "1000"),
    (r"5\text{ meters}", r"5\text{ m}"),
    ("3 hours", r"3\text{ hr}"),
    (r"90^\circ", r"90\text{ degrees}"),
    ("120000", r"1.2 \times 10^{5}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"x=\pm 3", "x = 3 or x = -3"),
    (r"\$10,000", "10000"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    ("12.5\\%", r"\frac{25}{2}\%"),
    (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    ("5", "5.0"),
    ("50", r"50\%"),
    (r"50\%", "0.5"),
    (r"\text{Monday}", "Monday"),
    ("5", r"5\text{ cm}"),
    ("90", r"90^\circ"),
    ("101_2", "101"),
    (r"\text{(B)}", "B"),
    ("B", r"\textbf{B}"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    ("10^{5}", "100000"),
    (r"\pm 2", "2,-2"),
    ("x>3", "3<x"),
    ("(1,2)", "1<x<2"),
    ("1<x<2", "(1,2)"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\sqrt{2}", "1.414214"),
    ("1/3", "0.333333"),
    ("3x-y+13=0", "y = 3x+13"),
    ("3x-y+13=0", "-6x+2y-26=0"),
    (r"x=1 \text{ or } x=2", "1, 2"),
    (r"\{1,2\}", "2,1"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty) \cup (-\infty, 1)"),
    ("5", "x=5"),
    ("x=5", "5"),
    ("x=5", "x=2+3=5"),
    ("y=2x+3", "2x+3"),
    (r"\$5", "5"),
    ("5", "5 apples"),
    ("No", "no"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"2\frac{1}{2}", "2.5"),
    ("3+4i", "4i+3"),
    ("2^{10}", "1024"),
    ("f(x)=x^2", "x^2"),
    ("5!", "120"),
    (r"\binom{5}{2}", "10"),
    (
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        r"\begin{pmatrix}1\\\frac{4}{2}\end{pmatrix}",
    ),
    (r"\frac{\pi}{4}", r"\pi/4"),
    (r"\left[0,1\right)", "[0,1)"),
    ("2:30", "2:30"),
    (r"\frac{1}{2004!}", r"\frac{1}{2004!}"),
    (r"\frac{2004}{2004!}", r"\frac{1}{2003!}"),
    ("(1,2)", "x=1,y=2"),
    (r"x \le 3", r"3-x \geq 0"),
    ("5", "$5$."),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\{5\}", "5"),
    (r"x\in[1,2]", "[1,2]"),
    ("12", "12.00"),
    ("-5", "- 5"),
    (r"\log_2 8", "3"),
    (r"1+\sqrt{2}, 1-\sqrt{2}", r"1\pm\sqrt2"),
    (r"\frac{3}{4}", "3/4"),
    ("0.5", r"\frac{1}{2}"),
    ("17", r"17\text{ students}"),
]

WRONG = [
    ("2^{2010}-1", "2^{2010}"),
    ("10^{50}+1", "10^{50}"),
    ("(1,2),(3,4)", "(1,2),(4,3)"),
    ("7", r"7 \text{ or } 8"),
    (r"3\%", "0.3"),
    ("1, 234", "1234"),
    (r"5\text{ cm}^2", r"5\text{ cm}"),
    ("3 hours", "3 minutes"),
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    ("120000", r"1.2 \times 10^{6}"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("3*x-1*y+13=0", "3x + 4y + 14=0"),
    ("0.0000001", "0.0000002"),
    (r"\frac{x}{2004!}", r"\frac{x}{2006!}"),
    ("x/2004!", "x/2006!"),
    (r"\{1/2004!, 2\}", r"\{1/2006!,2\}"),
    (r"(\frac{1}{2004!},2)", r"(\frac{1}{2006!},2)"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(2,1)", "(3,1)"),
    ("5", "9=5"),
    (r"5\text{ m}", r"5\text{ cm}"),
    ("101_2", "101_3"),
    ("listen", "silent"),
    (r"\text{even}", r"\text{odd}"),
    ("x>3", r"x\geq 3"),
    ("x>3", "x<3"),
    ("1/3", "0.3333"),
    ("5", "5,6"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("x=5", "y=5"),
    ("50", r"5\%"),
    (r"-\infty", r"\infty"),
    ("x^2+2x+1", "(x+2)^2"),
    ("2:30", "1:15"),
    (r"\frac{1}{2004!}", "0.0000000"),
    ("0", "0.0000001"),
    ("0", r"\frac{1}{2004!}"),
    ("10^{-20}", "10^{-21}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    ("5", ""),
    ("e^{-100}", "e^{-101}"),
    ("1+10^{-30}", "1"),
    ("x=1,y=2", "x=2,y=1"),
    (
        r"\begin{pmatrix}10^{-20}\\2\end{pmatrix}",
        r"\begin{pmatrix}10^{-21}\\2\end{pmatrix}",
    ),
    ("(0,10^{-20})", "0<x<10^{-21}"),
    ("10^{-20}<x", "10^{-21}<x"),
    ("3", r"\text{three hundred}"),
    ("5", "-5"),
    ("12", "1,2"),
    (r"\sqrt{2}", "1.414213"),
    ("0.1", "0.10001"),
    ("y=x", "y=2x"),
]


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_equal_answers_are_right(gold: str, answer: str) -> None:
    assert math_equal(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_different_answers_are_wrong(gold: str, answer: str) -> None:
    assert not math_equal(gold, answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"earlier \boxed{5} and then \boxed{", None),
        (r"earlier \boxed{5} and then \boxed{\frac{1}{2}", None),
        (r"earlier \boxed{5} and then \boxed", None),
        (r"earlier \boxed{5} and then \boxed{}", None),
        (r"\boxed{5} Answer: 6", "6"),
        (r"Answer: $\boxed{6}$", "6"),
        ("Answer: 6, that is \\boxed{7}", "7"),
        (r"\boxed{3} wait, actually \boxed{5}", "5"),
        (r"so \boxed{\boxed{5}}.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"is $\boxed 25$", "25"),
        ("Answer: \\dfrac{1}{2}", r"\dfrac{1}{2}"),
        ("Answer: 3\nno:\n**Answer:** 4\n", "4"),
        ("**Final Answer**: $x=2$", "$x=2$"),
        ("Answer:", None),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_the_last_box_or_answer_line_counts(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


def test_an_answer_line_that_the_length_limit_may_have_cut_is_none() -> None:
    assert extract_answer("Answer: 12", finished=False) is None
    assert extract_answer("Answer: 12\nbecause", finished=False) == "12"
    assert extract_answer(r"\boxed{12} because", finished=False) == "12"


def test_extraction_takes_linear_time() -> None:
    for unit in ("\\boxed{", "{", "Answer:", "*", "answer ", "\\", "a\n"):
        assert extract_answer(unit * 200_000, finished=True) in (
            None,
            "Answer:" * 199_999,
        )


def test_no_answer_reaches_pythons_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """SymPy's `parse_expr` and string `sympify` evaluate Python; grading goes through neither."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("text handed to parse_expr")

    monkeypatch.setattr(sympy.parsing.sympy_parser, "parse_expr", refuse)
    monkeypatch.setattr(math_verify.parser, "parse_expr", refuse)
    for gold, answer in [
        *RIGHT,
        *WRONG,
        ("1", "__import__('os').getpid()"),
        ("1", "exit()"),
        ("2", "1+1"),
    ]:
        math_equal(gold, answer)


def test_broken_latex_is_wrong_and_never_right_by_accident() -> None:
    rng = random.Random(0)
    pieces = [
        "\\frac",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        ",",
        "\\text{",
        "\\cup",
        "=",
        "<",
        "^",
        "_",
        "%",
        "\\pm",
        "x",
        "",
        " ",
        "\\{",
    ]
    for _ in range(150):
        answer = "".join(rng.choices(pieces, k=rng.randrange(1, 7)))
        assert not math_equal("17", answer), answer
