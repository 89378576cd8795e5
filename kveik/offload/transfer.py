"""Transfers between pool and tiers, their completions, and the protocol of what carries them out. Values only.

    OffloadManager ──transfers──> Carrier ──completions──> OffloadManager

Transfers are carried out in the order in which they are given, as far as a tier's own order goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kveik.cache.eviction.policy import Key
from kveik.observe.tiers import TierSnapshot
from kveik.offload.mailbox import Mailbox


class StoreRecord(NamedTuple):
    """Copy a record. The source has it until a later transfer, or the pool's next write into the block."""

    key: Key
    group: int
    source: int | None
    """Number of the tier; None: the pool."""

    target: int
    block: int | None = None
    """Of the pool, where the pool is the source."""


class Delete(NamedTuple):
    """Remove a record from a tier; it is not looked for any more."""

    key: Key
    group: int
    tier: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Remove all records from a tier."""

    tier: int


TierTransfer = StoreRecord | Delete | Clear
"""A transfer below the pool, or out of it."""


class RecordLoad(NamedTuple):
    """One record to load into the pool."""

    key: Key
    group: int
    place: int
    """Of its block in the sequence."""

    tier: int


@dataclass(frozen=True, slots=True)
class LoadRecords:
    """Copy records into blocks of the pool, which nothing else reads or writes before each has ended."""

    load: int
    """Never used twice."""

    records: tuple[RecordLoad, ...]
    blocks: tuple[int, ...]
    """Per record, of its group."""

    deadline: float
    """Seconds on the engine's clock, after which the records are not wanted any more."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Write nothing more for a load. Its blocks may be taken for something else from the next write on."""

    load: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a tier in which others write too which records of these keys it has, of all groups."""

    load: int
    tier: int
    keys: tuple[Key, ...]
    deadline: float


Transfer = TierTransfer | LoadRecords | Cancel | Probe


class Stored(NamedTuple):
    """End of a `StoreRecord`."""

    key: Key
    group: int
    tier: int
    stored: bool
    full: bool = False
    """True where it was not stored because the tier is full."""


class Arrived(NamedTuple):
    """A load of one record has ended."""

    load: int
    number: int
    """Of the record in the load."""

    record: RecordLoad

    found: bool
    """True where the record was verified and lies in its block, all of it."""

    lost: bool = False
    """True where the record is not in the tier, or is damaged there."""


class Answered(NamedTuple):
    """A probe has ended."""

    load: int
    tier: int
    found: Sequence[tuple[Key, int]]
    """Keys and groups of records that are there."""


class Took(NamedTuple):
    """A tier has read so many bytes at once."""

    tier: int
    size: int
    seconds: float


Completion = Stored | Arrived | Answered | Took


class StoreUsage(NamedTuple):
    """Bytes of one store, which can use less than its capacity at times."""

    used: int
    total: int


class TierStats(NamedTuple):
    """One tier at one moment."""

    snapshot: TierSnapshot
    place: str
    """Folder or address with its flag, for the log."""

    contents: int = 0
    """Keys of which the offload manager knows records there."""


class Carrier(Protocol):
    """Moves records between pool and tiers; it knows memory, stores and threads, and decides nothing."""

    mailbox: Mailbox
    """Rung when there are completions."""

    @property
    def unsettled(self) -> bool:
        """True while a tier may soon have an event or work, though there are no completions."""
        ...

    def carry_out(self, transfers: Iterable[Transfer]) -> None:
        """Carry transfers out in order. On return, blocks to store are read and nothing more is written for cancelled loads."""
        ...

    def completions(self) -> list[Completion]:
        """Returns what has ended since the last call."""
        ...

    def cancel(self, load: int) -> list[Arrived]:
        """Write nothing more for this load. Returns its records that have come."""
        ...

    def usage(self, tier: int) -> StoreUsage: ...

    def contents(self, tier: int) -> list[tuple[Key, int]]:
        """Keys and groups of all records that a tier's store has."""
        ...

    def stats(self) -> list[TierStats]:
        """Returns the state of every tier. From any thread."""
        ...

    def start(self) -> None:
        """Start the threads."""
        ...

    def finish(self, transfers: Sequence[Transfer], lasting: Sequence[int], seconds: float) -> None:
        """Carry these out as far as the time suffices, close the stores, and tell what the lasting tiers keep."""
        ...
