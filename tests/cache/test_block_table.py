"""Rows of block numbers that the executor reads in place."""

from __future__ import annotations

import numpy as np
import pytest

from kveik.cache.block_table import BlockTables
from tests.cache.making import admit, leave, ledger


def test_a_row_is_updated_in_place_and_clean_when_it_is_used_again() -> None:
    tables = BlockTables(2, rows=1, width=4)
    seen = tables.arrays[1]
    row = tables.take_row()
    seen[row, :3] = 7
    tables.give_back_row(row, 3)
    assert tables.take_row() == row
    assert tables.arrays[1] is seen
    assert not seen.any()
    assert seen.dtype == np.int32


def test_no_more_rows_are_given_than_there_are() -> None:
    tables = BlockTables(1, rows=2, width=1)
    assert {tables.take_row(), tables.take_row()} == {0, 1}
    with pytest.raises(AssertionError, match="no row"):
        tables.take_row()


def test_the_ledger_never_replaces_the_arrays_that_the_executor_holds() -> None:
    cache = ledger(windows=(None, 8))
    seen = list(cache.tables)
    row = admit(cache, 1, list(range(20))).row
    assert len(set(seen[0][row, :5].tolist())) == 5
    leave(cache, 1, 0)
    assert all(now is then for now, then in zip(cache.tables, seen, strict=True))
    assert not seen[0].any()
