"""What a tier has done so far, counted where it happens and read from anywhere; and how the threads tell what has ended."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kveik.offload.stores.record import Miss, RecordKey, Refusal

SAMPLES_KEPT = 256


@dataclass(frozen=True, slots=True)
class Spilled:
    """A block was stored below the pool, or was not."""

    tier: str
    key: RecordKey
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has ended. What has no miss was verified and lies in the pool's memory, all of it."""

    tier: str
    job: int
    keys: tuple[RecordKey, ...]
    misses: tuple[Miss | None, ...]
    """Per key."""

    bytes: int
    """Of the records that were loaded."""

    seconds: float
    """That the store took, from its first record to its last; 0 where it was not asked."""


@dataclass(frozen=True, slots=True)
class Probed:
    """Which of these a tier has, as far as it could say."""

    tier: str
    job: int
    keys: tuple[RecordKey, ...]
    found: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """A store elsewhere has been asked how it is."""

    tier: str


Completion = Spilled | Loaded | Probed | Checked


@dataclass(frozen=True, slots=True)
class Sample:
    """What one batch took, for those who learn what a tier costs."""

    writing: bool
    records: int
    bytes: int
    seconds: float


@dataclass(slots=True)
class Counts:
    """Totals since start."""

    records_read: int = 0
    bytes_read: int = 0
    seconds_reading: float = 0.0
    records_written: int = 0
    bytes_written: int = 0
    seconds_writing: float = 0.0
    records_deleted: int = 0
    misses: Counter[Miss] = field(default_factory=Counter)
    refusals: Counter[Refusal] = field(default_factory=Counter)
    errors: int = 0
    """Exceptions of a store that should have been answers."""


class Tally:
    """One tier's totals and latest samples."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self._lock = threading.Lock()

    def read(self, records: int, size: int, seconds: float, misses: Iterable[Miss]) -> None:
        """A batch was read."""
        with self._lock:
            self._counts.records_read += records
            self._counts.bytes_read += size
            self._counts.seconds_reading += seconds
            self._counts.misses.update(misses)
        if records:
            self._samples.append(Sample(False, records, size, seconds))

    def wrote(self, records: int, size: int, seconds: float, refusals: Iterable[Refusal]) -> None:
        """A batch was written."""
        with self._lock:
            self._counts.records_written += records
            self._counts.bytes_written += size
            self._counts.seconds_writing += seconds
            self._counts.refusals.update(refusals)
        if records:
            self._samples.append(Sample(True, records, size, seconds))

    def deleted(self, records: int) -> None:
        with self._lock:
            self._counts.records_deleted += records

    def erred(self) -> None:
        with self._lock:
            self._counts.errors += 1

    def counts(self) -> Counts:
        """A copy."""
        with self._lock:
            return replace(self._counts, misses=Counter(self._counts.misses), refusals=Counter(self._counts.refusals))

    def samples(self) -> list[Sample]:
        """Those since it was last asked, the latest at most."""
        found: list[Sample] = []
        while self._samples:
            found.append(self._samples.popleft())
        return found
