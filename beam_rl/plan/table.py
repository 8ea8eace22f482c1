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
    console.print(
        f"on {where}, {case.placement}" if case.on_gpus else f"on this machine ({machine.name}), without a GPU"
    )
    for places in _alike([*plan.ranks, *plan.engines]):
        console.print(_memory(places, "GPU" if case.on_gpus else "process"))
    console.print(_node(plan))
    console.print(_seconds(plan))
    for note in plan.notes:
        console.print(f"· {note}")
    for problem in plan.problems:
        console.print(f"[bold red]does not fit[/]  {problem.key}: {problem.message}")
    console.print("[green]fits[/]" if plan.fits else f"{len(plan.problems)} to turn before this can run")


def _memory(places: Sequence[Place], what: str) -> Table:
    """What the fullest of some alike places holds, at each moment."""
    first = places[0]
    count = f", {first.parameters:,} parameters{' each' if len(places) > 1 else ''}" if first.parameters else ""
    table = Table(title=f"a {what} of {_span(places)}{count}", title_justify="left")
    table.add_column("bytes")
    for moment in first.moments:
        table.add_column(moment, justify="right", style="bold" if moment == first.fullest else None)
    held = [asdict(moment) for moment in first.moments.values()]
    for name in [name for name in COLUMNS if any(moment[name] for moment in held)]:
        table.add_row(name.replace("_", " "), *[gib(moment[name]) if moment[name] else "" for moment in held])
    table.add_section()
    table.add_row(f"of {gib(first.limit)}", *[gib(moment.total) for moment in first.moments.values()])
    return table


def _alike(places: Iterable[Place]) -> list[list[Place]]:
    """Places with as many parameters, the fullest of each first: pipeline stages differ in activations besides."""
    groups: dict[object, list[Place]] = {}
    for place in places:
        groups.setdefault((place.name.split()[0], place.parameters), []).append(place)
    return [sorted(group, key=lambda place: -place.peak.total) for group in groups.values()]


def _span(places: Sequence[Place]) -> str:
    kind = places[0].name.split()[0]
    if kind == "engine":
        return places[0].name if len(places) == 1 else f"{len(places)} engine workers"
    numbers = sorted(int(place.name.split()[1]) for place in places)
    if len(numbers) == 1:
        return places[0].name
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"ranks {numbers[0]}–{numbers[-1]}" if whole else f"{len(numbers)} ranks from {numbers[0]} on"


def _node(plan: Plan) -> Table:
    """The fullest node."""
    table = Table(title="a node, the fullest", title_justify="left")
    for name in ("bytes", "host", "NVMe"):
        table.add_column(name, justify="left" if name == "bytes" else "right")
    held = asdict(plan.node)
    held.pop("nvme")
    for name, size in held.items():
        if size:
            table.add_row(name.replace("_", " "), gib(size), "")
    table.add_section()
    machine = plan.case.machine
    limits = f"of {gib(machine.host_bytes)}, {gib(machine.nvme_bytes)}"
    table.add_row(limits, gib(plan.node.host), gib(plan.nvme_bytes) if plan.nvme_bytes else "")
    return table


def _seconds(plan: Plan) -> Table:
    table = Table(title="a step, estimated", title_justify="left")
    table.add_column("")
    table.add_column("seconds", justify="right")
    for name, seconds in plan.seconds.record().items():
        shown = f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}"
        table.add_row(f"of update: {name}" if name == "optimizer" else name.replace("_", " "), shown)
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
        console.print(
            "no layout of this many GPUs fits: more nodes, or trainer.optimizer.offload and trainer.recompute"
        )
        return
    console.print("layouts that fit, the quickest first")
    for s in suggestions:
        change = " ".join(s.overrides) or "as the recipe has it"
        console.print(f"· {s.step_s:,.0f} s a step, {gib(s.fullest_bytes)} on the fullest GPU: {change}")
