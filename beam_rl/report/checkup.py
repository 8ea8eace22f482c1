"""The doctor's findings on a terminal: one line each, what to do below it."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from beam_rl.doctor import Check

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def show(checks: Iterable[Check]) -> None:
    checks, console = list(checks), Console(highlight=False, soft_wrap=True)
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text.assemble((f"{check.status:<5}", STYLES[check.status]), f"{check.name:<{width}}  {check.found}")
        console.print(line)
        if check.mend:
            console.print(Text(f"{'':5}{'':{width}}  → {check.mend}", style="dim"))
    wrong = sum(check.status == "fail" for check in checks)
    console.print(f"{wrong} to mend before a run" if wrong else "nothing keeps a run from starting")
