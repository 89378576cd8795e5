"""Completions of a tier's threads, and the totals and samples that they count."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from kveik.observe.tiers import TierCounts
from kveik.offload.stores.record import Miss, RecordKey, Refusal

SAMPLES_KEPT = 256

DAMAGED = frozenset({Miss.TORN, Miss.FOREIGN, Miss.DAMAGED})
"""Misses of records that are there, and not what was written."""


@dataclass(frozen=True, slots=True)
class RecordStored:
    """A block was stored below the pool, or was not."""

    tier: str
    key: RecordKey
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class RecordsLoaded:
    """A load has ended. Every record without a miss was verified and lies in the pool's memory."""

    tier: str
    load_id: int
    keys: tuple[RecordKey, ...]
    misses: tuple[Miss | None, ...]
    """Per key."""

    bytes: int
    """Bytes of the records that were loaded."""

    seconds: float
    """Time of the store, from its first record to its last; 0 where it was not asked."""


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe has ended: true for each record that the tier has."""

    tier: str
    load_id: int
    keys: tuple[RecordKey, ...]
    found: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """A remote store has been checked."""

    tier: str


ThreadCompletion = RecordStored | RecordsLoaded | Probed | Checked


@dataclass(frozen=True, slots=True)
class Sample:
    """Time of one batch, from which the costs of a tier are learnt."""

    writing: bool
    records: int
    bytes: int
    seconds: float


class Tally:
    """One tier's totals and latest samples, counted by its threads and read from any."""

    def __init__(self) -> None:
        self._counts = TierCounts(
            records_loaded=0,
            bytes_loaded=0,
            seconds_loading=0.0,
            records_stored=0,
            bytes_stored=0,
            seconds_storing=0.0,
            records_deleted=0,
            misses={str(one): 0 for one in Miss},
            refusals={str(one): 0 for one in Refusal},
            errors=0,
        )
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self._lock = threading.Lock()
        self.records_damaged = 0
        """Records that were there and not what was written."""

    def loaded(self, records: int, size: int, seconds: float, misses: Collection[Miss]) -> None:
        """A load has ended."""
        with self._lock:
            self._counts.records_loaded += records
            self._counts.bytes_loaded += size
            self._counts.seconds_loading += seconds
            self._counts.misses = _sum(self._counts.misses, misses)
            self.records_damaged += sum(miss in DAMAGED for miss in misses)
        if records:
            self._samples.append(Sample(False, records, size, seconds))

    def stored(self, records: int, size: int, seconds: float, refusals: Collection[Refusal]) -> None:
        """A batch was stored, or refused."""
        with self._lock:
            self._counts.records_stored += records
            self._counts.bytes_stored += size
            self._counts.seconds_storing += seconds
            self._counts.refusals = _sum(self._counts.refusals, refusals)
        if records:
            self._samples.append(Sample(True, records, size, seconds))

    def deleted(self, records: int) -> None:
        with self._lock:
            self._counts.records_deleted += records

    def erred(self) -> None:
        with self._lock:
            self._counts.errors += 1

    def counts(self) -> TierCounts:
        """A copy."""
        with self._lock:
            return replace(self._counts)

    def samples(self) -> list[Sample]:
        """Samples since the last call, the latest at most."""
        found: list[Sample] = []
        while self._samples:
            found.append(self._samples.popleft())
        return found


def _sum(totals: Mapping[str, int], reasons: Collection[str]) -> Mapping[str, int]:
    """New totals; copies of the old ones stay as they were."""
    return {reason: count + sum(one == reason for one in reasons) for reason, count in totals.items()} if reasons else totals
