"""Rewards that are checked, not learned: mathematical answers, and the toy task's."""

from typing import TYPE_CHECKING

from beam_rl.verifiers.pool import VerifierPool
from beam_rl.verifiers.toy import ToyVerifier
from beam_rl.verifiers.types import Verdict, VerifyItem

if TYPE_CHECKING:  # the grading processes import this package too, and need no recipe
    from beam_rl.recipe.tree import Verifier

__all__ = ["ToyVerifier", "Verdict", "VerifierPool", "VerifyItem", "make_verifier"]


def make_verifier(recipe: "Verifier") -> VerifierPool | ToyVerifier:
    """The verifier that `recipe.verifier` names; close it, or use it in a `with`."""
    if recipe.name == "toy":
        return ToyVerifier()
    return VerifierPool(workers=recipe.workers, timeout_s=recipe.timeout_s)
