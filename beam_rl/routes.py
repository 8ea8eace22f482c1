"""Recorded expert choices as numbers: what makes a row of them fit for replay. Plain numpy."""

import numpy as np
from numpy.typing import NDArray


def invalid_rows(routes: NDArray[np.integer], num_experts: int) -> NDArray[np.bool_]:
    """Which recorded choices can't be replayed: an id out of range, or one expert twice (all zeros among them).

    Args:
        routes: (tokens, MoE layers, top-k) logical expert ids.
    Returns:
        (tokens, MoE layers) True where invalid.
    """
    ordered = np.sort(routes, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    return twice | (ordered[..., -1] >= num_experts)
