"""Low-rank additions to a linear layer's output, for rows that have different adapters. Plain torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


def add_low_rank(out: Tensor, x: Tensor, a: Tensor, b: Tensor, rows: Tensor | None = None) -> None:
    """out += B·A·x in place, for all rows or those of a mask. Rounds A·x to x's dtype, and the sum once.

    out: (rows, outputs), may be a strided view. x: (rows, inputs). a: (rank, inputs). b: (outputs, rank).
    rows: (rows, 1) of x's dtype, 1 where the adapter applies and 0 elsewhere; None: everywhere.
    """
    inner = x @ a.t()
    out.addmm_(inner if rows is None else inner * rows, b.t())


@dataclass(frozen=True)
class RowSlots:
    """Which adapter each row has: `of` (rows,) slot numbers, −1 for none."""

    of: Tensor

    def masks(self, like: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """Each slot in use with the mask of its rows, as `add_low_rank` takes it."""
        slots = self.of.unique().tolist()
        for slot in slots:
            if slot >= 0:
                yield slot, None if len(slots) == 1 else (self.of == slot).to(like.dtype)[:, None]
