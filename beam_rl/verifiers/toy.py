"""Grades the toy task's responses: single digits, then one box with the answer, then a stop.

Knows nothing about models or processes: a regular expression decides, so no time limit is needed.
"""

import re
from collections.abc import Sequence

from beam_rl.verifiers.types import Verdict, VerifyItem

# The running totals (none in a direct answer), then the first and only box, with nothing after it.
_RESPONSE = re.compile(r"(?:\d )*\\boxed\{ (\d) \}")


def toy_score(response: str, gold: str, finish_reason: str) -> float:
    """1.0 for a response of exactly the task's form whose box holds `gold` and that ended by itself, else 0.0."""
    match = _RESPONSE.fullmatch(response.strip())
    return float(match is not None and match[1] == gold.strip() and finish_reason == "stop")


class ToyVerifier:
    """The toy task's verifier, with the interface of `VerifierPool`."""

    def score(self, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One verdict per item, in order."""
        return [Verdict(toy_score(item.response, item.gold, item.finish_reason)) for item in items]

    def close(self) -> None:
        """Holds nothing."""

    def __enter__(self) -> "ToyVerifier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
