"""How large libraries are imported."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection inside, for imports of vLLM and Megatron: they make a million objects that stay, and the
    collector's looks at them take a seventh of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
