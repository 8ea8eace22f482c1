"""A reward that a random model gets some of, for runs that need no warm start."""


def digits(response: str, gold: str, finish_reason: str) -> float:
    """The share of the response's words that are digits."""
    words = response.split()
    return sum(word.isdigit() for word in words) / max(1, len(words))
