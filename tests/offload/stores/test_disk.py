"""The tier on disk keeps its bound, outlives its process, and answers whatever happens to its folder with misses."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.errors import Unreachable
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_files import TwoThreads
from kveik.offload.stores.disk_index import DiskIndex, index_bytes
from kveik.offload.stores.disk_offline import store_at
from kveik.offload.stores.record import Miss, RecordKey, Refusal
from kveik.offload.stores.store import verify
from tests.offload.stores.records import FORMATS, format_of, key_of, pairs, payloads, read
from tests.seeds import over_seeds

MIB = 1 << 20


def scanned(folder: Path) -> int:
    """Bytes that the folder's files really take."""
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


@pytest.fixture
def store(tmp_path: Path, clock: StepClock) -> Iterator[DiskStore]:
    store = opened_in(tmp_path, clock)
    yield store
    store.close()


def opened_in(folder: Path, clock: StepClock) -> DiskStore:
    return DiskStore(folder / "kv", FORMATS, 4 * MIB, clock)


def again(store: DiskStore, clock: StepClock, capacity: int = 4 * MIB) -> DiskStore:
    store.close()
    return DiskStore(store.folder, FORMATS, capacity, clock)


def test_what_was_stored_is_there_after_a_restart(store: DiskStore, clock: StepClock) -> None:
    for group in range(3):
        assert store.put_many(pairs(range(20), group)) == [None] * 20
    store.delete_many([key_of(3), key_of(4, 1)])
    before = dict(store.contents())
    opened = again(store, clock)
    assert dict(opened.contents()) == before
    assert opened.records == 58
    for group in range(3):
        kept = [number for number in range(20) if key_of(number, group) in before]
        assert read(opened, kept, group) == payloads(kept, group)
    assert read(opened, [3]) == [Miss.ABSENT]
    opened.check()
    opened.close()


@over_seeds(4)
def test_usage_is_what_a_scan_finds_after_every_step_and_within_the_bound(tmp_path: Path, seed: int) -> None:
    chance, clock, model = random.Random(seed), StepClock(), dict[RecordKey, int]()
    store = DiskStore(tmp_path, FORMATS, MIB, clock)
    for _ in range(150):
        group, what = chance.randrange(3), chance.random()
        numbers = [chance.randrange(200) for _ in range(chance.randrange(1, 12))]
        if what < 0.6:
            for number, refusal in zip(numbers, store.put_many(pairs(numbers, group)), strict=True):
                assert refusal in (None, Refusal.FULL)
                if refusal is None:
                    model[key_of(number, group)] = number
        elif what < 0.9:
            gone = chance.sample(sorted(model), min(len(model), 10))
            store.delete_many(gone)
            for key in gone:
                del model[key]
        elif what < 0.97:
            store = again(store, clock, MIB)
        else:
            store.clear()
            model.clear()
        store.check()
        assert set(dict(store.contents())) == set(model)
        assert store.bytes_used == scanned(tmp_path) <= store.capacity_bytes
    assert verify(store).misses == {}
    store.close()


def test_a_smaller_bound_after_a_restart_is_kept_too(store: DiskStore, clock: StepClock) -> None:
    store.put_many(pairs(range(300), 1))
    opened = again(store, clock, 2 * MIB)
    assert 0 < opened.records < 300
    assert opened.bytes_used == scanned(opened.folder) <= 2 * MIB
    assert verify(opened).misses == {}
    opened.close()


def test_the_index_shrinks_with_the_bound(tmp_path: Path, clock: StepClock) -> None:
    store = DiskStore(tmp_path, FORMATS, 64 * MIB, clock)
    for start in [*range(0, 8000, 200)] * 2:
        assert store.put_many(pairs(range(start, start + 200), 2)) == [None] * 200
    store.close()
    opened = DiskStore(tmp_path, FORMATS, MIB, clock)
    assert opened.bytes_used == scanned(tmp_path) <= MIB
    assert opened.records == opened.usable_bytes // 4096
    kept = [number for number in range(8000) if opened.probe_many([key_of(number, 2)], 0.0) == [True]]
    assert read(opened, kept, 2) == payloads(kept, 2)
    opened.close()


