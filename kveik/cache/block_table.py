"""Block tables of the running sequences, as arrays that an executor reads without copying lists.

    tables[group]  int32 [rows, width]; one row per running sequence; entry b: positions [b * block_size, (b + 1) * block_size)

Entries behind a sequence's last block, or wholly outside its group's window, are 0 and mean nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class TableView:
    """The first rows of all tables as one plan saw them. In this process a view with a version; pickled, a copy of its own."""

    __slots__ = ("_arrays", "_owner", "_width", "version")

    def __init__(
        self,
        arrays: tuple[NDArray[np.int32], ...] = (),
        version: int = 0,
        width: int = 0,
        owner: BlockTables | None = None,
    ) -> None:
        """`width`: entries of a row that are in use at most."""
        self._arrays = arrays
        self.version = version
        self._width = width
        self._owner = owner

    def read(self) -> tuple[NDArray[np.int32], ...]:
        """Per group, int32 [rows, width]. Raises AssertionError where a later plan has changed the tables since."""
        assert self._owner is None or self._owner.version == self.version, "the block tables belong to a later plan"
        return self._arrays

    def __reduce__(self) -> tuple[type[TableView], tuple[object, ...]]:
        used = tuple(np.ascontiguousarray(array[:, : self._width]) for array in self.read())
        return TableView, (used, self.version, self._width)


class BlockTables:
    """One array per group, and the rows that are free."""

    def __init__(self, groups: int, rows: int, width: int) -> None:
        self.arrays: list[NDArray[np.int32]] = [np.zeros((rows, width), dtype=np.int32) for _ in range(groups)]
        self.rows = rows
        self.version = 0
        """Which plan the tables are for: views of earlier ones are stale."""

        self._free = dict.fromkeys(reversed(range(rows)))

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def view(self, rows: int, width: int) -> TableView:
        """The first `rows` rows, of which `width` entries are in use at most; valid until the next plan is begun."""
        return TableView(tuple(array[:rows] for array in self.arrays), self.version, width, self)

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
