"""A disk's folder keeps its bound whatever was there before, and is left as it was by whoever only looks at it."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.errors import DoesNotFit
from kveik.tiers.disk import DiskStore
from tests.tiers.records import FORMATS, key_of, pairs, payloads, read
from tests.tiers.test_disk import MIB, scanned


def test_slots_of_a_model_with_more_groups_are_removed(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMATS, 8 * MIB, StepClock())
    store.put_many(pairs(range(300), 1))
    store.close()
    (tmp_path / "records-of-mine").write_text("mine")
    opened = DiskStore(tmp_path, FORMATS[:1], MIB, StepClock())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["index", "lock", "records-0", "records-of-mine"]
    opened.put_many(pairs(range(300)))
    assert opened.records == opened.room_bytes // 4096
    assert scanned(tmp_path) - 4096 == opened.bytes_used <= MIB
    opened.close()


@pytest.mark.parametrize(("size", "kept"), [(100_000, True), (20 * MIB, False)])
def test_a_damaged_index_is_kept_as_far_as_the_bound_goes(tmp_path: Path, size: int, kept: bool) -> None:
    for _ in range(2):
        store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
        store.close()
        (tmp_path / "index").write_bytes(random.Random(1).randbytes(size))
        store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
        assert (tmp_path / "index.damaged").exists() == kept
        for start in range(0, 1000, 100):
            store.put_many(pairs(range(start, start + 100)))
        assert store.bytes_used == scanned(tmp_path) <= 4 * MIB
        store.close()


def test_a_damaged_index_goes_when_the_bound_becomes_too_small_for_it(tmp_path: Path) -> None:
    DiskStore(tmp_path, FORMATS, 64 * MIB, StepClock()).close()
    (tmp_path / "index").write_bytes(random.Random(1).randbytes(MIB))
    DiskStore(tmp_path, FORMATS, 64 * MIB, StepClock()).close()
    assert (tmp_path / "index.damaged").exists()
    store = DiskStore(tmp_path, FORMATS, MIB, StepClock())
    store.put_many(pairs(range(300)))
    assert store.bytes_used == scanned(tmp_path) <= MIB
    store.close()


@pytest.mark.parametrize("capacity", [1, 4096, 512 * 1024])
def test_a_bound_that_holds_no_block_is_refused_with_the_least_that_works(tmp_path: Path, capacity: int) -> None:
    with pytest.raises(DoesNotFit, match=rf"--kv-disk-bytes {capacity} .* at least \d+ would work") as refused:
        DiskStore(tmp_path / "kv", FORMATS, capacity, StepClock())
    assert not (tmp_path / "kv").exists()
    [least] = re.findall(r"at least (\d+)", refused.value.message)
    with pytest.raises(DoesNotFit):
        DiskStore(tmp_path / "kv", FORMATS, int(least) - 1, StepClock())
    store = DiskStore(tmp_path / "kv", FORMATS, int(least), StepClock())
    for group in range(3):
        assert store.put_many(pairs([1], group)) == [None]
        assert store.probe_many([key_of(1, group)], 0.0) == [True]
        assert read(store, [1], group) == payloads([1], group)
    assert scanned(tmp_path / "kv") <= int(least)
    store.close()
