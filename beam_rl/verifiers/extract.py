r"""Finds the final answer in a response: the last `\boxed{…}` or `Answer:` line.

Plain string work that takes time linear in the response. Knows nothing about what the answer means.
"""

import re

_BARE = re.compile(r"\s*(-?[\w.,/]+)")  # `\boxed 5`, as TeX allows for a single token
_ANSWER_LINE = re.compile(r"\banswer\b[*_]{0,3}[ \t]*:[*_]{0,3}[ \t]*([^\n]*)(\n?)", re.IGNORECASE)


def extract_answer(text: str, finished: bool = True) -> str | None:
    r"""The response's final answer as LaTeX or text, or None where there is none.

    The last box or `Answer:` line counts, whichever comes later: that is the response's last word (a box in an answer
    line is that line's). A box that is cut off or empty is no answer, whatever earlier ones say. Nested boxes give the
    inner one.

    Args:
        text: the decoded response.
        finished: False where the response ran into its length limit: an answer line that the limit may have cut
            (12 of 123) then doesn't count.
    """
    start = text.rfind(r"\boxed")
    lines = list(_ANSWER_LINE.finditer(text))
    if start >= 0 and not (lines and lines[-1].start() > start):
        return _box_content(text, start + len(r"\boxed"))
    if not lines or not (finished or lines[-1][2]):
        return None
    return lines[-1][1].strip().strip("*").strip() or None


def _box_content(text: str, start: int) -> str | None:
    """What stands in the braces that open at `start` (white space may come first); None where they don't close."""
    while start < len(text) and text[start].isspace():
        start += 1
    if start == len(text) or text[start] != "{":
        bare = _BARE.match(text, start)
        return bare[1] if bare else None
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 2  # an escaped brace, as in \{1, 2\}, opens and closes nothing
            continue
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 1 : i].strip() or None
        i += 1
    return None
