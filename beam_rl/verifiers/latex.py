r"""Takes an answer's LaTeX apart: its outer list, percent sign, unit, words.

Plain string work on short texts. Knows nothing about SymPy or what is equal to what.
"""

import re
from dataclasses import dataclass
from typing import Literal

MAX_ITEMS = 64  # of a list that is compared element by element

_PLAIN = [  # (pattern, replacement), in this order
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])"), ""),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\[,;:]|\\q?quad(?![a-zA-Z])|\\ |~|\u00a0"), " "),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\langle(?![a-zA-Z])"), "("),
    (re.compile(r"\\rangle(?![a-zA-Z])"), ")"),
    (
        re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"),
        ",",
    ),
    (re.compile(r"\s*,(?:\s*,)+\s*"), ", "),
    (re.compile(r"\\\$|\\[()\[\]]|\$"), ""),
    (re.compile(r"(?<![a-zA-Z\\])(?:infinity|infty)(?![a-zA-Z])"), r"\\infty"),
    (re.compile("\u2212"), "-"),
]
_MEMBER = re.compile(r"^[a-zA-Z]\s*\\in(?![a-zA-Z])\s*")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SPACED_THOUSANDS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent)\s*\}|percent)\s*$")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{\s*([^{}]*?)\s*\}")
_UNIT = re.compile(
    r"[\d})]\s*(?:\\(?:text|mathrm|mbox|textrm)\s*\{\s*([^{}]*?)\s*\}|(?<= )([a-zA-Z]{2,}))((?:\^\s*\{?\s*\d\s*\}?)?)$"
)
_UNIT_NAMES = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimeters millimetre millimetres",
        "cm centimeter centimeters centimetre centimetres",
        "m meter meters metre metres",
        "km kilometer kilometers kilometre kilometres",
        "inch inches in",
        "foot feet ft",
        "yard yards yd",
        "mile miles mi",
        "mg milligram milligrams",
        "g gram grams",
        "kg kilogram kilograms",
        "pound pounds lb lbs",
        "ounce ounces oz",
        "ml milliliter milliliters millilitre millilitres",
        "l liter liters litre litres",
        "s sec second seconds",
        "min minute minutes",
        "h hr hrs hour hours",
        "day days",
        "week weeks",
        "month months",
        "year years yr yrs",
        "cent cents",
        "dollar dollars",
        "mph",
        "degree degrees",
        "radian radians rad",
    )
    for name in names.split()
}
_DECIMAL = re.compile(r"[+-]?(\d*)\.(\d+)")
_TIME = re.compile(r"\d{1,2}:\d\d(?:\s*[ap]\.?m\.?)?", re.IGNORECASE)
_OPEN, _CLOSE = "([{", ")]}"


def normalise(latex: str) -> str:
    """The same answer without dollar signs, spacing commands, sizes, a final full stop, or thousands separators."""
    text = latex.strip()
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    text = _MEMBER.sub("", text.strip().rstrip(".").strip(" ,;"))
    while text.startswith("{") and _closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    if _THOUSANDS.fullmatch(text) or _SPACED_THOUSANDS.fullmatch(text):
        text = re.sub("[, ]", "", text)
    return text


def unwrapped(text: str) -> str:
    r"""`\text{…}` and its relatives replaced by what they hold."""
    return _TEXT.sub(r"\1", text)


def squash(text: str) -> str:
    """For a comparison to the letter: no white space, no text commands, words in lower case, (B) as B."""
    plain = re.sub(r"\s+", "", unwrapped(text))
    if re.fullmatch(r"\([A-Za-z]\)", plain):
        plain = plain[1]
    return plain.lower() if plain.isalpha() else plain


def is_words(text: str) -> bool:
    """Whether the answer is a word or a clock time and not an expression: `\\text{even}`, `Monday`, `2:30`."""
    plain = unwrapped(text).strip()
    if _TIME.fullmatch(plain):
        return True
    if not re.fullmatch(r"[A-Za-z]+(?:[ '][A-Za-z]+)*", plain):
        return False
    in_text_command, letters = plain != text.strip(), sum(map(str.isalpha, plain))
    return letters > (1 if in_text_command else 2)  # x and xy are algebra, \text{no} and even are words


def without_percent(text: str) -> tuple[str, bool]:
    """The text without a final percent sign or word, and whether there was one."""
    stripped = _PERCENT.sub("", text)
    return stripped, stripped != text


def unit_of(text: str) -> str:
    """The known unit after a number (`cm^2` of `5\\text{ cm}^2`), or the base of a subscripted numeral; "" without."""
    if base := re.search(r"\d\s*_\s*\{?\s*(\d+)\s*\}?$", text):
        return f"base {base[1]}"
    match = _UNIT.search(text)
    if not match:
        return ""
    unit = _UNIT_NAMES.get((match[1] or match[2] or "").strip(" .").lower(), "")
    return unit + re.sub(r"[\s{}]", "", match[3]) if unit else ""


def decimal_digits(text: str) -> tuple[int, int]:
    """Decimal places and significant digits of a plain decimal such as 3.140; (0, 0) for anything else."""
    match = _DECIMAL.fullmatch(text.replace(" ", ""))
    return (len(match[2]), len((match[1] + match[2]).lstrip("0"))) if match else (0, 0)


@dataclass(frozen=True)
class Listing:
    r"""An answer of several parts. `kind`: "bare" (1, 2), "set" \{1, 2\}, "union", or the brackets "()", "[)" …"""

    kind: Literal["bare", "set", "union"] | str
    items: list[str]


def as_listing(text: str) -> Listing | None:
    """The parts of a list, tuple, set, interval or union; None for a single answer."""
    if "\\begin" in text or "|" in text or "\\mid" in text:
        return None  # matrices, absolute values, set-builder notation: one expression
    pieces = _split(text, r"\cup")
    if len(pieces) > 1:
        return _listing("union", pieces)
    if text.startswith(r"\{") and text.endswith(r"\}") and _closing(text, 1) == len(text) - 1:
        inner = text[2:-2].strip()
        return _listing("set", _plus_minus(_split(inner, ",;")) if inner else [])
    if text[0] in "([" and text[-1] in ")]" and _closing(text, 0) == len(text) - 1:
        items = _split(text[1:-1], ",;")
        return _listing(text[0] + text[-1], items) if len(items) > 1 else None
    items = _plus_minus(_split(text, ",;"))
    return _listing("bare", items) if len(items) > 1 else None


def _listing(kind: str, items: list[str]) -> Listing | None:
    return Listing(kind, items) if len(items) <= MAX_ITEMS and all(items) else None


def _plus_minus(items: list[str]) -> list[str]:
    r"""Each a \pm b as its two values."""
    result = []
    for item in items:
        both = item.count(r"\pm") == 1 and r"\mp" not in item
        result += [item.replace(r"\pm", sign).strip() for sign in "+-"] if both else [item]
    return [item.removeprefix("+").strip() for item in result]


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`, of whatever shape (half-open intervals); -1 without one."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        if depth == 0:
            return i
    return -1


def _split(text: str, separators: str) -> list[str]:
    r"""Splits at separators outside all brackets: at each character of ",;", or at the command `\cup`."""
    step = len(separators) if separators.startswith("\\") else 1
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0 and (text.startswith(separators, i) if step > 1 else character in separators):
            parts.append(text[start:i].strip())
            start = i + step
    return [*parts, text[start:].strip()]
