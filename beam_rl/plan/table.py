"""A plan on a terminal: what each kind of GPU holds, what a node holds, seconds, and what does not fit."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from rich.console import Console
from rich.table import Table

from beam_rl.plan.gpu import Place
from beam_rl.plan.memory import Bytes
from beam_rl.plan.plan import Plan, gib
from beam_rl.plan.simulate import Timeline
from beam_rl.plan.suggest import Suggestion

COLUMNS = [field.name for field in fields(Bytes)]


def show(plan: Plan, console: Console | None = None) -> None:
    console = console or Console(highlight=False, soft_wrap=True)
    machine, case = plan.case.machine, plan.case
    where = f"{case.nodes} × {case.recipe.cluster.gpus_per_node or machine.gpus_per_node} {machine.name}"
    console.print(f"{case.recipe.name}: {case.model.source}")
    console.print(f"on {where}, {case.placement}" if case.on_gpus else f"on this machine ({machine.name}), without a GPU")
    console.print(_memory(plan))
    console.print(_node(plan))
    console.print(_seconds(plan))
    for note in plan.notes:
        console.print(f"· {note}")
    for problem in plan.problems:
        console.print(f"[bold red]does not fit[/]  {problem.key}: {problem.message}")
    console.print("[green]fits[/]" if plan.fits else f"{len(plan.problems)} to turn before this can run")


def _memory(plan: Plan) -> Table:
    what = "GPU" if plan.case.on_gpus else "process"
    table = Table(title=f"bytes a {what}, at each moment; what is alike is one row", title_justify="left")
    for name in (what, "parameters", "moment", *COLUMNS, "total", "limit"):
        table.add_column(name.replace("_", " "), justify="left" if name in (what, "moment") else "right")
    for places in _alike([*plan.ranks, *plan.engines]):
        first = places[0]
        for i, (moment, held) in enumerate(first.moments.items()):
            sizes = [gib(size) if size else "" for size in asdict(held).values()]
            name, count = (_span(places), f"{first.parameters:,}" if first.parameters else "") if i == 0 else ("", "")
            last = i == len(first.moments) - 1
            style = "bold" if moment == first.fullest else None
            table.add_row(name, count, moment, *sizes, gib(held.total), gib(first.limit), style=style, end_section=last)
    return table


def _alike(places: Iterable[Place]) -> list[list[Place]]:
    """Places that hold the same, in the order of their firsts."""
    groups: dict[object, list[Place]] = {}
    for place in places:
        kind = place.name.split()[0]
        groups.setdefault((kind, place.parameters, tuple(place.moments.items())), []).append(place)
    return list(groups.values())


def _span(places: Sequence[Place]) -> str:
    kind = places[0].name.split()[0]
    if kind == "engine":
        return places[0].name if len(places) == 1 else f"{len(places)} engine workers"
    numbers = [int(place.name.split()[1]) for place in places]
    if len(numbers) == 1:
        return places[0].name
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"ranks {numbers[0]}–{numbers[-1]}" if whole else f"{len(numbers)} ranks, first {numbers[0]}"


def _node(plan: Plan) -> Table:
    table = Table(title="bytes a node, the fullest", title_justify="left")
    held = asdict(plan.node)
    held.pop("nvme")
    for name in (*held, "host memory", "of", "NVMe", "of"):
        table.add_column(name.replace("_", " "), justify="right")
    machine = plan.case.machine
    row = [*held.values(), plan.node.host, machine.host_bytes, plan.nvme_bytes, machine.nvme_bytes]
    table.add_row(*[gib(size) if size else "" for size in row])
    return table


def _seconds(plan: Plan) -> Table:
    table = Table(title="seconds a step, estimated", title_justify="left")
    record = plan.seconds.record()
    for name in record:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*[f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}" for seconds in record.values()])
    return table


def show_timelines(timelines: Sequence[Timeline], console: Console | None = None) -> None:
    table = Table(title="paces, simulated", title_justify="left")
    for name in ("pace", "step", "trainer idle", "engines idle", "staleness, mean", "largest"):
        table.add_column(name, justify="left" if name == "pace" else "right")
    for t in timelines:
        idle = [f"{t.trainer_idle:.0%}", f"{t.engines_idle:.0%}"]
        table.add_row(t.pace, f"{t.step_s:,.1f} s", *idle, f"{t.staleness_mean:.2f}", str(t.staleness_max))
    (console or Console(highlight=False, soft_wrap=True)).print(table)


def show_suggestions(suggestions: Sequence[Suggestion], console: Console | None = None) -> None:
    console = console or Console(highlight=False, soft_wrap=True)
    if not suggestions:
        console.print("no layout of this many GPUs fits: more nodes, or trainer.optimizer.offload and trainer.recompute")
        return
    table = Table(title="layouts that fit, the quickest first", title_justify="left")
    for name in ("overrides", "fullest GPU", "step, estimated"):
        table.add_column(name, justify="left" if name == "overrides" else "right")
    for s in suggestions:
        table.add_row(" ".join(s.overrides), gib(s.fullest_bytes), f"{s.step_s:,.0f} s")
    console.print(table)


