"""Arena for packed weights: large pieces that lie on huge pages from the first write on.

Moving weights there afterwards takes longer than packing them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kveik.machine.address_space import address_space

ALIGNMENT = 64
"""Bytes: one cache line, one vector."""

CHUNK = 256 << 20
"""Address space that is reserved at once. Pages never written take no memory."""


class Arena:
    """Gives out pieces one behind another; a chunk lives as long as any piece of it."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """uint8 [size], zeros, its first byte at the beginning of a cache line."""
        first = -(-self._used // ALIGNMENT) * ALIGNMENT
        if first + size > len(self._chunk):
            self._chunk, first = _pages(max(size, CHUNK)), 0
        self._used = first + size
        return self._chunk[first : first + size]


def _pages(size: int) -> NDArray[np.uint8]:
    return np.frombuffer(address_space(size, "weights", "a smaller model needs less", huge=True), np.uint8)
