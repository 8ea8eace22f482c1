"""One place where the loop says what happened: the terminal, the run's metrics and W&B hear it from here."""

import contextlib
import logging
from collections.abc import Mapping

from beam_rl.recipe.tree import Logging
from beam_rl.report.console import Console, Phase
from beam_rl.report.metrics_sink import MetricsSink
from beam_rl.run import Run

log = logging.getLogger(__name__)


class Report(contextlib.ExitStack):
    """A run's report; a context that ends W&B's run."""

    def __init__(self, console: Console, run: Run, settings: Logging) -> None:
        super().__init__()
        self.console = console
        if run.resumed:
            console.resume(run.resumed.step)
        self.sink = MetricsSink(run, settings.wandb, settings.project, console.warn)
        self.callback(self.sink.close)

    def phase(
        self, name: str, total: int | None = None, once: bool = False
    ) -> contextlib.AbstractContextManager[Phase]:
        return self.console.phase(name, total, once)

    def warn(self, line: str) -> None:
        log.warning("%s", line)
        self.console.warn(line)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a step's metrics, then shows its row."""
        self.sink.log(step, metrics)
        self.console.step(step, metrics)
