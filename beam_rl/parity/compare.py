"""Two sides' records of the same tokens: how far they are apart at each sub-layer, and where that begins.

Pure functions of arrays. Nothing is swallowed: a value that is not finite is an infinite error.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beam_rl.parity.record import AFTER, BEFORE, LAYER, MARGIN, Place, Records

GAIN = 4.0  # how much a sub-layer may enlarge its inputs' relative error before it counts as its own
# Computed in FP32 and rounded once, or not at all, whatever the activations' precision: from equal inputs the sides differ
# only where FP32 sums of another order fall on the other side of a rounding, some 1 in 10⁴ numbers (error 3e-5 in BF16).
# A wrong place to round changes every second number (1e-3).
EXACT = {"input_norm", "post_attention_norm", "residual_attention", "pre_mlp_norm", "router_logits", "experts"}
EXACT |= {"post_mlp_norm", "residual_mlp", "final_norm"}
EXACT_BOUND = 3e-4
TIE_ROUNDING = 4e-6  # of FP32 sums of a score, a correction bias of up to 16, and another such sum
PAIRS = ("trainer_reference", "engine_reference", "trainer_engine")  # a tie for the first departure goes to the left

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Side:
    """One side's view of the sequences, end to end."""

    records: Records
    logp: Array  # (response tokens,) natural-log probabilities of the sampled tokens


@dataclass(frozen=True)
class Gap:
    """|Δlogp| over the response tokens, nats."""

    mean: float
    max: float


@dataclass(frozen=True)
class Departure:
    pair: str
    layer: int | None
    sublayer: str
    error: float  # relative; for `log_probabilities` named by the bound on their mean: that mean, in nats


@dataclass(frozen=True)
class Comparison:
    """What the pairs say, and the verdict."""

    gaps: dict[str, Gap]
    errors: dict[str, dict[Place, float]]  # by pair, in the order of computation
    departures: dict[str, Departure | None]  # by pair: the first sub-layer whose inputs don't explain its error
    unseen: dict[str, list[str]]  # by side: sub-layers that it doesn't show, as kernels do that fuse several
    route_agreement: float | None  # None: of no pair of routers known
    sublayer_bound: float
    logprob_mean_bound: float

    @property
    def first_departure(self) -> Departure | None:
        """The earliest of the pairs'."""
        found = [d for pair in PAIRS if (d := self.departures.get(pair))]
        order = self._places()
        return min(found, key=lambda d: order.index((d.layer, d.sublayer)), default=None)

    @property
    def alone(self) -> str | None:
        """The side that exactly two pairs have in common which depart where the first one does.

        Where a side doesn't show that place, its pairs depart where all sides show what is made of it.
        """
        common = [place for place in self._places() if all(place in errors for errors in self.errors.values())]
        first = self.first_departure
        found = {pair: comes_out((d.layer, d.sublayer), common) for pair, d in self.departures.items() if d}
        there = [pair for pair, place in found.items() if first and place == found[first.pair]]
        if len(there) != 2:
            return None
        return (set(there[0].split("_")) & set(there[1].split("_"))).pop()

    def _places(self) -> list[Place]:
        """All that any pair compared or departs at, in the order of computation."""
        places = {place for errors in self.errors.values() for place in errors}
        return ordered(places | {(d.layer, d.sublayer) for d in self.departures.values() if d})

    @property
    def within_bounds(self) -> bool:
        return not any(self.departures.values())

    def record(self) -> dict[str, object]:
        """The object that `beam-rl parity --json` prints; null: a number that is not finite, or that nobody measured."""
        first = self.first_departure
        return {
            "pairs": {pair: {"mean": _number(gap.mean), "max": _number(gap.max)} for pair, gap in self.gaps.items()},
            "route_agreement": _number(self.route_agreement),
            "first_departure": first and {**vars(first), "error": _number(first.error)},
            "unseen": self.unseen,
            "within_bounds": self.within_bounds,
        }


