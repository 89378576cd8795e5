"""Whatever happens to a disk's folder and in whatever order, a slow model beside the store knows what may be found in it.

What is found is what was stored, to the byte; what was forgotten is never found; the store goes on, within its bound.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores.disk import PAUSE_SECONDS_MOST, DiskStore
from kveik.offload.stores.disk_files import SlotFiles
from kveik.offload.stores.disk_index import DiskIndex
from kveik.offload.stores.record import Miss, RecordKey
from tests.offload.stores.records import FORMATS, key_of, pairs, payloads, read
from tests.offload.stores.test_disk import scanned
from tests.seeds import over_seeds

NUMBERS = 150
BOUNDS = (600_000, 1_000_000, 3_000_000)


def cut(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size + 1))


def flip(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(chance.randrange(1, 8) if content else 0):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    with file.open("r+b") as opened:
        opened.write(content)


def lengthen(file: Path, chance: random.Random) -> None:
    os.truncate(file, file.stat().st_size + chance.randrange(1, 1 << 33))


def append(file: Path, chance: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(chance.randbytes(chance.randrange(1, 3000)))


def remove(file: Path, chance: random.Random) -> None:
    file.unlink()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "cut": cut, "flip": flip, "lengthen": lengthen, "append": append, "remove": remove,
}  # fmt: skip


class World:
    """A store, what is done to it, and what may be found: less where something was damaged."""

    def __init__(self, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance, self.folder, self.clock = random.Random(seed), folder, StepClock()
        self.bound = self.chance.choice(BOUNDS)
        self.may: set[RecordKey] = set()
        self.ever: set[RecordKey] = set()
        self.failing = False
        for owner, name in ((SlotFiles, "write"), (SlotFiles, "cut"), (DiskIndex, "change"), (DiskIndex, "begin")):
            monkeypatch.setattr(owner, name, self._unless_failing(getattr(owner, name)))
        self.store = self._opened()

    def _unless_failing(self, act: Callable[..., object]) -> Callable[..., object]:
        def acting(*arguments: object, **named: object) -> object:
            if self.failing:
                raise OSError(5, "Input/output error")
            return act(*arguments, **named)

        return acting

    def _opened(self) -> DiskStore:
        return DiskStore(self.folder, FORMATS, self.bound, self.clock)

    def some(self, most: int) -> tuple[list[int], int]:
        return [self.chance.randrange(NUMBERS) for _ in range(self.chance.randrange(1, most))], self.chance.randrange(3)

    def stored(self, key: RecordKey) -> None:
        self.may.add(key)
        self.ever.add(key)

    def put(self) -> None:
        numbers, group = self.some(16)
        for number, refusal in zip(numbers, self.store.put_many(pairs(numbers, group)), strict=True):
            if refusal is None:
                self.stored(key_of(number, group))
        self.clock.advance(self.chance.choice((0.0, 0.1, 2.0, 400.0)))

    def delete(self) -> None:
        numbers, group = self.some(60)
        self.store.delete_many([key_of(number, group) for number in numbers])
        self.may -= {key_of(number, group) for number in numbers}
        assert all(isinstance(found, Miss) for found in read(self.store, numbers, group))

    def clear(self) -> None:
        self.store.clear()
        self.may.clear()

    def trouble(self) -> None:
        self.failing = not self.failing

    def leave(self) -> None:
        """The index goes away and comes back."""
        index = self.folder / "index"
        if index.exists():
            index.rename(self.folder / "away")
            if self.chance.random() < 0.5:
                self.delete()
            number = self.chance.randrange(NUMBERS)
            if self.store.put_many(pairs([number])) == [None]:
                self.stored(key_of(number))
            if index.exists():
                # One that was begun meanwhile, and knows what the other does not.
                self.may = set(self.ever)
            (self.folder / "away").rename(index)

    def crash(self) -> None:
        """Nothing is done at the end, so that what was owed comes back."""
        if self.store.pending:
            self.may = set(self.ever)
        self.failing = False
        self.store._leave()
        self.store = self._opened()

    def reopen(self) -> None:
        self.failing = False
        self.store.close()
        self.bound = self.chance.choice((self.bound, self.bound, *BOUNDS))
        self.store = self._opened()

    def damage(self) -> None:
        running = self.chance.random() < 0.3
        if not running:
            self.failing = False
            self.store.close()
        name, how = self.chance.choice(("index", "index", "records-0", "records-1")), self.chance.choice(list(DAMAGES))
        if (self.folder / name).exists():
            DAMAGES[how](self.folder / name, self.chance)
        if name == "index" and how in ("cut", "flip"):
            # With it may go what it says of deletions.
            self.may = set(self.ever)
        if not running:
            self.store = self._opened()

    def judge(self) -> None:
        self.store.check()
        assert {key for key, _ in self.store.contents()} <= self.may
        for group in range(3):
            for number, one in enumerate(read(self.store, range(NUMBERS), group)):
                assert isinstance(one, Miss) or [one] == payloads([number], group)

    def recover(self) -> None:
        """In the end all is as it should be."""
        self.failing = False
        for number in range(3):
            self.clock.advance(2 * PAUSE_SECONDS_MOST)
            self.store.put_many(pairs([1000 + number]))
        assert self.store.availability == AVAILABLE
        self.reopen()
        assert scanned(self.folder) == self.store.bytes_used <= self.bound
        self.store.close()


OPERATIONS: dict[Callable[[World], None], int] = {
    World.put: 8,
    World.delete: 4,
    World.damage: 3,
    World.reopen: 2,
    World.clear: 1,
    World.trouble: 1,
    World.leave: 1,
    World.crash: 1,
}


def live(folder: Path, seed: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        world = World(folder, seed, patched)
        for act in world.chance.choices(list(OPERATIONS), list(OPERATIONS.values()), k=steps):
            act(world)
            world.judge()
        world.recover()


@over_seeds(8)
def test_only_what_was_stored_and_not_forgotten_is_found(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    live(tmp_path, seed, 40, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_only_what_was_stored_and_not_forgotten_is_found_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100, 300):
        live(tmp_path / str(seed), seed, 120, monkeypatch)
