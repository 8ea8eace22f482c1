"""What answers the model between its turns: users' classes behind killable processes, and the tokens around an answer."""

from typing import TYPE_CHECKING

from beam_rl.environments.pool import EnvironmentFailure, EnvironmentPool, Remote

if TYPE_CHECKING:  # the processes of environments import this package too, and need no recipe
    from beam_rl.recipe.tree import Environment

__all__ = ["EnvironmentFailure", "EnvironmentPool", "Remote", "make_environments"]


def make_environments(recipe: "Environment") -> EnvironmentPool:
    """The environments that the recipe names. Raises InputError where their class can't be loaded."""
    return EnvironmentPool(recipe.name, recipe.options, recipe.timeout_s, recipe.workers)
