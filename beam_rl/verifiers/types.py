"""What goes into a verifier and what comes out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VerifyItem:
    """One response to grade."""

    response: str  # the decoded response, without special tokens
    gold: str  # the right answer, as the data set writes it
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True)
class Verdict:
    """The reward for one response, and why it is 0 where the verifier could not decide."""

    score: float
    timed_out: bool = False
    error: str | None = None
