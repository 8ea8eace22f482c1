"""One place where the loop says what happened: the terminal, the run's metrics and W&B hear it from here."""

import contextlib
import logging
from collections.abc import Mapping

from beam_rl.recipe.tree import Logging
from beam_rl.report.console import Console, Phase
from beam_rl.report.metrics_sink import MetricsSink
from beam_rl.report.page import PAGE, write_page
from beam_rl.run import Run

log = logging.getLogger(__name__)


class Report(contextlib.ExitStack):
    """A run's report; a context that ends W&B's run and leaves the last page."""

    def __init__(self, console: Console, run: Run, settings: Logging) -> None:
        super().__init__()
        self.console, self.run = console, run
        self._told = False  # that the page could not be written; once is enough
        if run.resumed:
            console.resume(run.resumed.step)
        self.sink = MetricsSink(run, settings.wandb, settings.project, console.warn)
        self.callback(self.refresh, ended=True)
        self.callback(self.sink.close)

    def phase(
        self, name: str, total: int | None = None, once: bool = False
    ) -> contextlib.AbstractContextManager[Phase]:
        return self.console.phase(name, total, once)

    def warn(self, line: str) -> None:
        log.warning("%s", line)
        self.console.warn(line)

    def refresh(self, ended: bool = False) -> None:
        """Writes the run's page anew. It is a view of what is recorded: where it fails, one warning says so.

        ended: the run is about to let go of its folder.
        """
        try:
            write_page([self.run.folder], ended=ended)
        except Exception as error:  # whatever it is: a page is no reason to end a run
            log.warning("%s could not be written", PAGE, exc_info=error)
            if not self._told:
                self.console.warn(f"{PAGE} could not be written: {error}")
            self._told = True

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a step's metrics, then shows its row."""
        self.sink.log(step, metrics)
        self.console.step(step, metrics)
