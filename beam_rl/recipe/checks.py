"""Combinations of recipe keys that can't work, each with the key, the value and what would do."""


def check(recipe) -> None:
    return None
