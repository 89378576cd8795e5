"""Store of records in a Redis or Valkey server that several engines share.

    key of the server   = "kveik:" ++ 16 hexadecimal digits of the format ++ ":" ++ group ++ ":" ++ the block's key, 32 bytes
    value               = the record; it expires after the time to live

The server bounds its own memory (maxmemory). Our bound is on the records that this engine assumes to be there (`written.py`):
those that it wrote within the last time to live and that are not known to be gone. A thread waits for an exchange
(`redis_wire.py`) no longer than twice the timeout, and a request for that thread no longer than its deadline. No answer of a
server raises anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kveik.clock import Clock, SystemClock
from kveik.observe.events import TierState
from kveik.offload.availability import AVAILABLE, Availability
from kveik.offload.stores.address import shown
from kveik.offload.stores.record import VERSION, Miss, RecordFormat, RecordKey, Refusal
from kveik.offload.stores.redis_wire import Command, Fits, Unanswered, Wire, is_full
from kveik.offload.stores.store import Direct, Extent, Use
from kveik.offload.stores.written import Entry, Written

BATCH_BYTES = 4 << 20
"""In flight at once, so that a deadline is looked at between two batches."""

PROBE_BATCH = 512

CHECKED = b"kveik:check"

CHORES_SECONDS, CHORES_MOST = 1.0, 64
"""Interval and number of records that are looked up besides, because the server may have evicted them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLimits:
    """Bounds of a remote store."""

    capacity_bytes: int = 1 << 30
    """Bytes that this engine may have written within the last time to live."""

    ttl_seconds: int = 86_400
    """Time after which a record that was not written again is gone."""

    timeout_seconds: float = 1.0
    """Time for which a server may be silent. One exchange, connecting included, takes twice that at most: as long as a
    breaker's timeout."""


def remote_extent(formats: Sequence[RecordFormat], capacity_bytes: int) -> Extent:
    """Sizes of a `RemoteStore`."""
    return Extent(capacity_bytes, capacity_bytes, tuple(one.record_bytes for one in formats))


