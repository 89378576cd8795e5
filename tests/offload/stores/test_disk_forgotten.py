"""What was to be forgotten is not found again, whatever was wrong with the folder at the time."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.observe.events import TierState
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores import disk_index
from kveik.offload.stores.disk import PAUSE_SECONDS_MOST, DiskStore
from kveik.offload.stores.disk_files import SlotFiles
from kveik.offload.stores.disk_index import DiskIndex
from kveik.offload.stores.record import Miss, Refusal
from tests.offload.stores.records import FORMATS, key_of, pairs, payloads, read
from tests.offload.stores.test_disk import MIB


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


def open_store(folder: Path, clock: StepClock) -> DiskStore:
    return DiskStore(folder, FORMATS, MIB, clock)


def broken(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def left_for_a_while(folder: Path, clock: StepClock) -> DiskStore:
    """A store of ten records that had to leave its folder, which is whole again since."""
    store = open_store(folder, clock)
    assert store.put_many(pairs(range(10))) == [None] * 10
    (folder / "index").rename(folder / "away")
    assert store.put_many(pairs([50])) == [Refusal.FAILED]
    (folder / "away").rename(folder / "index")
    assert store.availability.state is TierState.UNAVAILABLE
    return store


FORGETTING: dict[str, tuple[Callable[[DiskStore], object], range]] = {
    "delete": (lambda store: store.delete_many([key_of(number) for number in range(4)]), range(4, 10)),
    "clear": (DiskStore.clear, range(0)),
}


@pytest.mark.parametrize(("forget", "stays"), FORGETTING.values(), ids=FORGETTING)
@pytest.mark.parametrize("ends", [False, True])
def test_what_is_forgotten_while_the_folder_is_left_stays_forgotten(
    tmp_path: Path, clock: StepClock, forget: Callable[[DiskStore], object], stays: range, ends: bool
) -> None:
    store = left_for_a_while(tmp_path, clock)
    forget(store)
    if not ends:
        clock.advance(PAUSE_SECONDS_MOST)
        assert store.put_many(pairs([60])) == [None]
        assert read(store, stays) == payloads(stays)
        assert {key for key, _ in store.contents()} == {key_of(number) for number in [*stays, 60]}
    store.close()
    opened = open_store(tmp_path, clock)
    assert {key for key, _ in opened.contents()} == {key_of(number) for number in [*stays, *([] if ends else [60])]}
    opened.close()


@pytest.mark.parametrize(("forget", "stays"), FORGETTING.values(), ids=FORGETTING)
def test_what_is_forgotten_on_a_disk_that_fails_stays_forgotten(
    tmp_path: Path,
    clock: StepClock,
    forget: Callable[[DiskStore], object],
    stays: range,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(tmp_path, clock)
    store.put_many(pairs(range(10)))

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(DiskIndex, "change", fail)
        failing.setattr(DiskIndex, "begin", fail)
        forget(store)
        assert store.availability.reason == "Input/output error"
        assert [found for found in read(store, range(10)) if found is not Miss.ABSENT] == payloads(stays)
    store.close()
    opened = open_store(tmp_path, clock)
    assert {key for key, _ in opened.contents()} == {key_of(number) for number in stays}
    opened.close()
    assert caplog.messages == []


def test_a_record_deleted_is_not_found_though_the_folder_is_entered_anew_in_between(tmp_path: Path, clock: StepClock) -> None:
    """A file is removed, so the store enters its folder anew before it can tell the index of the deletion."""
    store = open_store(tmp_path, clock)
    store.put_many(pairs(range(10)))
    (tmp_path / "records-1").unlink()
    store.delete_many([key_of(3)])
    assert read(store, [3, 4]) == [Miss.ABSENT, *payloads([4])]
    store.close()
    opened = open_store(tmp_path, clock)
    assert read(opened, [3, 4]) == [Miss.ABSENT, *payloads([4])]
    opened.close()


def test_what_could_not_be_forgotten_at_the_end_is_told_in_number(
    tmp_path: Path, clock: StepClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for forget, count in ((lambda store: store.delete_many([key_of(1), key_of(2)]), 2), (DiskStore.clear, 10)):
        store = open_store(tmp_path, clock)
        store.put_many(pairs(range(10)))
        caplog.clear()
        with monkeypatch.context() as failing:
            failing.setattr(DiskIndex, "change", fail)
            failing.setattr(DiskIndex, "begin", fail)
            failing.setattr(SlotFiles, "cut", fail)
            forget(store)
            assert store.records == 10 - count
            store.close()
        (told,) = caplog.records
        assert told.levelno == logging.WARNING
        assert told.getMessage().startswith(f"{count} records of {tmp_path} were to be forgotten and may be there still")
        assert "Read-only file system" in told.getMessage()
        opened = open_store(tmp_path, clock)
        assert opened.records == 10
        opened.close()


def test_more_than_can_be_remembered_is_everything(tmp_path: Path, clock: StepClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_index, "PENDING_MOST", 6)
    store = left_for_a_while(tmp_path, clock)
    store.delete_many([key_of(number) for number in range(5)])
    # With the one that the index may name, though it was told as failed.
    assert len(store.pending.keys) == 6
    store.delete_many([key_of(100)])
    assert len(store.pending.keys) == 0
    clock.advance(PAUSE_SECONDS_MOST)
    assert store.put_many(pairs([60])) == [None]
    assert [key for key, _ in store.contents()] == [key_of(60)]
    # Where the books are open they know what stays.
    store.put_many(pairs(range(20)))
    store.delete_many([key_of(number) for number in range(12)])
    store.close()
    opened = open_store(tmp_path, clock)
    assert {key for key, _ in opened.contents()} == {key_of(number) for number in [*range(12, 20), 60]}
    opened.close()


def test_a_record_that_went_for_its_successor_is_forgotten_though_that_could_not_be_written(
    tmp_path: Path, clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, clock)
    count = store.put_many(pairs(range(1000))).count(None)
    assert store.put_many(pairs([2000])) == [Refusal.FULL]

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(SlotFiles, "write", fail)
        assert store.put_many(pairs([7])) == [Refusal.FAILED]
    assert read(store, [7]) == [Miss.ABSENT]
    store.close()
    opened = open_store(tmp_path, clock)
    assert opened.records == count - 1
    assert read(opened, [7]) == [Miss.ABSENT]
    opened.close()


def test_a_record_that_was_told_as_failed_is_not_found_after_it_was_deleted(
    tmp_path: Path, clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, clock)
    clock.advance(10.0)
    with monkeypatch.context() as failing:
        failing.setattr(SlotFiles, "sync", broken)
        assert store.put_many(pairs([1])) == [Refusal.FAILED]
    store.close()
    opened = open_store(tmp_path, clock)
    assert opened.records == 0
    opened.close()


def test_giving_back_room_ends_a_trouble_that_is_over(
    tmp_path: Path, clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, clock)
    with monkeypatch.context() as failing:
        failing.setattr(SlotFiles, "write", broken)
        assert store.put_many(pairs([1])) == [Refusal.FAILED]
    assert store.availability.reason
    clock.advance(PAUSE_SECONDS_MOST)
    store.release_space()
    assert store.availability == AVAILABLE
    store.close()
