"""What a tier keeps for the next records goes back to the system when it is asked to, whoever reads meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.offload.availability import AVAILABLE
from kveik.offload.mover import MovedTier, Mover
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_files import SlotFiles
from kveik.offload.stores.disk_offline import store_at
from kveik.offload.stores.encode import Raw
from kveik.offload.stores.ram import RamStore
from kveik.offload.stores.record import Miss
from kveik.offload.stores.slots import PAGE_BYTES, Slots
from tests.offload.stores.records import FORMATS, key_of, pairs, payloads, read

MIB = 1 << 20


def blocks_on_disk(folder: Path) -> int:
    """As `du` counts them."""
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "kv", FORMATS, 8 * MIB, StepClock())
    yield store
    store.check()
    store.close()


def test_slots_side_by_side_go_at_once_and_those_that_are_read_stay() -> None:
    gone: list[tuple[int, int, int]] = []
    slots = Slots([PAGE_BYTES], 10 * PAGE_BYTES, lambda *run: gone.append(run) is None)
    for number in range(10):
        place = slots.take(key_of(number), 100)
        assert place is not None
        slots.show(key_of(number), place)
    pinned = slots.pin(key_of(6))
    assert pinned is not None
    for number in (0, 1, 4, 6, 7, 8, 9):
        slots.remove(key_of(number))
    slots.release_space()
    slots.check()
    assert gone == [(0, 7, 3), (0, 4, 1), (0, 0, 2)]
    assert slots.bytes == 4 * PAGE_BYTES
    slots.unpin(pinned)
    slots.release_space()
    assert gone[3:] == [(0, 6, 1)]
    assert slots.bytes == 3 * PAGE_BYTES


def test_a_slot_is_nobodys_while_its_memory_goes() -> None:
    def given_back(group: int, first: int, count: int) -> bool:
        taken.append(slots.take(key_of(100 + len(taken)), 100))
        return True

    taken: list[object] = []
    slots = Slots([PAGE_BYTES], 2 * PAGE_BYTES, given_back)
    for number in range(2):
        place = slots.take(key_of(number), 100)
        assert place is not None
        slots.show(key_of(number), place)
    slots.clear()
    assert taken == [None]
    slots.check()


def test_memory_in_ram_goes_back() -> None:
    store = RamStore(FORMATS, 4 * MIB, StepClock())
    assert store.put_many(pairs(range(300))) == [None] * 300
    store.delete_many([key_of(number) for number in range(1, 300)])
    assert store.bytes_used == 300 * 4096
    store.release_space()
    assert store.bytes_used == 4096
    assert read(store, [0, 1]) == [*payloads([0]), Miss.ABSENT]
    assert store.put_many(pairs(range(300))) == [None] * 300
    assert read(store, range(300)) == payloads(range(300))
    store.check()
    store.close()


def test_files_shrink_to_what_their_records_need(store: DiskStore) -> None:
    folder = store.folder
    for group in range(3):
        store.put_many(pairs(range(200), group))
    full = blocks_on_disk(folder)
    store.delete_many([key_of(number, group) for group in range(3) for number in range(200) if number % 50 != 25])
    assert blocks_on_disk(folder) >= full
    store.release_space()
    assert store.bytes_used == blocks_on_disk(folder) <= 4 * (4096 + 12288 + 4096) + 2 * 4096
    assert (folder / "records-1").stat().st_size <= 176 * 12288
    assert (folder / "index").stat().st_size < 4096
    assert [read(store, [25, 75, 175], group) for group in range(3)] == [payloads([25, 75, 175], group) for group in range(3)]
    store.close()
    opened = DiskStore(folder, FORMATS, 8 * MIB, StepClock())
    assert opened.records == 12
    opened.close()


def test_when_all_is_forgotten_the_files_are_empty_on_any_file_system(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kveik.offload.stores.disk_files._fallocate", None)
    folder = store.folder
    store.put_many(pairs(range(100)))
    store.delete_many([key_of(number) for number in range(100)])
    store.release_space()
    assert (folder / "records-0").stat().st_size == 0
    assert store.bytes_used == blocks_on_disk(folder) <= 2 * 4096
    assert store.put_many(pairs(range(50))) == [None] * 50
    assert read(store, range(50)) == payloads(range(50))


def test_a_file_that_was_cut_short_is_not_made_longer(store: DiskStore) -> None:
    file = store.folder / "records-0"
    store.put_many(pairs(range(20)))
    store.delete_many([key_of(number) for number in range(10, 20)])
    with file.open("r+b") as opened:
        opened.truncate(5 * 4096)
    store.release_space()
    assert file.stat().st_size == 5 * 4096


def test_a_folder_that_can_only_be_read_is_left_as_it_is(store: DiskStore) -> None:
    folder = store.folder
    store.put_many(pairs(range(20)))
    store.delete_many([key_of(number) for number in range(10)])
    store.close()
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    opened = store_at(folder, StepClock(), read_only=True)
    opened.release_space()
    assert opened.records == 10
    opened.close()
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_who_reads_while_memory_goes_gets_a_record_whole_or_none(store: DiskStore) -> None:
    ended, wrong = threading.Event(), list[object]()
    expected = payloads(range(40))

    def reading() -> None:
        while not ended.is_set():
            found = read(store, range(40))
            wrong.extend(one for one, payload in zip(found, expected, strict=True) if one not in (payload, Miss.ABSENT))

    thread = threading.Thread(target=reading)
    thread.start()
    for turn in range(300):
        store.put_many(pairs(range(turn % 7, 40)))
        store.delete_many([key_of(number) for number in range(40) if (turn + number) % 3])
        store.release_space()
    ended.set()
    thread.join()
    assert wrong == []


def test_a_slot_under_a_reader_keeps_its_bytes(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = SlotFiles.read

    def slow(files: SlotFiles, group: int, slot: int, into: memoryview) -> int:
        # Between finding the record and reading it all is forgotten and given back.
        store.delete_many([key_of(number) for number in range(20)])
        store.release_space()
        return reading(files, group, slot, into)

    store.put_many(pairs(range(20)))
    with monkeypatch.context() as patched:
        patched.setattr(SlotFiles, "read", slow)
        assert read(store, [12]) == payloads([12])
    store.release_space()
    assert blocks_on_disk(store.folder) <= 2 * 4096


def test_room_goes_back_only_when_nothing_waits_to_be_written() -> None:
    clock, codecs = StepClock(), [Raw(one.payload_bytes) for one in FORMATS]
    store = RamStore(FORMATS, 4 * MIB, clock)
    mover = Mover([MovedTier(store=store, codecs=codecs, staging_bytes=1 << 20)], clock)
    for number in range(8):
        assert mover.store("ram", key_of(number), memoryview(payloads([number])[0])) is None
    assert not mover.release_space("ram")
    while mover.step():
        pass
    assert mover.delete("ram", [key_of(number) for number in range(8)])
    assert not mover.release_space("ram")
    mover.step()
    assert (store.records, store.bytes_used) == (0, 8 * 4096)
    assert mover.release_space("ram")
    assert mover.busy
    mover.step()
    assert store.bytes_used == 0
    assert not mover.busy
    mover.close()


def test_who_asks_what_a_disk_holds_does_not_wait_for_it(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_many(pairs(range(20)))
    with monkeypatch.context() as patched:
        for name in ("stat", "fstat", "pread", "preadv"):
            patched.setattr(f"os.{name}", lambda *_, **__: pytest.fail("the disk is asked"))
        assert store.bytes_used > 20 * 4096
        assert (store.records, store.availability, store.capacity_bytes) == (20, AVAILABLE, 8 * MIB)
    assert store.bytes_used == blocks_on_disk(store.folder)


@pytest.mark.parametrize("stopped", [False, True])
def test_clearing_takes_what_was_to_be_written_before_it_and_is_done_at_the_end_at_the_latest(stopped: bool) -> None:
    clock, codecs = StepClock(), [Raw(one.payload_bytes) for one in FORMATS]
    store = RamStore(FORMATS, 4 * MIB, clock)
    store.put_many(pairs(range(100, 110)))
    mover = Mover([MovedTier(store=store, codecs=codecs, staging_bytes=1 << 20)], clock)
    for number in range(8):
        assert mover.store("ram", key_of(number), memoryview(payloads([number])[0])) is None
    assert mover.clear("ram")
    assert mover.store("ram", key_of(8), memoryview(payloads([8])[0])) is None
    if stopped:
        mover.close()
    else:
        while mover.step():
            pass
    assert [key for key, _ in store.contents()] == ([] if stopped else [key_of(8)])
    assert mover.snapshot("ram").counts.records_deleted == (10 if stopped else 18)
    mover.close()


def test_what_waits_to_be_deleted_is_deleted_when_the_tier_is_closed() -> None:
    clock, codecs = StepClock(), [Raw(one.payload_bytes) for one in FORMATS]
    store = RamStore(FORMATS, 4 * MIB, clock)
    store.put_many(pairs(range(10)))
    mover = Mover([MovedTier(store=store, codecs=codecs, staging_bytes=1 << 20)], clock)
    assert mover.delete("ram", [key_of(number) for number in range(6)])
    mover.close()
    assert [key for key, _ in store.contents()] == [key_of(number) for number in range(6, 10)]
