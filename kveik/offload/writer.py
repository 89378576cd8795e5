"""Writing direction of a tier: stores, deletions and moves, in order.

A block to be stored comes in a staging buffer. It is encoded here, off the step, and many are stored at once. A move reads from
this tier the records that it then deletes, and hands them to the next tier's staging: everything goes in order, so the space
that it frees is there for the stores that follow.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kveik.offload.availability import Breaker
from kveik.offload.counts import RecordStored
from kveik.offload.stores.encode import copy
from kveik.offload.stores.record import HEADER_BYTES, Encoding, Miss, RecordKey, Refusal
from kveik.offload.stores.store import Reachable
from kveik.offload.tier_thread import TierParts, TierThread
from kveik.words import counted

BATCH_RECORDS, BATCH_BYTES = 16, 16 << 20
"""Most that is stored at once."""

WAITING_MAX = 262_144
"""Keys that may wait for a tier; deletions beyond are refused."""

STAGING_BYTES = 32 << 20
"""Memory in front of each tier, for blocks that wait to be written."""

_ALIGNED = 64


class Staging:
    """Memory in front of one tier, allocated once: buffers of one size, for a record's header and a block each.

    A block is copied here at once, and its memory in the pool is free again.
    """

    def __init__(self, block_bytes: int, memory_bytes: int) -> None:
        """`block_bytes`: of the largest block. At least one buffer, whatever the memory."""
        self.buffer_bytes = -(-(HEADER_BYTES + block_bytes) // _ALIGNED) * _ALIGNED
        self.buffers = max(memory_bytes // self.buffer_bytes, 1)
        self._memory = memoryview(bytearray(self.buffers * self.buffer_bytes))
        self._free = list(range(self.buffers - 1, -1, -1))
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    @property
    def free_count(self) -> int:
        """Buffers that can be taken."""
        return len(self._free)

    @property
    def bytes_used(self) -> int:
        return len(self._taken) * self.buffer_bytes

    def allocate(self) -> int | None:
        """Number of a free buffer; None: there is none."""
        with self._lock:
            if not self._free:
                return None
            number = self._free.pop()
            self._taken.add(number)
            return number

    def free(self, number: int) -> None:
        """Free a buffer, once per `allocate`."""
        with self._lock:
            self._taken.remove(number)
            self._free.append(number)

    def view(self, number: int, size: int) -> memoryview:
        """The first bytes of a buffer."""
        start = number * self.buffer_bytes
        return self._memory[start : start + size]


@dataclass(frozen=True, slots=True)
class Write:
    """Store the block in this buffer, or the whole record where it is sealed already."""

    key: RecordKey
    buffer: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class Deletion:
    """Delete these records; where there is another tier, hand them to it first."""

    keys: tuple[RecordKey, ...]
    to: Writer | None = None


@dataclass(frozen=True, slots=True)
class Clearing:
    """Delete everything."""


@dataclass(frozen=True, slots=True)
class ReleaseSpace:
    """Return the space of deleted records to the system."""


Work = Write | Deletion | Clearing | ReleaseSpace


class Writer(TierThread[Work]):
    """Writes to one tier."""

    def __init__(self, parts: TierParts, breaker: Breaker, staging: Staging) -> None:
        super().__init__(parts, breaker, WAITING_MAX, writing=True)
        self.staging = staging
        largest = max(one.record_bytes for one in self._formats)
        self._at_once = max(min(BATCH_RECORDS, BATCH_BYTES // largest), 1)
        encoded = any(one.encoding is not Encoding.RAW for one in self._codecs)
        self._scratch = [memoryview(bytearray(largest)) for _ in range(self._at_once if encoded else 0)]
        self._undeleted: list[Deletion | Clearing] = []
        """Deletions that still waited when it was closed."""

    def write(self, key: RecordKey, block: memoryview) -> Refusal | None:
        """Copy a block of the pool; it may be written again when this returns. A refusal here is not told again."""
        return self._put(key, block, HEADER_BYTES, sealed=False)

    def delete(self, keys: Sequence[RecordKey], to: Writer | None = None) -> bool:
        """False: too many wait."""
        return self.work.put(Deletion(tuple(keys), to), len(keys))

    def clear(self) -> bool:
        """Delete everything that was to be stored before. False: too much waits."""
        return self.work.put(Clearing(), 1)

    def release_space(self) -> bool:
        """False: a write is waiting and may leave space behind; ask again."""
        return not self.work.weight and self.work.put(ReleaseSpace(), 1)

    def delete_rest(self) -> None:
        """Do the deletions that waited when it was closed: after its thread has ended, and before its store is closed."""
        undeleted, self._undeleted = self._undeleted, []
        if isinstance(self.store, Reachable) and not self._admits():
            # A remote record expires by itself, and the server does not answer.
            return
        for one in undeleted:
            self._free_space(one)

    def _do(self, one: Work) -> None:
        if not isinstance(one, Write):
            self._free_space(one)
            return
        writes = [one]
        while len(writes) < self._at_once and isinstance(more := self.work.take_more(Write), Write):
            writes.append(more)
        self._store(writes)

    def _refuse(self, one: Work) -> None:
        if isinstance(one, Write):
            self._ended([one], [Refusal.REFUSED])
        elif isinstance(one, Clearing) or (isinstance(one, Deletion) and one.to is None):
            # A move frees space for stores that do not come any more.
            self._undeleted.append(one)

    def _put(self, key: RecordKey, content: memoryview, at: int, *, sealed: bool) -> Refusal | None:
        """Into a buffer from `at` on, and into the queue."""
        refusal: Refusal | None = None
        if not self._admits():
            refusal = Refusal.REFUSED
        elif (buffer := self.staging.allocate()) is None:
            refusal = Refusal.DROPPED
        else:
            copy(content, self.staging.view(buffer, at + len(content))[at:])
            if not self.work.put(Write(key, buffer, sealed), 1):
                self.staging.free(buffer)
                refusal = Refusal.DROPPED
        if refusal is not None:
            self._tally.stored(0, 0, 0.0, [refusal])
        return refusal

    def _store(self, writes: Sequence[Write]) -> None:
        """Encode and store; every buffer goes back, and every write is told, exactly once."""
        refusals: Sequence[Refusal | None] = [Refusal.FAILED] * len(writes)
        size, seconds = 0, 0.0
        if self._admits():
            with self._attempt() as attempt:
                records = [(one.key, self._record(number, one)) for number, one in enumerate(writes)]
                refusals = _checked(self.store.put_many(records), len(records))
                size = sum(len(record) for (_, record), refused in zip(records, refusals, strict=True) if refused is None)
                attempt.failed = any(refusal in (Refusal.FAILED, Refusal.REFUSED) for refusal in refusals)
            seconds = attempt.seconds
        else:
            refusals = [Refusal.REFUSED] * len(writes)
        refused = [refusal for refusal in refusals if refusal is not None]
        self._tally.stored(len(writes) - len(refused), size, seconds, refused)
        self._ended(writes, refusals)

    def _ended(self, writes: Sequence[Write], refusals: Sequence[Refusal | None]) -> None:
        for one, refusal in zip(writes, refusals, strict=True):
            self.staging.free(one.buffer)
            self._tell(RecordStored(self.store.name, one.key, refusal))

    def _record(self, number: int, one: Write) -> memoryview:
        """The sealed record, in its own buffer where it fits as it is, or in the batch's part of the scratch."""
        form, codec = self._formats[one.key.group], self._codecs[one.key.group]
        if one.sealed:
            return self.staging.view(one.buffer, form.record_bytes)
        staged = self.staging.view(one.buffer, HEADER_BYTES + codec.block_bytes)
        if codec.encoding is Encoding.RAW:
            record = staged
        else:
            record = self._scratch[number][: form.record_bytes]
            codec.encode(staged[HEADER_BYTES:], record[HEADER_BYTES:])
        form.seal(record, one.key.block)
        return record

    def _free_space(self, one: Deletion | Clearing | ReleaseSpace) -> None:
        try:
            match one:
                case ReleaseSpace():
                    self.store.release_space()
                case Clearing():
                    records = self.store.records
                    self.store.clear()
                    self._tally.deleted(records - self.store.records)
                case Deletion(keys, to):
                    if to is not None:
                        self._hand_on(keys, to)
                    self.store.delete_many(keys)
                    self._tally.deleted(len(keys))
        except Exception:
            self._tally.erred()

    def _hand_on(self, keys: Sequence[RecordKey], to: Writer) -> None:
        """Read, verify, and store in the next tier. A record that it refuses, or that is gone, is told as not stored."""
        handed: set[int] = set()
        damaged: list[Miss] = []

        def use(at: int, record: memoryview) -> None:
            payload = self._formats[keys[at].group].verify(record, keys[at])
            if isinstance(payload, Miss):
                damaged.append(payload)
            elif self._to_other(keys[at], record, payload, to) is None:
                handed.add(at)

        try:
            misses = self.store.get_many(keys, use, float("inf"))
            self._tally.loaded(0, 0, 0.0, [*damaged, *filter(None, misses)])
        finally:
            for at, key in enumerate(keys):
                if at not in handed:
                    self._tell(RecordStored(to.store.name, key, Refusal.DROPPED))

    def _to_other(self, key: RecordKey, record: memoryview, payload: memoryview, to: Writer) -> Refusal | None:
        if to._formats[key.group] == self._formats[key.group]:
            return to._put(key, record, 0, sealed=True)
        block = bytearray(self._codecs[key.group].block_bytes)
        self._codecs[key.group].decode(payload, memoryview(block))
        return to._put(key, memoryview(block), HEADER_BYTES, sealed=False)


def _checked(answers: Sequence[Refusal | None], wanted: int) -> Sequence[Refusal | None]:
    """A store's answers, of which there must be one for each record."""
    if len(answers) != wanted:
        raise ValueError(f"a store gave {counted(len(answers), 'answer')} for {counted(wanted, 'record')}")
    return answers
