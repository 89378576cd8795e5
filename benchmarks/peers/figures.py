"""Figures of measurement rounds: medians, and ratios between engines that were measured in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.peers.kveik_side import NAME as OURS
from benchmarks.peers.workload import COLUMNS

Rates = Mapping[str, Sequence[float]]
"""Engine -> tokens per second, one for each round it took part in, from the first on."""

ASKED: dict[str, dict[str, float]] = {
    "smollm2-135m": dict(zip(COLUMNS, (2.0, 1.2, 1.8, 1.8, 2.2), strict=True)),
    "qwen2.5-coder-1.5b": dict(zip(COLUMNS, (1.5, 1.05, 1.3, 1.3, 1.2), strict=True)),
    "qwen2.5-coder-0.5b": dict(zip(COLUMNS, (3.0, 1.3, 2.0, 2.0, 2.0), strict=True)),
}
"""How many times as fast as the best peer of a column kveik is to be."""

HOPELESS = 0.7
"""A peer below this share of the best one in the first round is not measured again: it cannot become the best."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast as the best peer we are in a column."""

    best: str
    """The peer with the highest median."""

    median: float
    """Of the rounds' ratios, each of two figures taken one after the other."""

    low: float
    high: float


def ratio_to_best(rates: Rates) -> Ratio | None:
    """None where no peer, or not we, have a figure."""
    peers = {name: median(rounds) for name, rounds in rates.items() if name != OURS and rounds}
    ours = rates.get(OURS, ())
    if not peers or not ours:
        return None
    best = max(peers, key=lambda name: peers[name])
    # A peer that fell out on the way has fewer rounds than we do.
    ratios = [mine / other for mine, other in zip(ours, rates[best], strict=False)]
    return Ratio(best, median(ratios), min(ratios), max(ratios))


def hopeless(rates: Rates) -> set[str]:
    """Peers that need not be measured again."""
    firsts = {name: rounds[0] for name, rounds in rates.items() if name != OURS and rounds}
    best = max(firsts.values(), default=0.0)
    return {name for name, rate in firsts.items() if rate < HOPELESS * best}
