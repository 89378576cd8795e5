"""Whether a record that the tier above gives up is worth writing into a tier that is full.

It is if it is worth clearly more than what the tier has been giving up lately: most records are used once, and writing them
costs endurance and time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

FACTOR = 1.5
"""How much more than the mean of recent victims an offered record must be worth. 1: at least as much; 2: for worn drives."""

REMEMBERED = 256
"""Victims over which the mean runs."""


class WriteFilter:
    """Knows what recent victims were worth, and nothing else."""

    def __init__(self, factor: float = FACTOR) -> None:
        self.factor = factor
        self._mean = 0.0
        self._seen = 0

    @property
    def least(self) -> float:
        """What a record must be worth."""
        return self.factor * self._mean

    def gave_up(self, worths: Iterable[float]) -> None:
        """What the tier gave up was worth so much. What nobody knows the worth of says nothing."""
        for worth in worths:
            if math.isfinite(worth):
                self._seen = min(self._seen + 1, REMEMBERED)
                self._mean += (worth - self._mean) / self._seen
