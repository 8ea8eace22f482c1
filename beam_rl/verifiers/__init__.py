"""Rewards that are checked, not learned: mathematical answers, the toy task's, and a user's own function."""

from typing import TYPE_CHECKING

from beam_rl.verifiers.pool import VerifierPool
from beam_rl.verifiers.toy import ToyVerifier
from beam_rl.verifiers.types import Verdict, VerifyItem

if TYPE_CHECKING:  # the grading processes import this package too, and need no recipe
    from beam_rl.recipe.tree import Verifier

__all__ = ["ToyVerifier", "Verdict", "VerifierPool", "VerifyItem", "check_verifier", "make_verifier"]


def check_verifier(recipe: "Verifier") -> None:
    """Raises InputError where the recipe names a function that can't be loaded."""
    if recipe.name not in ("math", "toy"):
        with VerifierPool(workers=1, timeout_s=recipe.timeout_s, function=recipe.name) as pool:
            pool.score([VerifyItem("", "", "stop")])


def make_verifier(recipe: "Verifier") -> VerifierPool | ToyVerifier:
    """The verifier that `recipe.verifier` names; close it, or use it in a `with`."""
    if recipe.name == "toy":
        return ToyVerifier()
    function = None if recipe.name == "math" else recipe.name
    return VerifierPool(workers=recipe.workers, timeout_s=recipe.timeout_s, function=function)
