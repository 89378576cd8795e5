"""Protocol of a tier's store. It carries out orders and reports how they ended; others decide which records it keeps.

A store never raises upward: a record that cannot be read is a `Miss`, one that cannot be kept a `Refusal`, and `availability`
has the reason. One thread reads, another writes, and any thread may ask for sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kveik.offload.availability import Availability
from kveik.offload.stores.record import Miss, RecordFormat, RecordKey, Refusal

Use = Callable[[int, memoryview], None]
"""Called with the number of a key among those asked for, and the record's bytes, which are good until it returns."""


class Direct(Protocol):
    """Where payloads may be read to without a copy in between, as long as that cannot take time."""

    def begin(self, number: int) -> memoryview | None:
        """Where the payload of this key may be written, until `end` or `withdraw`; None: nowhere, use `use`."""
        ...

    def end(self, number: int, header: memoryview) -> None:
        """Header and payload are there; checking them is not the store's concern."""
        ...

    def withdraw(self, number: int) -> None:
        """They could not be had at once; what was written counts for nothing, and `use` follows."""
        ...


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a store holds, which can be said before there is one."""

    capacity_bytes: int
    usable_bytes: int
    """Bound of the sum of all records' costs."""

    costs: tuple[int, ...]
    """What one record takes of it, per group."""


class Store(Protocol):
    """One place for records, bounded in bytes."""

    name: str
    capacity_bytes: int
    formats: Sequence[RecordFormat]
    """What its records look like, per group."""

    @property
    def usable_bytes(self) -> int:
        """Bound of the sum of all records' costs: the capacity without the bytes that the store needs for itself."""
        ...

    @property
    def bytes_used(self) -> int:
        """What it takes: records, what is needed around them, and space of removed ones that is kept for the next. Never above
        `capacity_bytes`.
        """
        ...

    @property
    def records(self) -> int: ...

    @property
    def availability(self) -> Availability:
        """Its state at the moment, with the reason in words for the log."""
        ...

    def cost_bytes(self, group: int) -> int:
        """What one record of a group takes of the capacity."""
        ...

    def put_many(self, records: Sequence[tuple[RecordKey, memoryview]]) -> list[Refusal | None]:
        """Keep these, in place of what has the same key. Per record None, or why not; the bytes are the caller's again."""
        ...

    def get_many(self, keys: Sequence[RecordKey], use: Use, deadline: float, direct: Direct | None = None) -> list[Miss | None]:
        """Show each record that is there to `use`, until the deadline. Per key None, or why it was not shown.

        A store that can read into memory of others, without waiting for anything, asks `direct` first.
        """
        ...

    def probe_many(self, keys: Sequence[RecordKey], deadline: float) -> Sequence[bool | None]:
        """Which of these are there, as far as can be said before the deadline. None: the store failed to say."""
        ...

    def delete_many(self, keys: Sequence[RecordKey]) -> None:
        """Forget these, as far as they are there."""
        ...

    def contents(self) -> Iterator[tuple[RecordKey, int]]:
        """All that is there, and what each takes of the capacity."""
        ...

    def release_space(self) -> None:
        """Release space that is kept for the next records, except where it is being read."""
        ...

    def clear(self) -> None:
        """Forget everything, and give back what it took."""
        ...

    def close(self) -> None:
        """Give back memory, files and connections. Nothing may be asked afterwards."""
        ...


@runtime_checkable
class Reachable(Protocol):
    """A remote store, which may be gone, or wrong from the start."""

    def serves(self, *, writing: bool) -> bool:
        """True where it reads, or writes, as far as can be told without a record. Updates `availability`."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """What reading a whole store has found."""

    records: int
    bytes: int
    misses: Counter[Miss]
    """Records that would not be used, by reason."""

    removed: int = 0
    """Of those, deleted."""

    @property
    def sound(self) -> int:
        return self.records - sum(self.misses.values())


def verify(store: Store, *, batch: int = 64, remove: bool = False) -> Report:
    """Read and check every record; `remove`: delete those that would not be used."""
    found = list(store.contents())
    misses: dict[RecordKey, Miss] = {}
    for start in range(0, len(found), batch):
        keys = [key for key, _ in found[start : start + batch]]
        misses |= _misses(store, keys)
    before = store.records
    if remove and misses:
        store.delete_many(list(misses))
    return Report(len(found), sum(size for _, size in found), Counter(misses.values()), before - store.records)


def _misses(store: Store, keys: Sequence[RecordKey]) -> dict[RecordKey, Miss]:
    misses: dict[RecordKey, Miss] = {}
    formats = store.formats

    def check(number: int, record: memoryview) -> None:
        key = keys[number]
        checked = formats[key.group].verify(record, key) if key.group < len(formats) else Miss.FOREIGN
        if isinstance(checked, Miss):
            misses[key] = checked

    for key, miss in zip(keys, store.get_many(keys, check, float("inf")), strict=True):
        if miss is not None:
            misses[key] = miss
    return misses
