"""Rewards that are checked, not learned: mathematical answers, and the toy task's."""

from beam_rl.recipe.tree import Verifier
from beam_rl.verifiers.pool import VerifierPool
from beam_rl.verifiers.toy import ToyVerifier
from beam_rl.verifiers.types import Verdict, VerifyItem

__all__ = ["ToyVerifier", "Verdict", "VerifierPool", "VerifyItem", "make_verifier"]


def make_verifier(recipe: Verifier) -> VerifierPool | ToyVerifier:
    """The verifier that `recipe.verifier` names; close it, or use it in a `with`."""
    if recipe.name == "toy":
        return ToyVerifier()
    return VerifierPool(workers=recipe.workers, timeout_s=recipe.timeout_s)
