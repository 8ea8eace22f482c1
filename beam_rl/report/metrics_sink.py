"""One dict a step to metrics.jsonl and to W&B.

The file is the record: a value that can't be written there stops the run. W&B is a convenience: what goes wrong there
is one warning, and training goes on.
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

from beam_rl.report.metric_names import check_names
from beam_rl.run import Run, write_file

Mode = Literal["offline", "online", "disabled"]


class MetricsSink:
    """Logs a run's steps under the names of `metric_names`."""

    def __init__(self, run: Run, mode: Mode, project: str, warn: Callable[[str], None]) -> None:
        """Starts W&B unless `mode` is disabled; online falls back to offline where it can't be reached.

        Args:
            warn: gets one line for a person.
        """
        self._run = run
        self._warn = warn
        self._wandb: Any = None
        if mode == "online":
            self._start("online", project, "its metrics go to the run's wandb/ folder, for `wandb sync` later")
        if mode == "offline" or (mode == "online" and self._wandb is None):
            self._start("offline", project, "going on without it")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step.

        Raises:
            UnknownMetric: a name that is not listed.
            RunError: a value that is not finite, or a step that is not after the last one.
        """
        check_names(metrics)
        self._run.log_metrics(step, metrics)
        if self._wandb is not None:
            self._try(lambda: self._wandb.log({"step": step, **metrics}), "going on without it")

    def close(self) -> None:
        """Ends the W&B run; waits some seconds for an upload."""
        if self._wandb is not None:
            self._try(self._wandb.finish, "the last steps may be missing there")
            self._wandb = None

    def _start(self, mode: Mode, project: str, otherwise: str) -> None:
        def start() -> None:
            self._wandb = start_wandb(self._run, mode, project)

        self._try(start, otherwise)

    def _try(self, call: Callable[[], Any], otherwise: str) -> None:
        try:
            call()
        except Exception as error:  # whatever it raises: a plot is no reason to lose a training step
            self._wandb = None
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            self._warn(f"W&B: {reason.rstrip('.')}; {otherwise}")


def start_wandb(run: Run, mode: Mode, project: str) -> Any:
    """A W&B run that a resumed training continues: the id is kept in the run's folder.

    The x axis is our own step, not W&B's count of calls: after a resume from an earlier checkpoint steps come again,
    and W&B would drop them.
    """
    import wandb  # takes 2 s, and a run with W&B disabled has no use for it

    settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, finish_timeout=8.0)
    wandb.setup(settings=settings)
    if mode == "online":
        wandb.login(prompt=False)  # without a key `init` would ask for one and wait
    id_file = run.folder / "wandb" / "run_id"
    if not id_file.exists():
        write_file(id_file, secrets.token_hex(4))
    started = wandb.init(
        project=project,
        name=run.recipe.get("name"),
        id=id_file.read_text(encoding="utf-8"),
        resume="allow",
        mode=mode,
        dir=run.folder,
        config=run.recipe,
        allow_val_change=True,
        settings=settings,
    )
    started.define_metric("step", hidden=True)
    started.define_metric("*", step_metric="step")
    return started
