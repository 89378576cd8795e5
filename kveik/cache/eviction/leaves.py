"""Leaves: segments behind which nothing is stored, and the one that is worth least of a random few. Arrays beside objects.

segments   a   b   c   d   e        place 0 … 4; the last one fills a gap
touched    7.0 3.0 9.0 9.0 4.0      as the segments say themselves: here so that one draw is a few operations on arrays
row        15  0   15  780 0        kind · AGES, where a segment's kind begins in a table [KINDS, AGES]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kveik.cache.eviction.policy import Chance
from kveik.cache.eviction.reuse import AGES, OLD, bucket
from kveik.cache.eviction.segments import Segment

_BUCKETS = np.array([bucket(float(second)) for second in range(int(OLD) + 1)], dtype=np.intp)
"""Of ages in whole seconds; all that are older have the last one's."""


class Leaves:
    """Adding, removing and changing are O(1), a draw is O(samples)."""

    def __init__(self, chance: Chance, samples: int) -> None:
        # Many numbers at a time, from the seed that was given.
        self._random = np.random.Generator(np.random.SFC64(int(chance.random() * (1 << 53)))).random
        self._samples = samples
        self._segments: list[Segment] = []
        self._touched = np.zeros(samples)
        self._row = np.zeros(samples, dtype=np.intp)
        self._order = np.zeros(samples, dtype=np.complex128)
        """Worth and time of latest use of those that are looked at: complex numbers are ordered by their first part first."""

    def add(self, segment: Segment) -> None:
        place = segment.place = len(self._segments)
        self._segments.append(segment)
        if place == len(self._row):
            self._touched = np.concatenate([self._touched, np.zeros_like(self._touched)])
            self._row = np.concatenate([self._row, np.zeros_like(self._row)])
        self.changed(segment)

    def changed(self, segment: Segment) -> None:
        """It is a leaf, and has another history than before."""
        place = segment.place
        self._touched[place] = segment.touched
        self._row[place] = segment.kind * AGES

    def remove(self, segment: Segment) -> None:
        place = segment.place
        end = self._segments.pop()
        if end is not segment:
            self._segments[place] = end
            end.place = place
            last = len(self._segments)
            self._touched[place] = self._touched[last]
            self._row[place] = self._row[last]
        segment.place = -1

    def least(self, index: NDArray[np.float64], now: float) -> Segment | None:
        """The least valuable of a sample, by an index [KINDS · AGES]; among equals the one touched longest ago."""
        count = len(self._segments)
        if count == 0:
            return None
        if count <= self._samples:
            places, touched, row = None, self._touched[:count], self._row[:count]
        else:
            places = (self._random(self._samples) * count).astype(np.intp)
            touched, row = self._touched.take(places), self._row.take(places)
        order = self._order[: len(row)]
        order.real = index.take(row + _BUCKETS.take((now - touched).astype(np.intp), mode="clip"))
        order.imag = touched
        place = int(order.argmin())
        return self._segments[place if places is None else places[place]]

    def check(self) -> None:
        """What is here is what the segments say. Raises AssertionError."""
        for place, segment in enumerate(self._segments):
            assert segment.place == place, "a leaf has another's place"
            assert self._touched[place] == segment.touched, "a leaf was used since"
            assert self._row[place] == segment.kind * AGES, "a leaf's kind has changed"
