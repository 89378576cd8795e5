"""What a disk store does when its process is killed, its disk is full or read-only, or its folder belongs to somebody else."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.errors import BadValue, Unreachable
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores.disk import PAUSE_SECONDS_MOST, DiskStore
from kveik.offload.stores.disk_files import SlotFiles
from kveik.offload.stores.disk_folder import check_folder
from kveik.offload.stores.record import Miss, RecordKey, Refusal
from kveik.offload.stores.store import verify
from tests.offload.stores.disk_writer import CAPACITY, NUMBERS
from tests.offload.stores.mounts import remount, small_disk_at
from tests.offload.stores.records import FORMATS, key_of, pairs, payloads, read
from tests.offload.stores.test_disk import MIB, scanned


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one mebibyte."""
    with small_disk_at(tmp_path / "small") as folder:
        yield folder


def writer_on(folder: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.offload.stores.disk_writer", str(folder), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def kill_and_judge(folder: Path, seed: int) -> None:
    """Kill a writer after some batches, at any moment of the next, and look at what it leaves."""
    chance, process = random.Random(seed), writer_on(folder, seed)
    assert process.stdout is not None
    last = [process.stdout.readline().split() for _ in range(chance.randrange(1, 60))][-1]
    time.sleep(chance.random() * 0.005)
    process.kill()
    after, _ = process.communicate()
    store = DiskStore(folder, FORMATS, CAPACITY, StepClock())
    assert store.availability == AVAILABLE
    assert not (folder / "index.damaged").exists()
    store.check()
    assert verify(store).misses == {}
    for group in range(3):
        for number, found in enumerate(read(store, range(NUMBERS), group)):
            assert found is Miss.ABSENT or [found] == payloads([number], group)
    if not after:
        # Nothing was written after this batch, but it may have been deleted from.
        found = [read(store, [int(number)], int(group))[0] for group, number in (one.split(":") for one in last)]
        assert sum(isinstance(one, Miss) for one in found) <= 8
    assert store.bytes_used == scanned(folder) <= CAPACITY
    store.close()


def test_a_killed_process_leaves_a_store_that_opens_and_is_sound(tmp_path: Path) -> None:
    for seed in range(5):
        kill_and_judge(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_process_killed_two_hundred_times_leaves_a_sound_store(tmp_path: Path) -> None:
    for seed in range(200):
        kill_and_judge(tmp_path, 1000 + seed)


@pytest.mark.parametrize("size", [0, 64, 4096])
def test_an_index_cut_short_while_it_is_written_ends_nobody(tmp_path: Path, size: int) -> None:
    process, chance = writer_on(tmp_path, size), random.Random(size)
    assert process.stdout is not None
    for _ in range(40):
        for _ in range(3):
            assert process.stdout.readline()
        time.sleep(chance.random() * 0.002)
        os.truncate(tmp_path / "index", size)
        assert process.poll() is None
    process.kill()
    process.communicate()
    store = DiskStore(tmp_path, FORMATS, CAPACITY, StepClock())
    assert store.availability == AVAILABLE
    assert store.put_many(pairs(range(20))) == [None] * 20
    for group in range(3):
        for number, found in enumerate(read(store, range(NUMBERS), group)):
            assert isinstance(found, Miss) or [found] == payloads([number], group)
    assert store.bytes_used == scanned(tmp_path) <= CAPACITY
    store.close()


def test_a_second_engine_on_the_folder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    process = writer_on(tmp_path, 1)
    with pytest.raises(Unreachable, match=rf"process {process.pid}"):
        DiskStore(tmp_path, FORMATS, MIB, StepClock())
    process.kill()
    process.communicate()
    DiskStore(tmp_path, FORMATS, MIB, StepClock()).close()


def test_a_second_store_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMATS, MIB, StepClock())
    with pytest.raises(Unreachable):
        DiskStore(tmp_path, FORMATS, MIB, StepClock())
    assert store.put_many(pairs([1])) == [None]
    store.close()


def test_a_lock_that_is_removed_under_a_running_engine_keeps_others_out_all_the_same(tmp_path: Path) -> None:
    process = writer_on(tmp_path, 1)
    (tmp_path / "lock").unlink()
    for _ in range(2):
        with pytest.raises(Unreachable, match="in use"):
            DiskStore(tmp_path, FORMATS, MIB, StepClock())
    process.kill()
    process.communicate()
    DiskStore(tmp_path, FORMATS, MIB, StepClock()).close()


def test_a_full_disk_stores_no_more_serves_what_it_has_and_recovers(small_disk: Path) -> None:
    clock = StepClock()
    store = DiskStore(small_disk / "kv", FORMATS, 64 * MIB, clock)
    (small_disk / "other").write_bytes(bytes(600_000))
    kept: list[int] = []
    for number in range(200):
        if store.put_many(pairs([number])) == [None]:
            kept.append(number)
    assert 20 < len(kept) < 150
    assert store.availability.reason == "the disk is full"
    assert store.put_many(pairs([500])) == [Refusal.FULL]
    assert read(store, kept) == payloads(kept)
    store.check()
    (small_disk / "other").unlink()
    clock.advance(PAUSE_SECONDS_MOST)
    assert store.put_many(pairs(range(200, 210))) == [None] * 10
    assert store.availability == AVAILABLE
    store.close()
    opened = DiskStore(small_disk / "kv", FORMATS, 64 * MIB, clock)
    assert read(opened, [*kept, *range(200, 210)]) == payloads([*kept, *range(200, 210)])
    opened.close()


@pytest.mark.parametrize("free", [0, 4096, 16384, 65536])
def test_a_disk_that_is_full_at_the_start_is_called_so(small_disk: Path, free: int) -> None:
    clock, other = StepClock(), small_disk / "other"
    other.write_bytes(bytes(MIB - free))
    store = DiskStore(small_disk / "kv", FORMATS, MIB, clock)
    for number in range(40):
        store.put_many(pairs([number]))
    assert store.availability.reason == "the disk is full"
    other.unlink()
    clock.advance(PAUSE_SECONDS_MOST)
    assert store.put_many(pairs([50])) == [None]
    assert store.availability == AVAILABLE
    store.close()


class FullFiles:
    """`SlotFiles.write` on a disk that is full, or fails, from the n-th record on."""

    def __init__(self, room: int, code: int = errno.ENOSPC) -> None:
        self.room, self.code = room, code
        self.write = SlotFiles.write

    def __call__(self, files: SlotFiles, group: int, slot: int, record: memoryview) -> None:
        self.room -= 1
        if self.room < 0:
            self.write(files, group, slot, record[: len(record) // 2])
            raise OSError(self.code, os.strerror(self.code))
        self.write(files, group, slot, record)


def test_a_batch_is_stored_as_far_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, full = DiskStore(tmp_path, FORMATS, MIB, StepClock()), FullFiles(3)
    monkeypatch.setattr(SlotFiles, "write", lambda *args: full(*args))
    assert store.put_many(pairs(range(5))) == [None, None, None, Refusal.FULL, Refusal.FULL]
    assert read(store, range(4)) == [*payloads(range(3)), Miss.ABSENT]
    store.check()
    store.close()


def test_the_pause_after_trouble_doubles_up_to_its_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, full = StepClock(), FullFiles(0, errno.EIO)
    store = DiskStore(tmp_path, FORMATS, MIB, clock)
    monkeypatch.setattr(SlotFiles, "write", lambda *args: full(*args))
    tried = []
    for second in range(2000):
        clock.seconds = float(second)
        if store.put_many(pairs([1])) == [Refusal.FAILED]:
            tried.append(second)
    assert tried == [0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 811, 1111, 1411, 1711]
    store.close()


def test_a_folder_on_a_read_only_file_system_is_read(small_disk: Path) -> None:
    clock = StepClock()
    store = DiskStore(small_disk, FORMATS, MIB, clock)
    store.put_many(pairs(range(5)))
    store.close()
    remount(small_disk, "ro")
    store = DiskStore(small_disk, FORMATS, MIB, clock)
    assert store.availability.reason == "the folder can only be read"
    assert read(store, range(5)) == payloads(range(5))
    assert store.put_many(pairs([7])) == [Refusal.REFUSED]
    store.delete_many([key_of(1)])
    assert read(store, [1, 2]) == [Miss.ABSENT, *payloads([2])]
    remount(small_disk, "rw")
    clock.advance(PAUSE_SECONDS_MOST)
    assert store.put_many(pairs([7])) == [None]
    assert read(store, [7, 2]) == payloads([7, 2])
    store.close()


def test_an_empty_folder_on_a_read_only_file_system_is_trouble_and_no_more(small_disk: Path) -> None:
    remount(small_disk, "ro")
    for folder in (small_disk, small_disk / "kv"):
        store = DiskStore(folder, FORMATS, MIB, StepClock())
        assert store.availability.reason
        expect_nothing_from(store, [1, 2])
        store.close()


def test_a_path_that_is_no_folder_is_trouble_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = DiskStore(tmp_path / "file", FORMATS, MIB, StepClock())
    assert store.availability.reason
    expect_nothing_from(store, [1, 2])
    store.close()


def expect_nothing_from(store: DiskStore, numbers: Sequence[int]) -> None:
    keys: list[RecordKey] = [key_of(number) for number in numbers]
    assert store.put_many(pairs(numbers)) == [Refusal.REFUSED] * len(keys)
    assert read(store, numbers) == [Miss.ABSENT] * len(keys)
    assert store.probe_many(keys, 0.0) == [False] * len(keys)
    store.delete_many(keys)
    store.clear()
    assert list(store.contents()) == []
    assert store.records == 0


def test_a_folder_that_can_never_be_one_is_refused_by_its_name(tmp_path: Path) -> None:
    file, loop = tmp_path / "file", tmp_path / "loop"
    file.write_text("x")
    loop.symlink_to(loop)
    unmade = (file / "kv", Path("/proc/kv"), loop / "kv")
    wrong = {
        file: "used: it is a file, not a folder",
        loop: "used: it is a link, not a folder",
        **dict.fromkeys(unmade, "made: "),
    }
    for folder, why in wrong.items():
        with pytest.raises(BadValue, match=f"--kv-disk: the folder {folder} cannot be {why}"):
            check_folder(folder)
        if folder != Path("/proc/kv"):
            with pytest.raises(BadValue, match=f"--kv-disk: the folder {folder} cannot be {why}"):
                check_folder(folder, only_look=True)


def test_looking_makes_no_folder_and_passes_one_in_use(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    check_folder(folder, only_look=True)
    assert list(tmp_path.iterdir()) == []
    store = DiskStore(folder, FORMATS, MIB, StepClock())
    check_folder(folder, only_look=True)
    store.close()


def test_a_folder_that_is_missing_empty_or_full_of_records_is_not_refused(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    check_folder(folder)
    check_folder(folder)
    store = DiskStore(folder, FORMATS, MIB, StepClock())
    store.put_many(pairs(range(5)))
    with pytest.raises(Unreachable, match=f"--kv-disk: the folder {folder}.*in use"):
        check_folder(folder)
    store.close()
    check_folder(folder)
    store = DiskStore(folder, FORMATS, MIB, StepClock())
    assert read(store, range(5)) == payloads(range(5))
    store.close()


def test_a_folder_that_can_only_be_read_is_refused_only_where_it_holds_nothing(small_disk: Path) -> None:
    store = DiskStore(small_disk / "kv", FORMATS, MIB, StepClock())
    store.put_many(pairs(range(5)))
    store.close()
    (small_disk / "empty").mkdir()
    remount(small_disk, "ro")
    for only_look in (False, True):
        check_folder(small_disk / "kv", only_look=only_look)
        for name in ("empty", "missing"):
            with pytest.raises(BadValue, match=f"--kv-disk: the folder {small_disk / name}"):
                check_folder(small_disk / name, only_look=only_look)


def test_a_folder_on_a_full_disk_is_not_refused(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "other").write_bytes(bytes(2 << 20))
    check_folder(small_disk / "kv")


def test_a_damaged_index_is_told_once_with_where_it_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    DiskStore(tmp_path, FORMATS, MIB, StepClock()).close()
    assert caplog.messages == []
    (tmp_path / "index").write_bytes(random.Random(1).randbytes(40_000))
    for _ in range(2):
        DiskStore(tmp_path, FORMATS, MIB, StepClock()).close()
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert told.getMessage().startswith(f"The index of {tmp_path} is damaged, kept as index.damaged; its records are dropped")
