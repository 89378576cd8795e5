"""Counts of values by size, many values at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

_FEW = 8
"""Up to this many values, a loop is faster than numpy."""


class Histogram:
    """Prometheus's histogram: a value belongs to the first bucket whose bound it does not exceed."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: ascending, without infinity."""
        assert list(bounds) == sorted(set(bounds))
        self._bounds = tuple(bounds)
        self._edges = np.array(bounds, dtype=np.float64)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        if len(values) <= _FEW:
            for value in values:
                self.observe(value)
            return
        array = np.asarray(values, dtype=np.float64)
        added = np.bincount(np.searchsorted(self._edges, array), minlength=len(self._counts))
        self._counts = [count + more for count, more in zip(self._counts, added.tolist(), strict=True)]
        self._sum += float(array.sum())

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def sum(self) -> float:
        return self._sum

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Returns (bound, number of values up to it), with +Inf as last bound, as the exposition format has them."""
        reached = np.cumsum(self._counts).tolist()
        names = [str(float(bound)) for bound in self._bounds] + ["+Inf"]
        return list(zip(names, reached, strict=True))
