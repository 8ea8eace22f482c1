"""A comparison as a person reads it: the pairs, a row a layer, the first departing layer in full, and the verdict."""

import rich.console
from rich.table import Table
from rich.text import Text

from beam_rl.parity.compare import Comparison
from beam_rl.parity.record import AFTER, BEFORE, LAYER, Place

PLAIN_WIDTH = 100  # columns where there is no terminal to ask


def show(comparison: Comparison, console: rich.console.Console | None = None) -> None:
    """Prints to stdout, if to nowhere else."""
    if console is None:
        console = rich.console.Console(highlight=False)
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
    _print(console, "log-probabilities of the sampled tokens", pairs_table(comparison))
    if (agreement := comparison.route_agreement) is not None:
        console.print(
            f"trainer's and engine's routers choose the same experts in {agreement:.2%} of (token, layer) pairs\n"
        )
    if any(comparison.errors.values()):
        _print(console, "largest relative error of each layer; * where a pair first departs", layers_table(comparison))
    else:
        console.print("layer by layer, Beam alone is compared")
    for side, names in comparison.unseen.items():
        console.print(f"not shown by the {side}, hence not compared: {', '.join(names)}")
    first = comparison.first_departure
    if first is not None and first.layer is not None:
        console.print()
        _print(console, f"layer {first.layer}, the first that departs", layer_table(comparison, first.layer))
    console.print()
    console.print(Text(verdict(comparison), style="green" if comparison.within_bounds else "bold red"))


def pairs_table(c: Comparison) -> Table:
    table = _table("pair", "mean |Δlogp|", "max |Δlogp|", "bound on mean")
    for pair, gap in c.gaps.items():
        style = "" if gap.mean <= c.logprob_mean_bound else "red"
        table.add_row(_pair(pair), f"{gap.mean:.2e}", f"{gap.max:.2e}", f"{c.logprob_mean_bound:.0e}", style=style)
    return table


def layers_table(c: Comparison) -> Table:
    """The largest relative error of each layer, and the sub-layer that has it."""
    table = _table("layer", *map(_pair, c.errors))
    places = {place for errors in c.errors.values() for place in errors}
    for name in BEFORE:
        table.add_row(name, *(_cell(c, pair, [(None, name)]) for pair in c.errors))
    for layer in sorted({layer for layer, _ in places if layer is not None}):
        inside: list[Place] = [(layer, name) for name in LAYER]
        table.add_row(str(layer), *(_cell(c, pair, inside) for pair in c.errors))
    for name in AFTER:
        table.add_row(name, *(_cell(c, pair, [(None, name)]) for pair in c.errors))
    return table


def layer_table(c: Comparison, layer: int) -> Table:
    """Every sub-layer of one layer in the order of computation."""
    table = _table("sub-layer", *map(_pair, c.errors))
    for name in LAYER:
        if any((layer, name) in errors for errors in c.errors.values()):
            table.add_row(name, *(_cell(c, pair, [(layer, name)], named=False) for pair in c.errors))
    return table


def verdict(c: Comparison) -> str:
    """One sentence, and who is alone where two pairs depart at the same place."""
    first = c.first_departure
    if first is None:
        if not any(c.errors.values()):
            return f"within bounds: no pair is further apart than {c.logprob_mean_bound:.0e} in mean |Δlogp|"
        return f"within bounds: no sub-layer adds more than {c.sublayer_bound:.0e}"
    where = first.sublayer if first.layer is None else f"layer {first.layer}, {first.sublayer}"
    text = f"{_pair(first.pair)} departs first at {where}: error {first.error:.2e}"
    return f"{text}; {c.alone} differs there from both others" if c.alone else text


def _cell(c: Comparison, pair: str, places: list[Place], named: bool = True) -> Text:
    """The largest error of the places; of a layer where the pair first departs, the departing one's, marked."""
    errors, departure = c.errors[pair], c.departures[pair]
    known = [place for place in places if place in errors]
    if not known:
        return Text("–", style="dim")
    first: Place | None = (departure.layer, departure.sublayer) if departure else None
    departs = first in known
    at = first if first is not None and departs else max(known, key=lambda place: errors[place])
    text = Text(f"{errors[at]:.1e}", style="bold red" if departs else "")
    if named and at[0] is not None and errors[at]:
        text.append(f" {at[1]}", style="red" if departs else "dim")
    return text.append(" *", style="bold red") if departs else text


def _pair(pair: str) -> str:
    return pair.replace("_", " – ")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _print(console: rich.console.Console, title: str, table: Table) -> None:
    console.print(Text(title, style="bold"))
    console.print(table)
