"""A disk that is full is a smaller bound: what is forgotten makes room for what comes, and the bound is back with the space."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores.disk import PAUSE_SECONDS_MOST, DiskStore
from kveik.offload.stores.disk_files import SlotFiles
from kveik.offload.stores.record import Refusal
from tests.offload.stores.mounts import small_disk_at
from tests.offload.stores.records import FORMATS, key_of, pairs, payloads, read
from tests.offload.stores.test_disk import MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of two mebibytes."""
    with small_disk_at(tmp_path / "small", "2m") as folder:
        yield folder


def filled(store: DiskStore) -> list[int]:
    """Stored until it is full; which."""
    kept = []
    for number in range(1000):
        (refusal,) = store.put_many(pairs([number]))
        if refusal is not None:
            assert refusal is Refusal.FULL
            break
        kept.append(number)
    return kept


def test_a_full_disk_turns_over_and_its_index_has_room(small_disk: Path) -> None:
    clock = StepClock()
    store = DiskStore(small_disk / "kv", FORMATS, 64 * MIB, clock)
    bound = store.usable_bytes
    held = filled(store)
    assert 300 < len(held) < 512
    assert store.availability.reason == "the disk is full"
    assert store.usable_bytes < len(held) * 4096 < bound
    for number in range(1000, 4000):
        # As whoever decides what goes does: the oldest, until all fits the room and the next one too.
        while (len(held) + 1) * 4096 > store.usable_bytes:
            store.delete_many([key_of(held.pop(0))])
        assert store.put_many(pairs([number])) == [None]
        held.append(number)
        clock.advance(0.01)
    assert len(held) > 200
    assert read(store, held) == payloads(held)
    store.check()
    store.close()
    opened = DiskStore(small_disk / "kv", FORMATS, 64 * MIB, clock)
    assert read(opened, held) == payloads(held)
    opened.close()


def test_the_bound_follows_what_others_take_and_give_back(small_disk: Path) -> None:
    clock, other = StepClock(), small_disk / "other"
    store = DiskStore(small_disk / "kv", FORMATS, MIB, clock)
    bound = store.usable_bytes
    with pytest.raises(OSError, match="No space"):
        other.write_bytes(bytes(4 * MIB))
    os.truncate(other, other.stat().st_size - 200_000)
    held = filled(store)
    assert store.usable_bytes < bound
    assert store.availability.reason == "the disk is full"
    other.unlink()
    clock.advance(PAUSE_SECONDS_MOST)
    assert store.put_many(pairs([2000])) == [None]
    assert (store.usable_bytes, store.availability) == (bound, AVAILABLE)
    assert read(store, [*held, 2000]) == payloads([*held, 2000])
    store.close()


def test_a_quota_that_the_file_system_does_not_tell_of_is_tried_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, store = StepClock(), DiskStore(tmp_path, FORMATS, MIB, StepClock())
    store.close()
    store = DiskStore(tmp_path, FORMATS, MIB, clock)
    tried, plainly = list[int](), SlotFiles.write

    def write(files: SlotFiles, group: int, slot: int, record: memoryview) -> None:
        if slot >= 50:
            tried.append(int(clock.seconds))
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        plainly(files, group, slot, record)

    monkeypatch.setattr(SlotFiles, "write", write)
    held = filled(store)
    assert len(held) == 50
    for second in range(2000):
        clock.seconds = float(second)
        assert store.put_many(pairs([2000 + second])) == [Refusal.FULL]
    assert store.availability.reason == "the disk is full"
    assert len(tried) < 16
    assert read(store, held) == payloads(held)
    store.check()
    store.close()


def test_room_for_one_block_is_always_offered_so_that_somebody_asks_again(small_disk: Path) -> None:
    clock, other = StepClock(), small_disk / "other"
    store = DiskStore(small_disk / "kv", FORMATS, 64 * MIB, clock)
    with pytest.raises(OSError, match="No space"):
        other.write_bytes(bytes(4 * MIB))
    assert store.put_many(pairs([1])) == [Refusal.FULL]
    assert store.usable_bytes == 4096 + 12288 + 4096
    other.unlink()
    clock.advance(PAUSE_SECONDS_MOST)
    assert store.put_many(pairs([1])) == [None]
    assert store.usable_bytes > MIB
    assert store.availability == AVAILABLE
    store.close()
