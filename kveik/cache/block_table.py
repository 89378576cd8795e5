"""Which block holds which positions of a running sequence, as arrays that the executor reads without copying lists.

    tables[group]  int32 [rows, width]; one row per running sequence; entry b: positions [b * block_size, (b + 1) * block_size)

Entries behind a sequence's last block, or wholly outside its group's window, are 0 and mean nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """One array per group, and the rows that are free."""

    def __init__(self, groups: int, rows: int, width: int) -> None:
        self.arrays: list[NDArray[np.int32]] = [np.zeros((rows, width), dtype=np.int32) for _ in range(groups)]
        self.rows = rows
        self._free = dict.fromkeys(reversed(range(rows)))

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def take_row(self) -> int:
        """A row of zeros that nobody uses. There is one."""
        assert self._free, "no row is left"
        return self._free.popitem()[0]

    def give_back_row(self, row: int, width: int) -> None:
        """The row's first `width` entries may be set; they are cleared."""
        for array in self.arrays:
            array[row, :width] = 0
        self._free[row] = None

    def swap_rows(self, one: int, other: int, width: int) -> None:
        """Exchange the first `width` entries of two rows, behind which both are zeros; a free row stays zeros elsewhere."""
        for array in self.arrays:
            kept = array[one, :width].copy()
            array[one, :width] = array[other, :width]
            array[other, :width] = kept
        if (one in self._free) != (other in self._free):
            freed, taken = (one, other) if other in self._free else (other, one)
            del self._free[taken]
            self._free[freed] = None
