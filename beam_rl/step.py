"""One step's clock and notebook: times its phases, shows them, and collects the metrics that the step logs once."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Protocol


class Phase(Protocol):
    def advance(self, count: int = 1) -> None: ...


class Display(Protocol):
    """Shows what is going on now."""

    def phase(
        self, name: str, total: int | None = None, once: bool = False
    ) -> contextlib.AbstractContextManager[Phase]: ...


class Quiet:
    """A display of what goes on beside the step that is shown: nothing."""

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None, once: bool = False) -> Iterator["Quiet"]:
        yield self

    def advance(self, count: int = 1) -> None:
        pass


class Step:
    """The step's number, its metrics so far (names of `report.metric_names`), and the wall seconds of its parts."""

    PARTS = ("generate", "verify", "score", "update", "hold", "turn", "sync", "eval")

    def __init__(self, number: int, display: Display) -> None:
        self.number, self.display = number, display
        self.metrics: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str, part: str, total: int | None = None) -> Iterator[Phase]:
        """Shows `name` with a count up to `total`; the time goes to `time/<part>_s`."""
        start = time.perf_counter()
        with self.display.phase(name, total) as phase:
            yield phase
        key = f"time/{part}_s"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start

    def log(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)

    def close(self) -> dict[str, float]:
        """The step's metrics with its whole time; `time/idle_s` is what the trainer had no part in."""
        total = time.perf_counter() - self._start
        for part in self.PARTS:
            self.metrics.setdefault(f"time/{part}_s", 0.0)
        busy = sum(self.metrics[f"time/{part}_s"] for part in ("score", "update", "sync", "eval"))
        return self.metrics | {"time/step_s": total, "time/idle_s": max(0.0, total - busy)}
