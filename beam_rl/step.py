"""One step's clock and notebook: times its phases, shows them, and collects the metrics that the step logs once."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol


class Display(Protocol):
    """Shows what is going on now."""

    def phase(
        self, label: str, total: int | None = None
    ) -> contextlib.AbstractContextManager[Callable[[int], None]]: ...


class Step:
    """The step's number, its metrics so far (the names of docs/metrics.md), and the wall seconds of its parts."""

    PARTS = ("generate", "verify", "score", "update", "sync")

    def __init__(self, number: int, display: Display) -> None:
        self.number, self.display = number, display
        self.metrics: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, label: str, part: str | None = None, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Shows `label` with a count up to `total` (call what is yielded with the count); the time goes to `part`."""
        start = time.perf_counter()
        with self.display.phase(label, total) as advance_to:
            yield advance_to
        if part:
            name = f"time/{part}_s"
            self.metrics[name] = self.metrics.get(name, 0.0) + time.perf_counter() - start

    def log(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)

    def close(self) -> dict[str, float]:
        """The step's metrics with its whole time; what no part accounts for is `time/idle_s`."""
        total = time.perf_counter() - self._start
        parts = sum(self.metrics.setdefault(f"time/{p}_s", 0.0) for p in self.PARTS)
        return self.metrics | {"time/step_s": total, "time/idle_s": max(0.0, total - parts)}