def compare(
    sides: Mapping[str, Side], *, replayed: bool, sublayer_bound: float, logprob_mean_bound: float
) -> Comparison:
    """Judges every pair of `PAIRS` whose two sides are there.

    Args:
        sides: by name: "reference" (always), "trainer", "engine"; the same tokens in the same order.
        replayed: all sides used the same experts, whatever their routers would have chosen.
        sublayer_bound: on the relative error that a sub-layer adds. logprob_mean_bound: on the mean |Δlogp|, nats.
    """
    reference = sides["reference"].records
    gaps, errors, departures = {}, {}, {}
    for pair in PAIRS:
        a, b = (sides.get(name) for name in pair.split("_"))
        if a is None or b is None:
            continue
        gaps[pair] = gap(a.logp, b.logp)
        errors[pair], explained = sublayer_errors(a.records, b.records, reference, replayed)
        departures[pair] = first_departure(pair, errors[pair], explained, sublayer_bound)
        if departures[pair] is None and not gaps[pair].mean <= logprob_mean_bound:
            departures[pair] = Departure(pair, None, "log_probabilities", gaps[pair].mean)
    most_wanted = list(gaps)[-1].split("_")  # trainer and engine, where both are there
    agreement = route_agreement(*(sides[name].records for name in most_wanted))
    return Comparison(gaps, errors, departures, unseen(sides), agreement, sublayer_bound, logprob_mean_bound)


def unseen(sides: Mapping[str, Side]) -> dict[str, list[str]]:
    """The sub-layers that a side lacks in some layer and another side has, in the order of computation; {} if all agree."""
    everywhere = {place for side in sides.values() for place in side.records}
    missing = {name: {sublayer for _, sublayer in everywhere - s.records.keys()} for name, s in sides.items()}
    by_side = {name: [n for n in (*BEFORE, *LAYER, *AFTER) if n in there] for name, there in missing.items()}
    return {name: sublayers for name, sublayers in by_side.items() if sublayers}


def gap(logp_a: Array, logp_b: Array) -> Gap:
    """NaN where a log-probability is NaN."""
    distance = np.abs(logp_a.astype(np.float64) - logp_b.astype(np.float64))
    return Gap(float(distance.mean()), float(distance.max()))


def relative_error(value: Array, base: Array) -> float:
    """‖value − base‖ / ‖base‖ over all tokens; 0 where both are 0, infinite where anything is not finite."""
    difference = float(np.linalg.norm(value.astype(np.float64) - base.astype(np.float64)))
    norm = float(np.linalg.norm(base.astype(np.float64)))
    if not math.isfinite(difference):
        return math.inf
    return 0.0 if difference == 0 else difference / norm if norm else math.inf


def sublayer_errors(
    a: Records, b: Records, reference: Records, replayed: bool
) -> tuple[dict[Place, float], dict[Place, float]]:
    """The relative error of `a` to `b` at each place both have, and what a place passes on to those that use it.

    The two differ for the choice of experts: a choice that was as good as tied is no error of the router. Where every
    side replays the same choice it does no harm later; where they route freely, it explains the experts' outputs.
    """
    errors: dict[Place, float] = {}
    passed_on: dict[Place, float] = {}
    for place in ordered(a.keys() & b.keys()):
        layer, sublayer = place
        errors[place] = passed_on[place] = relative_error(a[place], b[place])
        if sublayer == "experts" and (layer, MARGIN) in reference:
            judged = ~(different_sets(a[place], b[place]) & tied(layer, a, b, reference))
            errors[place] = relative_error(a[place][judged], b[place][judged])
            if replayed:
                passed_on[place] = errors[place]
    return errors, passed_on


def different_sets(a: Array, b: Array) -> NDArray[np.bool_]:
    """(tokens,) whether the experts with a weight are not the same."""
    return ((a != 0) != (b != 0)).any(axis=1)


