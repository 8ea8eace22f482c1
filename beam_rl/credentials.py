"""Keys and tokens of the environment: found by their names, kept out of what a run writes and starts.

A value is known as a secret because a variable with a telling name holds it, or because it looks like a token of a
service that such runs use. Knows nothing about recipes or logs.
"""

import os
import re
from collections.abc import Mapping

NAMES = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET)_?KEY)(?:_|$)", re.IGNORECASE
)
LOOKS = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bwandb_v1_\w{20,}|\b(?:ghp|gho|ghs)_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}"
    r"|\bAKIA[A-Z0-9]{16}\b|(?<=://)[^/\s:@]+:[^/\s:@]+(?=@)"
)
SHORTEST = 8  # characters; a shorter value is no key, and would be found everywhere
HIDDEN = "[hidden]"


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that needs no keys."""
    return {name: value for name, value in environment.items() if not NAMES.search(name)}


def hide(text: str) -> str:
    """`text` with every secret that is found in it replaced."""
    for value in _values():
        text = text.replace(value, HIDDEN)
    return LOOKS.sub(HIDDEN, text)


def holds_secret(text: str) -> bool:
    """Whether a secret is found in `text`."""
    return hide(text) != text


def _values() -> list[str]:
    """Longest first, so that a secret within another one leaves nothing of it."""
    found = {value for name, value in os.environ.items() if NAMES.search(name) and len(value) >= SHORTEST}
    paths = {value for value in found if os.path.exists(value)}  # AWS_WEB_IDENTITY_TOKEN_FILE
    return sorted(found - paths, key=len, reverse=True)
