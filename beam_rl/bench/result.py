"""What every bench ends in: a figure, the limit measured beside it, and how they are shown."""

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@dataclass(frozen=True)
class Result:
    """One bench's outcome; `ratio` is the figure as a share of the limit, so that 1 is the limit."""

    name: str
    figure: float
    unit: str  # "s" for a time, where less is better; a rate else
    limit: float  # what the machine allows, in `unit`, measured in the same run
    machine: str
    detail: dict[str, Any]

    @property
    def ratio(self) -> float:
        return self.limit / self.figure if self.unit == "s" else self.figure / self.limit

    def fields(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "figure": self.figure,
            "unit": self.unit,
            "limit": self.limit,
            "ratio": self.ratio,
            "machine": self.machine,
            "detail": self.detail,
        }


def show(result: Result, as_json: bool) -> None:
    """One JSON object, or a table for a person, on stdout."""
    if as_json:
        typer.echo(json.dumps(result.fields()))
        return
    import rich.console
    from rich.table import Table

    table = Table(title=f"{result.name} on {result.machine}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("figure", f"{result.figure:.4g} {result.unit}")
    table.add_row("limit, measured beside it", f"{result.limit:.4g} {result.unit}")
    table.add_row("share of the limit", f"{result.ratio:.1%}", end_section=True)
    for key, value in result.detail.items():
        table.add_row(key.replace("_", " "), _readable(key, value))
    rich.console.Console().print(table)


def _readable(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return f"{value / 2**30:.3f} GiB"
    if key.endswith("_seconds"):
        return f"{value:.4g} s"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