def test_an_index_is_written_anew_before_it_outgrows_its_bound(store: DiskStore, clock: StepClock) -> None:
    index, sizes = store.folder / "index", list[int]()
    for turn in range(120):
        assert store.put_many(pairs(range(turn, turn + 40), 2)) == [None] * 40
        store.delete_many([key_of(number, 2) for number in range(turn, turn + 40, 2)])
        sizes.append(index.stat().st_size)
    assert any(later < sooner for sooner, later in itertools.pairwise(sizes))
    assert max(sizes) <= index_bytes(4 * MIB // 4096)
    before = dict(store.contents())
    opened = again(store, clock)
    assert dict(opened.contents()) == before
    assert verify(opened).misses == {}
    opened.close()


@over_seeds(8)
def test_an_index_overwritten_under_a_running_store_raises_nothing_then_or_later(tmp_path: Path, seed: int) -> None:
    clock = StepClock()
    store = opened_in(tmp_path, clock)
    store.put_many(pairs(range(100)))
    file, chance = store.folder / "index", random.Random(seed)
    with file.open("r+b") as opened:
        opened.seek(chance.choice((0, 64, 512, 1 << 12)))
        opened.write(chance.randbytes(chance.choice((1, 100, 1 << 14))))
    for start in range(100, 200, 10):
        store.put_many(pairs(range(start, start + 10)))
        store.delete_many([key_of(number) for number in range(start - 60, start - 50)])
        clock.advance(400.0)
    kept = [number for number in range(200) if store.probe_many([key_of(number)], 0.0) == [True]]
    assert kept
    assert read(store, kept) == payloads(kept)
    reopened = again(store, clock)
    for number, found in enumerate(read(reopened, range(200))):
        assert isinstance(found, Miss) or [found] == payloads([number])
    assert reopened.put_many(pairs([300])) == [None]
    reopened.close()


def test_records_of_another_model_are_thrown_away(store: DiskStore, clock: StepClock) -> None:
    store.put_many(pairs(range(9)))
    store.close()
    other = DiskStore(store.folder, [format_of(0, 5000)], 4 * MIB, clock)
    assert other.records == 0
    assert other.bytes_used == scanned(store.folder) < MIB
    other.close()


def test_a_deadline_that_has_passed_is_late(store: DiskStore, clock: StepClock) -> None:
    store.put_many(pairs([1]))
    clock.advance(2.0)
    assert read(store, [1], deadline=1.0) == [Miss.LATE]
    assert read(store, [1], deadline=2.0) == payloads([1])
    assert store.probe_many([key_of(1), key_of(2)], 0.0) == [True, False]


def test_a_thousand_flipped_bits_are_a_thousand_misses(store: DiskStore) -> None:
    store.put_many(pairs(range(50)))
    file, chance = store.folder / "records-0", random.Random(1)
    content, missed = bytearray(file.read_bytes()), 0
    for _ in range(1000):
        number = chance.randrange(50)
        bit = 8 * 4096 * number + chance.randrange(8 * FORMATS[0].record_bytes)
        content[bit // 8] ^= 1 << bit % 8
        with file.open("r+b") as opened:
            opened.seek(bit // 8)
            opened.write(content[bit // 8 : bit // 8 + 1])
        [found] = read(store, [number])
        missed += isinstance(found, Miss)
        content[bit // 8] ^= 1 << bit % 8
        with file.open("r+b") as opened:
            opened.seek(bit // 8)
            opened.write(content[bit // 8 : bit // 8 + 1])
    assert missed == 1000
    assert read(store, range(50)) == payloads(range(50))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4096 + 127, 4096 + 128, 8192 + 3127, 10 * 4096])
def test_files_cut_short_under_a_running_store_give_misses(store: DiskStore, clock: StepClock, size: int) -> None:
    store.put_many(pairs(range(10)))
    with (store.folder / "records-0").open("r+b") as file:
        file.truncate(size)
    whole = (size + 4096 - FORMATS[0].record_bytes) // 4096
    assert read(store, range(10)) == [*payloads(range(whole)), *[Miss.TORN] * (10 - whole)]
    opened = again(store, clock)
    assert read(opened, range(whole)) == payloads(range(whole))
    assert all(isinstance(found, Miss) for found in read(opened, range(whole, 10)))
    assert opened.put_many(pairs(range(10))) == [None] * 10
    assert read(opened, range(10)) == payloads(range(10))
    opened.close()


@pytest.mark.parametrize("size", [0, 100, 4096, 8192, 12288])
def test_an_index_cut_short_is_left_and_begun_anew(store: DiskStore, clock: StepClock, size: int) -> None:
    store.put_many(pairs(range(100)))
    with (store.folder / "index").open("r+b") as file:
        file.truncate(size)
    refused = store.put_many(pairs([200]))
    assert refused in ([Refusal.FAILED], [None])
    clock.advance(1e3)
    assert store.put_many(pairs([200])) == [None]
    assert store.availability == AVAILABLE
    assert read(store, [200]) == payloads([200])
    opened = again(store, clock)
    assert read(opened, [200]) == payloads([200])
    opened.close()


@over_seeds(25)
def test_an_index_with_flipped_bits_opens_and_serves_nothing_wrong(tmp_path: Path, seed: int) -> None:
    clock = StepClock()
    store = opened_in(tmp_path, clock)
    for start in range(0, 200, 20):
        store.put_many(pairs(range(start, start + 20)))
    store.delete_many([key_of(number) for number in range(0, 200, 3)])
    store.close()
    file, chance = store.folder / "index", random.Random(seed)
    content = bytearray(file.read_bytes())
    for _ in range(4):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    opened = DiskStore(store.folder, FORMATS, 4 * MIB, clock)
    for number, found in enumerate(read(opened, range(200))):
        assert isinstance(found, Miss) or [found] == payloads([number])
    opened.put_many(pairs(range(300, 340)))
    clock.advance(1e3)
    assert opened.put_many(pairs(range(300, 340))) == [None] * 40
    assert read(opened, range(300, 340)) == payloads(range(300, 340))
    assert scanned(store.folder) <= opened.capacity_bytes
    opened.close()


def test_an_index_that_is_none_is_kept_aside_once(store: DiskStore, clock: StepClock) -> None:
    folder = store.folder
    for content in (b"first" * 2000, b"second" * 2000):
        store.put_many(pairs(range(9)))
        store.close()
        (folder / "index").write_bytes(content)
        store = DiskStore(folder, FORMATS, 4 * MIB, clock)
        assert (folder / "index.damaged").read_bytes() == content
        assert store.availability == AVAILABLE
        assert store.bytes_used == scanned(folder)
    store.close()


def test_files_deleted_under_a_running_store_are_begun_anew(store: DiskStore) -> None:
    store.put_many(pairs(range(9)))
    for file in store.folder.iterdir():
        file.unlink()
    store.folder.rmdir()
    assert read(store, [1]) == payloads([1])
    assert store.put_many(pairs([20])) == [None]
    assert store.records == 1
    assert read(store, [1, 20]) == [Miss.ABSENT, *payloads([20])]
    assert store.bytes_used == scanned(store.folder)


def test_an_index_deleted_under_a_running_store_costs_a_pause(store: DiskStore, clock: StepClock) -> None:
    store.put_many(pairs(range(9)))
    (store.folder / "index").unlink()
    assert store.put_many(pairs([20])) == [Refusal.FAILED]
    assert store.availability.reason == "the index was removed"
    assert store.put_many(pairs([20])) == [Refusal.REFUSED]
    clock.advance(2.0)
    assert store.put_many(pairs([20])) == [None]
    assert store.availability == AVAILABLE


def test_a_folder_can_be_looked_at_without_its_model_and_is_left_as_it_was(store: DiskStore, clock: StepClock) -> None:
    for group in range(3):
        store.put_many(pairs(range(20), group))
    with pytest.raises(Unreachable, match=f"{store.folder} is in use"):
        store_at(store.folder, clock)
    before = set(store.contents())
    store.close()
    found = store_at(store.folder, clock)
    assert set(found.contents()) == before
    assert verify(found).misses == {}
    opened = again(found, clock)
    assert set(opened.contents()) == before
    opened.close()


@pytest.mark.parametrize("missing", ["index", "lock", "records-0", "lock records-1"])
def test_a_folder_of_which_a_part_is_gone_is_used_all_the_same(store: DiskStore, clock: StepClock, missing: str) -> None:
    store.put_many(pairs(range(9)))
    store.close()
    for name in missing.split():
        (store.folder / name).unlink()
    opened = again(store, clock)
    assert opened.records == (0 if missing in ("index", "records-0") else 9)
    assert opened.put_many(pairs([20])) == [None]
    opened.close()


def test_records_that_cost_no_more_than_the_room_all_fit(store: DiskStore) -> None:
    stored = store.put_many(pairs(range(1000)))
    fit = store.usable_bytes // store.cost_bytes(0)
    assert 700 < fit < 1000
    assert stored == [None] * fit + [Refusal.FULL] * (1000 - fit)


ENTERING: dict[str, Callable[[DiskStore], object]] = {
    "put": lambda store: store.put_many(pairs([9])),
    "delete": lambda store: store.delete_many([key_of(1)]),
    "clear": DiskStore.clear,
    "close": DiskStore.close,
}


@pytest.mark.parametrize("enter", ENTERING.values(), ids=ENTERING)
def test_a_second_thread_is_told_whom_it_meets_before_the_index_is_touched(
    store: DiskStore, enter: Callable[[DiskStore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads would take the same place in the index."""
    inside, go_on, changes = threading.Event(), threading.Event(), list[str]()
    change = DiskIndex.change

    def slow_change(index: DiskIndex, *what: Sequence[object]) -> None:
        changes.append(threading.current_thread().name)
        inside.set()
        assert go_on.wait(10)
        change(index, *what)  # type: ignore[arg-type]  # whatever it is

    monkeypatch.setattr(DiskIndex, "change", slow_change)
    first = threading.Thread(target=store.put_many, args=(pairs([1]),), name="disk-writer")
    first.start()
    try:
        assert inside.wait(10)
        with pytest.raises(TwoThreads, match=r"'MainThread'.* 'disk-writer'"):
            enter(store)
    finally:
        go_on.set()
        first.join()
    assert changes == ["disk-writer"]
    assert read(store, [1]) == payloads([1])
    assert store.put_many(pairs([2])) == [None]
