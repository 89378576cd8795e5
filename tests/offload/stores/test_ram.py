"""The tier in RAM is a dictionary with a bound."""

from __future__ import annotations

import random
import threading

import pytest

from kveik.clock import StepClock
from kveik.errors import DoesNotFit
from kveik.offload.stores.ram import RamStore
from kveik.offload.stores.record import Miss, RecordKey, Refusal
from kveik.offload.stores.store import verify
from tests.offload.stores.records import FORMATS, key_of, pairs, payloads, read, record_of
from tests.seeds import over_seeds

PAGE = 4096


def store_of(pages: int, clock: StepClock | None = None) -> RamStore:
    return RamStore(FORMATS, pages * PAGE, clock or StepClock())


@over_seeds(10)
def test_it_holds_what_a_dictionary_would(seed: int) -> None:
    chance, store, model = random.Random(seed), store_of(25), dict[RecordKey, int]()
    for _ in range(300):
        number, group = chance.randrange(30), chance.randrange(3)
        key = key_of(number, group)
        if chance.random() < 0.6:
            [refusal] = store.put_many(pairs([number], group))
            room = store.capacity_bytes - sum(store.cost_bytes(held.group) for held in model if held != key)
            assert (refusal is None) == (store.cost_bytes(group) <= room)
            if refusal is None:
                model[key] = number
            else:
                # A record that is to be replaced makes room, and stays away if that is not enough; here it always is.
                assert refusal is Refusal.FULL
                assert key not in model
        elif chance.random() < 0.7:
            store.delete_many([key])
            model.pop(key, None)
        for held, value in model.items():
            assert read(store, [value], held.group) == payloads([value], held.group)
        assert dict(store.contents()) == {held: store.cost_bytes(held.group) for held in model}
        assert store.records == len(model)
        store.check()
    store.close()


def test_more_memory_than_the_system_gives_is_refused_with_the_knob() -> None:
    with pytest.raises(DoesNotFit, match="--kv-ram-bytes"):
        RamStore(FORMATS, 1 << 50, StepClock())


def test_what_is_not_there_is_absent_and_what_is_late_is_not_shown() -> None:
    clock = StepClock()
    store = store_of(8, clock)
    assert store.put_many(pairs([1, 2])) == [None, None]
    assert read(store, [1, 3, 2], deadline=0.0) == [*payloads([1]), Miss.ABSENT, *payloads([2])]
    clock.advance(1.0)
    assert read(store, [1, 2], deadline=0.5) == [Miss.LATE, Miss.LATE]
    assert store.probe_many([key_of(1), key_of(3)], 0.0) == [True, False]


def test_a_full_store_refuses_and_keeps_what_it_has() -> None:
    store = store_of(2)
    assert store.put_many(pairs([1, 2, 3])) == [None, None, Refusal.FULL]
    assert read(store, [1, 2]) == payloads([1, 2])
    store.delete_many([key_of(1)])
    assert store.put_many(pairs([3])) == [None]
    assert store.bytes_used == store.usable_bytes == 2 * PAGE


def test_a_record_that_is_read_stays_as_it_is_while_others_come() -> None:
    store = store_of(1)
    store.put_many(pairs([1]))
    refused: list[Refusal | None] = []

    def use(number: int, record: memoryview) -> None:
        store.delete_many([key_of(1)])
        refused.extend(store.put_many(pairs([2])))
        assert record == record_of(1)

    assert store.get_many([key_of(1)], use, 0.0) == [None]
    assert refused == [Refusal.FULL]
    assert store.put_many(pairs([2])) == [None]


def test_a_reader_and_a_writer_never_see_half_a_record() -> None:
    store, stop, seen = store_of(4), threading.Event(), set[Miss]()

    def write() -> None:
        chance = random.Random(0)
        while not stop.is_set():
            store.put_many(pairs([chance.randrange(8)]))
            store.delete_many([key_of(chance.randrange(8))])

    writer = threading.Thread(target=write)
    writer.start()
    for turn in range(2000):
        [found] = read(store, [turn % 8])
        if isinstance(found, Miss):
            seen.add(found)
    stop.set()
    writer.join()
    store.check()
    assert seen <= {Miss.ABSENT}


def test_a_flipped_bit_in_memory_is_a_miss_and_can_be_swept_out() -> None:
    store = store_of(8)
    store.put_many(pairs([1, 2]))

    def flip_a_bit(_: int, record: memoryview) -> None:
        # What is shown is the store's own memory.
        record[500] ^= 4

    assert store.get_many([key_of(2)], flip_a_bit, 1e9) == [None]
    assert read(store, [1, 2]) == [*payloads([1]), Miss.DAMAGED]
    report = verify(store, remove=True)
    assert (report.records, report.sound, report.misses) == (2, 1, {Miss.DAMAGED: 1})
    assert [key for key, _ in store.contents()] == [key_of(1)]


def test_clearing_gives_all_memory_back() -> None:
    store = store_of(8)
    store.put_many(pairs(range(5)))
    store.clear()
    assert (store.records, store.bytes_used) == (0, 0)
    assert store.put_many(pairs(range(8))) == [None] * 8


def test_a_record_larger_than_its_groups_slots_or_of_no_group_is_not_kept() -> None:
    store = store_of(8)
    assert store.put_many([(key_of(1), memoryview(bytes(5000)))]) == [Refusal.FAILED]
    assert store.put_many([(key_of(1, 7), memoryview(bytes(100)))]) == [Refusal.FAILED]
