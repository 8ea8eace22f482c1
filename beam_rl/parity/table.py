"""A comparison as a person reads it: the pairs, a row a layer, the first departing layer in full, and the verdict."""

from collections.abc import Mapping

import rich.console
from rich.table import Table
from rich.text import Text

from beam_rl.parity.compare import Comparison, Departure
from beam_rl.parity.record import AFTER, BEFORE, LAYER, Place

PLAIN_WIDTH = 100  # columns where there is no terminal to ask


def show(comparison: Comparison) -> None:
    """Prints to stdout."""
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(pairs_table(comparison))
    console.print(layers_table(comparison))
    first = comparison.first_departure
    if first is not None and first.layer is not None:
        console.print(layer_table(comparison, first.layer))
    console.print(Text(verdict(comparison), style="green" if comparison.within_bounds else "bold red"))


def pairs_table(c: Comparison) -> Table:
    table = _table("log-probabilities of the sampled tokens", "pair", "mean |Δlogp|", "max |Δlogp|", "bound on mean")
    for pair, gap in c.gaps.items():
        style = "" if gap.mean <= c.logprob_mean_bound else "red"
        table.add_row(_pair(pair), f"{gap.mean:.2e}", f"{gap.max:.2e}", f"{c.logprob_mean_bound:.0e}", style=style)
    table.caption = f"the routers of trainer and engine agree in {c.route_agreement:.2%} of (token, sparse layer) pairs"
    return table


def layers_table(c: Comparison) -> Table:
    """The largest relative error of each layer, and the sub-layer that has it."""
    table = _table("largest relative error a layer, and where", "layer", *map(_pair, c.errors))
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
    table = _table(f"layer {layer}, the first that departs", "sub-layer", *map(_pair, c.errors))
    for name in LAYER:
        if any((layer, name) in errors for errors in c.errors.values()):
            table.add_row(name, *(_cell(c, pair, [(layer, name)], named=False) for pair in c.errors))
    return table


def verdict(c: Comparison) -> str:
    """One sentence, and who is alone where two pairs depart at the same place."""
    first = c.first_departure
    if first is None:
        return f"within bounds: no sub-layer adds more than {c.sublayer_bound:.0e}"
    where = first.sublayer if first.layer is None else f"layer {first.layer}, {first.sublayer}"
    text = f"{_pair(first.pair)} departs first at {where}: error {first.error:.2e}"
    alone = odd_one_out(c.departures, first)
    return f"{text}; {alone} differs there from both others" if alone else text


def odd_one_out(departures: Mapping[str, Departure | None], first: Departure) -> str | None:
    """The side that both pairs departing at the first place have in common, if exactly two do."""
    place = (first.layer, first.sublayer)
    there = [pair for pair, d in departures.items() if d and (d.layer, d.sublayer) == place]
    if len(there) != 2:
        return None
    return (set(there[0].split("_")) & set(there[1].split("_"))).pop()


def _cell(c: Comparison, pair: str, places: list[Place], named: bool = True) -> Text:
    known = [(c.errors[pair][place], place) for place in places if place in c.errors[pair]]
    if not known:
        return Text("–", style="dim")
    error, (layer, name) = max(known, key=lambda e: e[0])
    departure = c.departures[pair]
    at = departure and (departure.layer, departure.sublayer)
    departs = departure is not None and at in places
    if departs and departure is not None and at in c.errors[pair]:
        error, name = c.errors[pair][at], departure.sublayer
    text = Text(f"{error:.1e}", style="bold red" if departs else "")
    text.append(f" {name}" if named and layer is not None else "", style="red" if departs else "dim")
    return text.append(" ← departs", style="bold red") if departs else text


def _pair(pair: str) -> str:
    return pair.replace("_", " – ")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
