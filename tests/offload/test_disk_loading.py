"""Loading from disk: straight into the block where nothing is waited for, else by a buffer; the same comes of both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.offload.counts import RecordsLoaded
from kveik.offload.mover import MovedTier, Mover
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_files import SlotFiles
from kveik.offload.stores.record import HEADER_BYTES, Miss
from tests.offload.stores.records import key_of
from tests.offload.test_mover import BLOCK, CODECS, FORMATS, block_of, blocks_of

NOTHING = bytes(BLOCK)


class DiskWorld:
    """A mover without threads over a folder that holds ten blocks."""

    def __init__(self, folder: Path) -> None:
        self.clock = StepClock()
        self.file = folder / "records-0"
        self.store = DiskStore(folder, FORMATS, 4 << 20, self.clock)
        self.mover = Mover([MovedTier(store=self.store, codecs=CODECS)], self.clock)
        for number in range(10):
            assert self.mover.store("disk", key_of(number), block_of(number)) is None
        while self.mover.step():
            pass
        self.mover.completions()

    def load(self, *numbers: int) -> tuple[tuple[Miss | None, ...], list[bytes]]:
        """The misses, and what stands in the blocks."""
        blocks = [bytearray(BLOCK) for _ in numbers]
        records = [(key_of(number), memoryview(block)) for number, block in zip(numbers, blocks, strict=True)]
        self.mover.load("disk", records, 1, self.clock.now() + 1.0)
        self.mover.step()
        [loaded] = self.mover.completions()
        assert isinstance(loaded, RecordsLoaded)
        return loaded.misses, [bytes(block) for block in blocks]

    def flip(self, at: int) -> None:
        content = bytearray(self.file.read_bytes())
        content[at] ^= 8
        self.file.write_bytes(content)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[DiskWorld]:
    world = DiskWorld(tmp_path)
    yield world
    world.mover.close()


@pytest.fixture(params=["at once", "by a buffer"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways."""
    if request.param == "by a buffer":
        monkeypatch.setattr(SlotFiles, "read_now", lambda *_: False)


def test_what_is_in_the_page_cache_takes_no_other_way(world: DiskWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.file.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(9)], 0, os.RWF_NOWAIT)
        except OSError:
            pytest.skip("this file system cannot read without waiting")
    monkeypatch.setattr(SlotFiles, "read", None)
    assert world.load(*range(10)) == ((None,) * 10, blocks_of(*range(10)))


@pytest.mark.usefixtures("either")
def test_records_come_back_as_they_were_and_others_are_absent(world: DiskWorld) -> None:
    assert world.load(3, 11, 7) == ((None, Miss.ABSENT, None), [*blocks_of(3), NOTHING, *blocks_of(7)])


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("at", "miss"),
    [(1, Miss.TORN), (30, Miss.FOREIGN), (60, Miss.FOREIGN), (120, Miss.DAMAGED), (HEADER_BYTES + 9, Miss.DAMAGED)],
)
def test_a_flipped_bit_is_the_same_miss_either_way_and_the_others_come(world: DiskWorld, at: int, miss: Miss) -> None:
    world.flip(4096 + at)
    misses, blocks = world.load(0, 1, 2)
    assert misses == (None, miss, None)
    assert [blocks[0], blocks[2]] == blocks_of(0, 2)


@pytest.mark.usefixtures("either")
def test_a_file_cut_short_is_torn_either_way(world: DiskWorld) -> None:
    with world.file.open("r+b") as file:
        file.truncate(4096 + HEADER_BYTES + 100)
    misses, blocks = world.load(0, 1, 2)
    assert misses == (None, Miss.TORN, Miss.TORN)
    assert blocks[0] == block_of(0)


@pytest.mark.usefixtures("either")
def test_what_was_cancelled_before_is_not_written(world: DiskWorld) -> None:
    block = bytearray(BLOCK)
    world.mover.load("disk", [(key_of(1), memoryview(block))], 5, 1e9)
    assert world.mover.cancel(5) == set()
    world.mover.step()
    [loaded] = world.mover.completions()
    assert isinstance(loaded, RecordsLoaded)
    assert loaded.misses == (Miss.LATE,)
    assert block == NOTHING


def test_a_disk_that_takes_five_seconds_keeps_nobody_waiting(world: DiskWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = SlotFiles.read, []

    def slow(files: SlotFiles, group: int, slot: int, into: memoryview) -> int:
        reads.append(slot)
        # While the disk is slow the step thread goes on: at the deadline it calls the load off, at once.
        world.clock.advance(5.0)
        assert world.mover.cancel(1) == set()
        return read(files, group, slot, into)

    monkeypatch.setattr(SlotFiles, "read_now", lambda *_: False)
    monkeypatch.setattr(SlotFiles, "read", slow)
    assert world.load(*range(10)) == ((Miss.LATE,) * 10, [NOTHING] * 10)
    assert reads == [0]
    assert world.load(1) == ((Miss.REFUSED,), [NOTHING])


def test_a_read_error_is_a_failure_of_that_record_alone(world: DiskWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    read = SlotFiles.read

    def broken(files: SlotFiles, group: int, slot: int, into: memoryview) -> int:
        if slot == 4:
            raise OSError(5, "Input/output error")
        return read(files, group, slot, into)

    monkeypatch.setattr(SlotFiles, "read_now", lambda *_: False)
    monkeypatch.setattr(SlotFiles, "read", broken)
    assert world.load(3, 4, 5) == ((None, Miss.FAILED, None), [*blocks_of(3), NOTHING, *blocks_of(5)])