class RemoteStore:
    """A `Store` in a server."""

    name = "remote"

    def __init__(self, url: str, formats: Sequence[RecordFormat], limits: RemoteLimits, clock: Clock) -> None:
        """`formats`: per group. Connects when it is first asked. Raises BadValue for an address that is none, Unsupported
        without the client's package.
        """
        self.capacity_bytes = limits.capacity_bytes
        self._reads_failed: str | None = None
        self._writes_failed: str | None = None
        """Reasons, until a read or a write succeeds."""
        self._bytes_failed = 0
        """Size of the largest command of a write that has failed, until a write of that size succeeds."""
        self._limits = limits
        self._clock = clock
        self.formats: Sequence[RecordFormat] = tuple(formats)
        self._prefixes = [_prefix(one) for one in formats]
        # A value may be a byte longer than a record, so that it shows.
        longest = max(one.record_bytes for one in formats) + 1
        self._wire = Wire(url, limits.timeout_seconds, longest, clock)
        self.address = shown(url)
        """The address without user and password."""
        self._written = Written(limits.ttl_seconds)
        self._chores_after = float("-inf")

    @property
    def availability(self) -> Availability:
        if (reason := self._reads_failed) is not None:
            return Availability(TierState.UNAVAILABLE, reason)
        reason = self._writes_failed
        return AVAILABLE if reason is None else Availability(TierState.DEGRADED, reason)

    @property
    def usable_bytes(self) -> int:
        return self.capacity_bytes

    @property
    def bytes_used(self) -> int:
        return self._written.totals(self._clock.now())[1]

    @property
    def records(self) -> int:
        return self._written.totals(self._clock.now())[0]

    def cost_bytes(self, group: int) -> int:
        return self.formats[group].record_bytes

    def put_many(self, records: Sequence[tuple[RecordKey, memoryview]]) -> list[Refusal | None]:
        """One round trip. FULL is beyond our own bound, or beyond the server's."""
        refusals: list[Refusal | None] = [Refusal.FULL] * len(records)
        sent, room = [], self.capacity_bytes - self.bytes_used
        for number, (_, record) in enumerate(records):
            if len(record) <= room:
                room -= len(record)
                sent.append(number)
        ttl = b"%d" % self._limits.ttl_seconds
        commands = [(b"SET", self.server_key(records[at][0]), records[at][1], b"EX", ttl) for at in sent]
        now = self._clock.now()
        for number, answer in zip(sent, self._ask(commands, _is_ok, writing=True), strict=True):
            key, record = records[number]
            refusals[number] = _refusal(answer)
            if refusals[number] is None or (isinstance(answer, Unanswered) and answer.told):
                self._written.put(key, len(record), now, sure=refusals[number] is None)
        return refusals

    def get_many(self, keys: Sequence[RecordKey], use: Use, deadline: float, direct: Direct | None = None) -> list[Miss | None]:
        """One round trip per batch."""
        misses: list[Miss | None] = []
        largest = max((self.cost_bytes(key.group) for key in keys), default=1)
        for batch in _batches(keys, max(BATCH_BYTES // largest, 1)):
            if self._clock.now() > deadline:
                return misses + [Miss.LATE] * (len(keys) - len(misses))
            believed = dict(self._written.seen(batch))
            answers = self._ask([self._get(key) for key in batch], _is_value)
            for key, answer in zip(batch, answers, strict=True):
                miss = _miss(answer)
                if miss in (Miss.ABSENT, Miss.FOREIGN) and key in believed:
                    self._written.missing(key, believed[key])
                if miss is None:
                    use(len(misses), answer)
                misses.append(miss)
            if _is_lost(answers):
                break
        return misses + [Miss.FAILED] * (len(keys) - len(misses))

    def probe_many(self, keys: Sequence[RecordKey], deadline: float) -> list[bool | None]:
        """Asks the server, so that records of other engines are found."""
        found: list[bool | None] = []
        for batch in _batches(keys, PROBE_BATCH):
            if self._clock.now() > deadline:
                return found + [False] * (len(keys) - len(found))
            answers = self._ask([(b"EXISTS", self.server_key(key)) for key in batch], _is_count)
            found += [None if isinstance(answer, Exception) else answer == 1 for answer in answers]
            if _is_lost(answers):
                break
        return found + [None] * (len(keys) - len(found))

    def delete_many(self, keys: Sequence[RecordKey]) -> None:
        """For all engines."""
        lost = False
        for batch in _batches(keys, PROBE_BATCH):
            if lost:
                self._written.perhaps_deleted(batch)
                continue
            # A server without room deletes.
            answers = self._ask([self._unlink(key) for key in batch], _is_count, writing=True, proves=False)
            for key, answer in zip(batch, answers, strict=True):
                if isinstance(answer, Exception):
                    self._written.perhaps_deleted([key])
                else:
                    self._written.deleted(key)
            lost = _is_lost(answers)

    def serves(self, *, writing: bool) -> bool:
        """Tries a name that is not a record's and expires at once. After a failed write, one as large is tried."""
        if writing:
            [answer] = self._ask([_trial(self._bytes_failed)], _is_ok, writing=True)
            if _is_ok(answer):
                # A server takes its time over what has expired, and there may be no room for anything else.
                self._ask([(b"UNLINK", CHECKED)], _is_count, writing=True, proves=False)
            return _refusal(answer) is not Refusal.FAILED
        [answer] = self._ask([(b"GETRANGE", CHECKED, b"0", b"0")], _is_value)
        return not isinstance(answer, Exception)

    def contents(self) -> Iterator[tuple[RecordKey, int]]:
        """Records that this engine wrote and that have not expired; those of others are found by `probe_many` only."""
        return iter(self._written.entries(self._clock.now()))

    def release_space(self) -> None:
        """Does nothing: the server manages its memory."""

    def clear(self) -> None:
        """Deletes the records that this engine wrote."""
        self.delete_many([key for key, _ in self.contents()])

    def close(self) -> None:
        self._wire.close()

    def check(self) -> None:
        """The list of records agrees with its sums."""
        self._written.check()

    def server_key(self, key: RecordKey) -> bytes:
        """The server's key of a record."""
        return self._prefixes[key.group] + key.block

    def _get(self, key: RecordKey) -> Command:
        """Reads one byte more than a record, so that a longer value shows."""
        return b"GETRANGE", self.server_key(key), b"0", b"%d" % self.cost_bytes(key.group)

    def _unlink(self, key: RecordKey) -> Command:
        return b"UNLINK", self.server_key(key)

    def _ask(self, commands: Sequence[Command], fits: Fits, *, writing: bool = False, proves: bool = True) -> list[Any]:
        """The answer to each, or an exception, in one round trip. `proves`: a success may end a failure."""
        if not commands:
            return []
        now = self._clock.now()
        removed, looked_for = self._chores(now)
        chores = [self._unlink(key) for key, _ in removed] + [(b"EXISTS", self.server_key(key)) for key, _ in looked_for]
        answers = self._wire.exchange([*commands, *chores], [fits] * len(commands) + [_is_count] * len(chores))
        if not _is_lost(answers):
            self._written.answered(now)
        own, rest = answers[: len(commands)], answers[len(commands) :]
        for (key, entry), answer in zip(removed, rest[: len(removed)], strict=True):
            if _is_count(answer):
                self._written.settled(key, entry)
        for (key, entry), answer in zip(looked_for, rest[len(removed) :], strict=True):
            if answer == 0:
                self._written.missing(key, entry)
        wrong = {at: one for at, one in enumerate(own) if isinstance(one, Exception) and not _is_other_type(one)}
        reason = _reason(next(iter(wrong.values()), answers[-1] if _is_lost(answers) else None))
        if writing:
            self._judge_write([_bytes(one) for one in commands], wrong, reason, proves=proves)
        else:
            self._reads_failed = reason
        return own

    def _judge_write(self, sizes: Sequence[int], wrong: Iterable[int], reason: str | None, *, proves: bool) -> None:
        """A write smaller than one that has failed may fit where that does not, so its success proves nothing."""
        if reason is not None:
            self._writes_failed = reason
            self._bytes_failed = max([self._bytes_failed, *(sizes[at] for at in wrong)])
        elif proves and max(sizes) >= self._bytes_failed:
            self._writes_failed, self._bytes_failed = None, 0

    def _chores(self, now: float) -> tuple[list[tuple[RecordKey, Entry]], list[tuple[RecordKey, Entry]]]:
        """Records to remove and to look up besides, so that our list agrees with the server's."""
        if now < self._chores_after:
            return [], []
        self._chores_after = now + CHORES_SECONDS
        return self._written.to_settle(now, CHORES_MOST), self._written.to_look_at(CHORES_MOST)


def _reason(error: Exception | None) -> str | None:
    """Reason in words for the log, and none of the server's."""
    if error is None:
        return None
    return error.why if isinstance(error, Unanswered) else f"refuses ({type(error).__name__})"


def _trial(size: int) -> Command:
    """Command that writes so many bytes at least, which expire at once."""
    around = b"SET", CHECKED, b"PX", b"1"
    return b"SET", CHECKED, bytes(max(size - _bytes(around), 0)), b"PX", b"1"


def _bytes(command: Command) -> int:
    return sum(len(part) for part in command)


def _is_lost(answers: Sequence[Any]) -> bool:
    """True where the connection ended before all had been answered."""
    return isinstance(answers[-1], Unanswered)


def _is_other_type(answer: Any) -> bool:
    """True where the name holds something that is not a record; the server serves."""
    return isinstance(answer, Exception) and str(answer).startswith("WRONGTYPE ")


def _miss(answer: Any) -> Miss | None:
    if isinstance(answer, Exception):
        return Miss.FOREIGN if _is_other_type(answer) else Miss.FAILED
    # What is not there is as a range of it that is empty.
    return None if answer else Miss.ABSENT


def _is_ok(answer: Any) -> bool:
    return isinstance(answer, bytes) and answer == b"OK"


def _is_value(answer: Any) -> bool:
    return isinstance(answer, memoryview)


def _is_count(answer: Any) -> bool:
    return isinstance(answer, int)


def check_address(url: str) -> None:
    """Raises BadValue for an address that is none, Unsupported without the client's package. Connects to nobody."""
    Wire(url, 1.0, 0, SystemClock()).close()


def _prefix(form: RecordFormat) -> bytes:
    """Records that differ in format never meet."""
    parts = b"%d %d %d %d %b" % (VERSION, form.encoding, form.tokens, form.payload_bytes, form.fingerprint)
    return b"kveik:%b:%d:" % (hashlib.sha256(parts).hexdigest()[:16].encode(), form.group)


def _refusal(answer: object) -> Refusal | None:
    if not isinstance(answer, Exception):
        return None
    return Refusal.FULL if is_full(answer) else Refusal.FAILED


def _batches(keys: Sequence[RecordKey], size: int) -> Iterator[Sequence[RecordKey]]:
    return (keys[start : start + size] for start in range(0, len(keys), size))
