"""top_p over a wide distribution: finds the edge of the nucleus and the drawn token by mass, sorting only where they fall.

    bins   | likeliest |  …  | edge |  …  |        tokens by value, evenly wide in log-probability
                          ↑      ↑
                          drawn  the nucleus ends inside this bin

Which token comes out is what sorting the whole row would give: within the two bins the order is that of `tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kveik.sample.tiles import Floats, Ints, in_order

_BINS = 4096
_SPAN = 24.0
"""Log-probabilities below the likeliest that the bins cover. What lies deeper, e^-24 each, shares the last bin."""


def draw_wide(values: Floats, temperature: float, top_p: float, chance: float) -> int:
    """The token drawn from the smallest set, by rank, that holds top_p of the mass.

    values: float32 [real], with a finite peak; chance: in [0, 1).
    """
    logs = (values - values.max()) / np.float32(temperature)
    weights = np.exp(logs)
    bins = np.minimum(logs * np.float32(-_BINS / _SPAN), _BINS - 1).astype(np.int64)
    sums = np.cumsum(np.bincount(bins, weights, minlength=_BINS), dtype=np.float64)
    edge = _Bin.reaching(top_p * sums[-1], sums, bins, values, weights)
    last = edge.first(edge.target, side="left")
    drawn = _Bin.reaching(chance * edge.sums[last], sums, bins, values, weights)
    return int(drawn.ids[drawn.first(drawn.target, side="right")])


@dataclass(frozen=True, slots=True)
class _Bin:
    """The bin in which a mass, counted from the likeliest token on, is reached."""

    place: int
    target: float
    ids: Ints
    """Its tokens, in order"""

    sums: NDArray[np.float64]
    """Mass from the likeliest token of all up to each of them"""

    @classmethod
    def reaching(cls, target: float, sums: NDArray[np.float64], bins: Ints, values: Floats, weights: Floats) -> _Bin:
        """sums [bins]: cumulative masses; bins, values, weights: one entry per token."""
        # The last bins may be empty; rounding must not lead there.
        place = min(int(np.searchsorted(sums, target)), int(np.searchsorted(sums, sums[-1])))
        members = np.flatnonzero(bins == place)
        ids = in_order(values[members], members)
        before = sums[place - 1] if place else 0.0
        return cls(place, target, ids, before + np.cumsum(weights[ids], dtype=np.float64))

    def first(self, target: float, *, side: Literal["left", "right"]) -> int:
        """The first token that reaches (left) or exceeds (right) the mass; never one without weight."""
        weighty = int(np.searchsorted(self.sums, self.sums[-1]))
        return min(int(np.searchsorted(self.sums, target, side=side)), weighty)
