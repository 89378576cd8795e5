"""The books of slots: one bound for all groups, nothing lost, nothing given twice, nothing taken from a reader."""

from __future__ import annotations

import random

import pytest

from kveik.offload.stores.record import RecordKey
from kveik.offload.stores.slots import PAGE_BYTES, Place, Slots, slot_bytes
from tests.offload.stores.records import key_of
from tests.seeds import over_seeds

SIZES = [PAGE_BYTES, 3 * PAGE_BYTES]


def put(slots: Slots, key: RecordKey) -> Place | None:
    place = slots.take(key, 100)
    if place is not None:
        slots.show(key, place)
    return place


@over_seeds(10)
def test_no_slot_is_lost_or_held_twice(seed: int) -> None:
    chance, slots, pinned = random.Random(seed), Slots(SIZES, 20 * PAGE_BYTES, lambda *_: chance.random() < 0.9), list[Place]()
    for _ in range(500):
        key, what = key_of(chance.randrange(12), chance.randrange(2)), chance.random()
        if what < 0.5:
            put(slots, key)
        elif what < 0.7:
            slots.remove(key)
        elif what < 0.85 and (place := slots.pin(key)):
            pinned.append(place)
        elif what < 0.9:
            slots.release_space()
        elif pinned:
            slots.unpin(pinned.pop(chance.randrange(len(pinned))))
        slots.check()
    for place in pinned:
        slots.unpin(place)
    slots.clear()
    slots.check()
    assert len(slots) == 0


def test_memory_moves_from_one_group_to_another_when_it_is_free() -> None:
    holes: list[tuple[int, int]] = []
    slots = Slots(SIZES, 6 * PAGE_BYTES, lambda group, slot, count: holes.append((group, slot)) is None)
    assert all(put(slots, key_of(number)) for number in range(6))
    assert put(slots, key_of(9, 1)) is None
    for number in (0, 2, 4):
        slots.remove(key_of(number))
    assert put(slots, key_of(9, 1)) is not None
    assert holes == [(0, 0), (0, 2), (0, 4)]
    assert slots.bytes == 6 * PAGE_BYTES


def test_memory_that_cannot_be_given_back_stays_within_its_group() -> None:
    slots = Slots(SIZES, 3 * PAGE_BYTES, lambda *_: False)
    put(slots, key_of(1))
    slots.remove(key_of(1))
    assert put(slots, key_of(2, 1)) is None
    assert put(slots, key_of(2)) is not None


def test_a_slot_that_is_read_is_not_given_to_another_record() -> None:
    slots = Slots(SIZES, PAGE_BYTES, lambda *_: True)
    first = put(slots, key_of(1))
    pinned = slots.pin(key_of(1))
    slots.remove(key_of(1))
    assert put(slots, key_of(2)) is None
    assert pinned is first
    slots.unpin(pinned)
    assert put(slots, key_of(2)) is not None


def test_a_record_takes_the_slot_of_the_one_that_it_replaces_where_there_is_no_other() -> None:
    slots = Slots(SIZES, PAGE_BYTES, lambda *_: True)
    assert put(slots, key_of(1)) is not None
    assert put(slots, key_of(1)) is not None
    assert len(slots) == 1


def test_records_from_before_leave_holes_between_them() -> None:
    slots = Slots(SIZES, 3 * PAGE_BYTES, lambda *_: True)
    assert slots.restore([(key_of(3, 1), Place(1, 0, 10)), (key_of(1), Place(0, 3, 10)), (key_of(2), Place(0, 1, 10))]) == [
        key_of(3, 1)
    ]
    slots.check()
    assert slots.bytes == 2 * PAGE_BYTES
    assert [key for key, _ in slots.items()] == [key_of(1), key_of(2)]
    place = put(slots, key_of(4))
    assert place is not None
    assert place.slot == 0


@pytest.mark.parametrize(("size", "pages"), [(1, 1), (4096, 1), (4097, 2), (372_736, 91)])
def test_slots_are_whole_pages(size: int, pages: int) -> None:
    assert slot_bytes(size) == pages * PAGE_BYTES
