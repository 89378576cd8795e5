"""A disk's folder keeps its bound whatever was there before, and is left as it was by whoever only looks at it."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.errors import DoesNotFit, Unreachable
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_files import SlotFiles
from kveik.offload.stores.disk_index import DiskIndex
from kveik.offload.stores.disk_offline import store_at
from kveik.offload.stores.record import RecordKey, Refusal
from kveik.offload.stores.store import verify
from tests.offload.stores.records import FORMATS, format_of, key_of, pairs, payloads, read
from tests.offload.stores.test_disk import MIB, scanned


def test_slots_of_a_model_with_more_groups_are_removed(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMATS, 8 * MIB, StepClock())
    store.put_many(pairs(range(300), 1))
    store.close()
    opened = DiskStore(tmp_path, FORMATS[:1], MIB, StepClock())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["index", "lock", "records-0"]
    opened.put_many(pairs(range(300)))
    assert opened.records == opened.usable_bytes // 4096
    assert scanned(tmp_path) == opened.bytes_used <= MIB
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


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_blocks) for file in folder.iterdir()}


def test_whoever_only_looks_changes_nothing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    store.put_many(pairs(range(40)))
    store.delete_many([key_of(number) for number in range(5, 40)])
    store.close()
    with (tmp_path / "records-0").open("ab") as file:
        file.write(bytes(100_000))
    (tmp_path / "records-7").write_text("of a larger model")
    before = content(tmp_path)
    found = store_at(tmp_path, StepClock(), read_only=True)
    assert found.records == 5
    assert verify(found, remove=True).misses == {}
    assert read(found, range(5)) == payloads(range(5))
    found.clear()
    found.close()
    assert content(tmp_path) == before


def test_a_folder_of_another_version_is_refused_to_who_looks_and_emptied_by_a_server(tmp_path: Path) -> None:
    head = b"kveik index 3\n\0\0\1"
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    store.put_many(pairs(range(9)))
    store.close()
    (tmp_path / "index").write_bytes(head + (tmp_path / "index").read_bytes()[len(head) :])
    before = content(tmp_path)
    for read_only in (True, False):
        with pytest.raises(Unreachable, match="written by another version"):
            store_at(tmp_path, StepClock(), read_only=read_only)
    assert content(tmp_path) == before
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    assert (store.records, store.availability) == (0, AVAILABLE)
    assert store.put_many(pairs([1])) == [None]
    assert not (tmp_path / "index.damaged").exists()
    store.close()


ODD = [
    "[]", "null", "5", '"groups"', "{}", '{"groups": 5}', '{"groups": []}', '{"groups": ["x"]}', '{"groups": [{}]}', "{",
    '{"groups": [{"fingerprint": "ab", "tokens": 16, "encoding": 0, "bytes": 100}]}',
    f'{{"groups": [{{"fingerprint": "{"ab" * 32}", "tokens": 16, "encoding": 0, "bytes": -5000}}]}}',
    f'{{"groups": [{{"fingerprint": "{"ab" * 32}", "tokens": 16, "encoding": 0, "bytes": 1e400}}]}}',
    f'{{"groups": [{{"fingerprint": "{"ab" * 32}", "tokens": 16, "encoding": 0, "bytes": "x"}}]}}',
    f'{{"groups": [{{"fingerprint": "{"ab" * 32}", "tokens": 16, "encoding": 99, "bytes": 100}}]}}',
    f'{{"groups": [{{"fingerprint": "{"ab" * 32}", "tokens": 16, "encoding": 0, "bytes": 100, "more": 1}}]}}',
    "\x00",
    f'{{"groups": [{{"fingerprint": "{"ab" * 32}", "tokens": 16, "encoding": 0, "bytes": 100}}], "more": 1}}',
    "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("description", ODD, ids=lambda odd: odd[:50])
def test_an_odd_description_is_a_damaged_index_to_who_looks_and_another_model_to_a_server(
    tmp_path: Path, description: str
) -> None:
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    store.put_many(pairs(range(9)))
    store.close()
    index = DiskIndex(tmp_path / "index", 1 << 20)
    index.begin(description.encode(), list(index.places().items()))
    index.close()
    before = content(tmp_path)
    with pytest.raises(Unreachable, match="damaged"):
        store_at(tmp_path, StepClock())
    assert content(tmp_path) == before
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    assert (store.records, store.availability) == (0, AVAILABLE)
    assert store.put_many(pairs([1])) == [None]
    store.close()


def test_a_damaged_entry_of_the_index_costs_its_own_record_alone(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    store.put_many(pairs(range(20)))
    store.close()
    index = tmp_path / "index"
    content, found = bytearray(index.read_bytes()), set[frozenset[RecordKey]]()
    for at in range(len(content) - 20 * 64, len(content), 64):
        damaged = bytearray(content)
        damaged[at + 30] ^= 1
        index.write_bytes(damaged)
        looked = store_at(tmp_path, StepClock(), read_only=True)
        found.add(frozenset({key_of(number) for number in range(20)} - set(dict(looked.contents()))))
        assert looked.records == 19
        looked.close()
    assert found == {frozenset({key_of(number)}) for number in range(20)}


def test_a_lowered_bound_keeps_the_newest_and_tells_how_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    assert store.put_many(pairs(range(400))) == [None] * 400
    store.close()
    store = DiskStore(tmp_path, FORMATS, MIB, StepClock())
    room = store.usable_bytes // store.cost_bytes(0)
    kept = range(400 - room, 400)
    assert [key for key, _ in store.contents()] == [key_of(number) for number in kept]
    assert read(store, kept) == payloads(kept)
    store.close()
    assert caplog.messages == [
        f"{tmp_path} holds 400 records (1.2 MiB), of which --kv-disk-bytes {MIB} has room for {room}; the others are dropped."
    ]
    # And so it is at the next start, without a word.
    DiskStore(tmp_path, FORMATS, MIB, StepClock()).close()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("keep", [3, 15])
def test_a_lowered_bound_is_kept_where_no_holes_can_be_made(
    tmp_path: Path, keep: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SlotFiles, "make_hole", lambda *_: False)
    store = DiskStore(tmp_path, FORMATS, 16 * MIB, StepClock())
    for group, count in ((0, 700), (1, 300), (2, 700)):
        assert store.put_many(pairs(range(count), group)) == [None] * count
        store.delete_many([key_of(number, group) for number in range(count) if number % keep])
    before = store.records
    store.close()
    store = DiskStore(tmp_path, FORMATS, 2 * MIB, StepClock())
    store.check()
    assert 0 < store.records < before
    assert store.bytes_used == scanned(tmp_path) <= 2 * MIB
    assert verify(store).misses == {}
    assert f"{before:,} records" in caplog.messages[0]
    assert f"room for {store.records:,};" in caplog.messages[0]
    stored = [store.put_many(pairs([2000], group))[0] for group in range(3)]
    assert set(stored) <= {None, Refusal.FULL}
    held = store.records
    store.check()
    assert store.bytes_used == scanned(tmp_path) <= 2 * MIB
    store.close()
    store = DiskStore(tmp_path, FORMATS, 2 * MIB, StepClock())
    assert store.records == held
    store.close()


def test_what_another_model_has_left_is_told_before_it_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    store.put_many(pairs(range(30)))
    store.close()
    for _ in range(2):
        DiskStore(tmp_path, [format_of(0, 5000)], 4 * MIB, StepClock()).close()
    (told,) = caplog.messages
    assert told.startswith(f"{tmp_path} holds 30 records (91.6 KiB) of another model or setting, which are dropped")
    assert all(flag in told for flag in ("model", "--dtype", "--kv-cache-dtype", "--block-size"))


def test_who_looks_at_slots_that_are_gone_is_told_so(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    store.put_many(pairs(range(9)))
    store.close()
    (tmp_path / "records-1").unlink()
    with pytest.raises(Unreachable, match=r"cannot be read: the file records-1 is missing"):
        store_at(tmp_path, StepClock(), read_only=True)
    assert not (tmp_path / "records-1").exists()
