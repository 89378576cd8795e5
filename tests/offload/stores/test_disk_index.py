"""An index of any length is read within its bound: what is torn costs its own record, and what is too much is not read."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.errors import Unreachable
from kveik.observe.events import TierState
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores import disk_index
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_index import DiskIndex, index_bytes
from kveik.offload.stores.disk_offline import store_at
from kveik.offload.stores.slots import Place
from tests.offload.stores.records import FORMATS, key_of, pairs, payloads, read
from tests.offload.stores.test_disk import MIB, scanned


def filled(folder: Path, records: int = 10) -> Path:
    """A closed store with so many records; its index."""
    store = DiskStore(folder, FORMATS, 4 * MIB, StepClock())
    assert store.put_many(pairs(range(records))) == [None] * records
    store.close()
    return folder / "index"


@pytest.mark.parametrize("torn", [1, 10, 63])
def test_an_index_that_ends_in_half_an_entry_costs_that_record_and_goes_on(tmp_path: Path, torn: int) -> None:
    index = filled(tmp_path)
    os.truncate(index, index.stat().st_size - torn)
    clock, expected = StepClock(), 9
    for start in range(3):
        store = DiskStore(tmp_path, FORMATS, 4 * MIB, clock)
        assert (store.records, store.availability) == (expected, AVAILABLE)
        for number in range(100 + 10 * start, 104 + 10 * start):
            assert store.put_many(pairs([number])) == [None]
            assert store.availability == AVAILABLE
        expected += 4
        assert read(store, [*range(9), 100]) == payloads([*range(9), 100])
        store.close()
        assert index.stat().st_size % 64 == 0


@pytest.mark.parametrize("rubbish", [1, 100, 4096 + 7])
def test_an_index_with_something_behind_its_entries_costs_nothing(tmp_path: Path, rubbish: int) -> None:
    index = filled(tmp_path)
    with index.open("ab") as file:
        file.write(random.Random(1).randbytes(rubbish))
    for expected in (10, 11):
        store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
        assert store.records == expected
        assert store.put_many(pairs([20 + expected])) == [None]
        assert store.availability == AVAILABLE
        store.close()


def test_an_index_that_ends_in_the_padding_of_its_head_is_an_empty_one(tmp_path: Path) -> None:
    index = filled(tmp_path)
    opened = DiskIndex(index, MIB)
    written, start = 24 + len(opened.description or b""), opened._start
    opened.close()
    assert written < start - 1
    for size in (written, start - 1):
        os.truncate(index, size)
        for expected in (0, 1):
            store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
            assert (store.records, store.availability) == (expected, AVAILABLE)
            assert store.put_many(pairs([7])) == [None]
            store.close()


@pytest.mark.parametrize("size", [3 << 30, 200 << 30])
def test_an_index_made_longer_loses_nothing_and_is_not_read(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    index, taken = filled(tmp_path), list[int]()
    os.truncate(index, size)
    plainly = disk_index._read
    monkeypatch.setattr(disk_index, "_read", lambda fd, start, count: taken.append(count) or plainly(fd, start, count))
    found = store_at(tmp_path, StepClock(), read_only=True)
    assert read(found, range(10)) == payloads(range(10))
    found.close()
    assert index.stat().st_size == size
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    assert sum(taken) < MIB
    assert (store.records, store.availability) == (10, AVAILABLE)
    assert store.put_many(pairs([20])) == [None]
    assert index.stat().st_size < MIB
    assert scanned(tmp_path) == store.bytes_used <= 4 * MIB
    store.close()


def test_of_an_index_that_is_longer_than_its_bound_the_latest_part_is_read(tmp_path: Path) -> None:
    index = filled(tmp_path, 4)
    with index.open("ab") as file:
        for _ in range(8):
            file.write(random.Random(2).randbytes(MIB))
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    bound = index_bytes(4 * MIB // 4096)
    assert (store.records, store.availability) == (0, AVAILABLE)
    assert index.stat().st_size < bound
    assert store.put_many(pairs(range(300))) == [None] * 300
    store.close()
    written = index.read_bytes()
    with index.open("wb") as file:
        file.write(written[: len(written) - 300 * 64] + bytes(8 * MIB) + written[len(written) - 300 * 64 :])
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    assert read(store, range(300)) == payloads(range(300))
    store.close()


def test_who_looks_at_an_index_that_nobody_can_have_written_is_told_that_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled(tmp_path)
    monkeypatch.setattr("kveik.offload.stores.disk_offline.INDEX_BYTES_MOST", 64 * 8)
    with pytest.raises(Unreachable, match="damaged"):
        store_at(tmp_path, StepClock(), read_only=True)
    assert index.stat().st_size > 64 * 8


def test_too_little_memory_for_an_index_is_trouble_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    clock = StepClock()
    with monkeypatch.context() as short:
        short.setattr(DiskIndex, "places", lambda index: bytes(1 << 60))
        store = DiskStore(tmp_path, FORMATS, 4 * MIB, clock)
        assert store.availability.reason == "there is not enough memory for the index"
        assert store.availability.state is TierState.UNAVAILABLE
        assert store.put_many(pairs([1])) != [None]
    clock.advance(400.0)
    assert store.put_many(pairs([20])) == [None]
    assert store.records == 11
    assert read(store, [*range(10), 20]) == payloads([*range(10), 20])
    store.close()


def test_an_index_of_several_pieces_is_read_whole(tmp_path: Path) -> None:
    index = DiskIndex(tmp_path / "index", 1 << 30)
    index.begin(b"what it is of")
    count = disk_index._PIECE_BYTES // 64 + 100
    place = Place(0, 1, 10)
    keys = [key_of(number) for number in range(count)]
    index.change([(key, place) for key in keys], [])
    assert list(index.places()) == keys
    index.close()
