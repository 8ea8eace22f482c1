"""An environment for the toy task: it asks a wrong answer's problem again, once."""

from collections.abc import Mapping
from typing import Any

from beam_rl.verifiers.toy import toy_score


class SecondTry:
    """1 for the right answer at once, `second` for the right one at the second try."""

    def __init__(self, row: Mapping[str, Any], second: float = 0.5) -> None:
        self.problem = row["prompt"][-1]["content"]
        self.answer = row["answer"]
        self.worth = [1.0, second]  # of the tries that are left

    def step(self, response: str) -> tuple[str | None, float | None]:
        """The problem again, or None where it is over; and the reward."""
        worth = self.worth.pop(0)
        if toy_score(response, self.answer, "stop"):
            return None, worth
        return (self.problem, None) if self.worth else (None, 0.0)
