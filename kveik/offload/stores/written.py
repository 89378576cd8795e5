"""Records that one engine assumes to be in a shared server: those it wrote, until they expire or are known to be gone.

put ──answered──────────────▶ sure ──expired, deleted, or looked for and not found──▶ forgotten
 └──no answer──▶ unsure ──removed, once the server has answered for a while──▶ forgotten
      (it counts: the server may store it yet, out of its socket's buffer)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kveik.offload.stores.record import RecordKey

SETTLE_SECONDS = 10.0
"""After a server has answered again, what was sent to it before has been done or never will be."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One record. Written again it is another one, so that what was asked about the old one does not hurt the new one."""

    expires: float
    bytes: int


class Written:
    """Keys and bytes, first to expire first. Any thread may ask and tell."""

    def __init__(self, ttl_seconds: float) -> None:
        self._ttl_seconds = ttl_seconds
        self._entries: OrderedDict[RecordKey, Entry] = OrderedDict()
        self._bytes = 0
        self._unsure: dict[RecordKey, float] = {}
        """Records that may be there or not -> time from which that can be settled; infinity until the server answers."""

        self._to_look_at: list[RecordKey] = []
        self._lock = threading.Lock()

    def totals(self, now: float) -> tuple[int, int]:
        """Records, and their bytes."""
        with self._lock:
            self._expire(now)
            return len(self._entries), self._bytes

    def entries(self, now: float) -> list[tuple[RecordKey, int]]:
        """All keys and their bytes."""
        with self._lock:
            self._expire(now)
            return [(key, entry.bytes) for key, entry in self._entries.items()]

    def seen(self, keys: Iterable[RecordKey]) -> list[tuple[RecordKey, Entry]]:
        """Entries of those that are assumed to be there: for `missing`."""
        with self._lock:
            return [(key, entry) for key in keys if (entry := self._entries.get(key)) is not None]

    def put(self, key: RecordKey, size: int, now: float, *, sure: bool) -> None:
        """It was written, or may have been."""
        with self._lock:
            self._remove(key)
            self._entries[key] = Entry(now + self._ttl_seconds, size)
            self._bytes += size
            if not sure:
                self._unsure[key] = float("inf")

    def deleted(self, key: RecordKey) -> None:
        with self._lock:
            self._remove(key)

    def perhaps_deleted(self, keys: Iterable[RecordKey]) -> None:
        """It was told to delete these, and did not answer."""
        with self._lock:
            self._unsure |= {key: float("inf") for key in keys if key in self._entries}

    def missing(self, key: RecordKey, entry: Entry) -> None:
        """It was not there when it was asked for; an unsure one stays, because it may still come."""
        with self._lock:
            if self._entries.get(key) is entry and key not in self._unsure:
                self._remove(key)

    def answered(self, now: float) -> None:
        """The server has answered."""
        if self._unsure:
            with self._lock:
                self._unsure = {key: min(at, now + SETTLE_SECONDS) for key, at in self._unsure.items()}

    def to_settle(self, now: float, most: int) -> list[tuple[RecordKey, Entry]]:
        """Unsure ones that can be removed for good by now."""
        if not self._unsure:
            return []
        with self._lock:
            ripe = [key for key, at in self._unsure.items() if at <= now]
        return self.seen(ripe[:most])

    def settled(self, key: RecordKey, entry: Entry) -> None:
        """It was removed."""
        with self._lock:
            if self._entries.get(key) is entry:
                self._remove(key)

    def to_look_at(self, most: int) -> list[tuple[RecordKey, Entry]]:
        """A sample: each record's turn comes before any comes again."""
        with self._lock:
            if not self._to_look_at:
                self._to_look_at = list(self._entries)
            sample, self._to_look_at = self._to_look_at[-most:], self._to_look_at[:-most]
        return self.seen(sample)

    def check(self) -> None:
        """Sums agree."""
        with self._lock:
            assert self._bytes == sum(entry.bytes for entry in self._entries.values())
            assert self._unsure.keys() <= self._entries.keys()

    def _remove(self, key: RecordKey) -> None:
        self._unsure.pop(key, None)
        if (entry := self._entries.pop(key, None)) is not None:
            self._bytes -= entry.bytes

    def _expire(self, now: float) -> None:
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.expires > now:
                return
            self._remove(key)
