"""Rows of block numbers that the executor reads in place."""

from __future__ import annotations

import numpy as np
import pytest

from kveik.cache.block_table import BlockTables
from tests.cache.making import admit, kv_cache, leave


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
    cache = kv_cache(windows=(None, 8))
    seen = list(cache.tables)
    row = admit(cache, 1, list(range(20))).row
    assert len(set(seen[0][row, :5].tolist())) == 5
    leave(cache, 1, 0)
    assert all(now is then for now, then in zip(cache.tables, seen, strict=True))
    assert not seen[0].any()


def test_rows_change_places_and_the_free_one_stays_clean() -> None:
    tables = BlockTables(2, rows=3, width=4)
    first, second = tables.take_row(), tables.take_row()
    for array in tables.arrays:
        array[first, :2], array[second, :3] = 5, 6
    tables.swap_rows(first, second, 3)
    assert [array[[first, second]].tolist() for array in tables.arrays] == [[[6, 6, 6, 0], [5, 5, 0, 0]]] * 2
    assert tables.free_rows == 1
    tables.swap_rows(second, 2, 2)
    assert [array[[second, 2]].tolist() for array in tables.arrays] == [[[0, 0, 0, 0], [5, 5, 0, 0]]] * 2
    assert tables.take_row() == second, "the row that became free is the one that is given"


def test_sequences_exchange_rows_and_a_free_row_can_be_taken() -> None:
    cache = kv_cache(windows=(None, 8))
    one, other = admit(cache, 1, list(range(20))).row, admit(cache, 2, list(range(100, 109))).row
    before = [table.copy() for table in cache.tables]
    cache.exchange_rows(one, other)
    assert (cache.row(1), cache.row(2)) == (other, one)
    cache.check()
    assert all((now[[one, other]] == then[[other, one]]).all() for now, then in zip(cache.tables, before, strict=True))
    free = next(row for row in range(cache.rows) if row not in (one, other))
    cache.exchange_rows(one, free)
    assert cache.row(2) == free
    cache.check()
    leave(cache, 1, 20)
    leave(cache, 2, 9)
    cache.check()
    assert not any(table.any() for table in cache.tables)