def tied(layer: int | None, a: Records, b: Records, reference: Records) -> NDArray[np.bool_]:
    """(tokens,) whether the sides' difference in the router's logits, judged on its own, explains another choice.

    A logit's change d moves a score by at most d/4, hence the distance of two experts by d/2, of two groups by d.
    """
    place = (layer, "router_logits")
    moved = sum(np.abs(side[place] - reference[place]).max(axis=1) for side in (a, b))
    return reference[layer, MARGIN][:, 0] <= moved + TIE_ROUNDING


def route_agreement(a: Records, b: Records) -> float | None:
    """Share of (token, sparse layer) pairs whose two routers, left alone, choose the same experts; None without any."""
    places = [place for place in a.keys() & b.keys() if place[1] == "experts"]
    same = [~different_sets(a[place], b[place]) for place in places]
    return float(np.mean(same)) if same else None


def ordered(places: Sequence[Place] | set[Place]) -> list[Place]:
    """In the order of computation."""
    layers = sorted({layer for layer, _ in places if layer is not None})
    everything: list[Place] = [(None, name) for name in BEFORE]
    everything += [(layer, name) for layer in layers for name in LAYER]
    everything += [(None, name) for name in AFTER]
    there = set(places)
    return [place for place in everything if place in there]


def first_departure(
    pair: str, errors: Mapping[Place, float], passed_on: Mapping[Place, float], bound: float
) -> Departure | None:
    """The first place whose error exceeds `bound` by more than its inputs' errors, times `GAIN`, explain."""
    for (layer, sublayer), error in errors.items():
        explained = GAIN * max((passed_on[p] for p in _known_inputs((layer, sublayer), passed_on)), default=0.0)
        allowed = min(bound, EXACT_BOUND) if sublayer in EXACT else bound
        if error > allowed + explained:
            return Departure(pair, layer, sublayer, error)
    return None


def comes_out(place: Place, known: Sequence[Place]) -> Place:
    """The first of the known places that is computed from this one, itself if it is known."""
    return next((later for later in known if place == later or place in _hidden_inputs(later, known)), place)


def _hidden_inputs(place: Place, known: Sequence[Place]) -> Iterator[Place]:
    """What a place is computed from and is not known, back to what is."""
    for before in inputs(place, known):
        if before not in known:
            yield before
            yield from _hidden_inputs(before, known)


def _known_inputs(place: Place, known: Mapping[Place, float]) -> Iterator[Place]:
    """The recorded values that a place is computed from; where one is missing, those that it is computed from."""
    for before in inputs(place, known):
        if before in known:
            yield before
        else:
            yield from _known_inputs(before, known)


def inputs(place: Place, known: Collection[Place]) -> list[Place]:
    """What a sub-layer reads, in a sparse layer. known: places of which some are in the model's last layer."""
    layer, name = place
    if layer is None:
        last = max((n for n, _ in known if n is not None), default=None)
        before: dict[str, list[Place]] = {
            "embedding": [],
            "final_norm": [(None, "embedding") if last is None else (last, "residual_mlp")],
            "logits": [(None, "final_norm")],
            "log_probabilities": [(None, "logits")],
        }
        return before[name]
    stream: Place = (layer - 1, "residual_mlp") if layer else (None, "embedding")
    here: dict[str, tuple[str, ...]] = {
        "q": ("input_norm",),
        "k": ("input_norm",),
        "v": ("input_norm",),
        "attention": ("q", "k", "v"),
        "gate": ("input_norm",),
        "attention_out": ("attention", "gate"),
        "post_attention_norm": ("attention_out",),
        "residual_attention": ("post_attention_norm",),
        "pre_mlp_norm": ("residual_attention",),
        "router_logits": ("pre_mlp_norm",),
        "experts": ("router_logits",),
        "mlp": ("pre_mlp_norm", "experts"),
        "post_mlp_norm": ("mlp",),
        "residual_mlp": ("post_mlp_norm", "residual_attention"),
    }
    found: list[Place] = [(layer, other) for other in here.get(name, ())]
    return found + [stream] if name in ("input_norm", "residual_attention") else found


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
