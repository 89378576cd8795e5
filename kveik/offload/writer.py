"""What writes to one tier: spills, deletions and moves in the order in which they came, on a thread of its own.

A spill brings a block in a staging buffer. It is encoded here, off the step, and many are stored at once. A move reads from
this tier what it then deletes, and hands it to the next tier's staging: since everything comes in order, the room that it makes
is there for what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kveik.clock import Clock
from kveik.offload.breaker import Breaker
from kveik.offload.counts import Checked, Completion, Spilled, Tally
from kveik.offload.staging import Staging
from kveik.offload.stores.encode import Codec, copy
from kveik.offload.stores.record import HEADER_BYTES, Encoding, Miss, RecordKey, Refusal
from kveik.offload.stores.store import Reachable, Store
from kveik.offload.transfer_queue import WorkQueue
from kveik.words import counted

BATCH_RECORDS, BATCH_BYTES = 16, 16 << 20
"""Stored at once, at most."""

WAITING_MOST = 262_144
"""Keys that may wait for a tier; deletions beyond are refused."""


@dataclass(frozen=True, slots=True)
class Spill:
    """Keep the block in this buffer, or the whole record where it is sealed already."""

    key: RecordKey
    buffer: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class Deletion:
    """Forget these, and first hand them on where there is a tier to hand them to."""

    keys: tuple[RecordKey, ...]
    to: Writer | None = None


@dataclass(frozen=True, slots=True)
class Clearing:
    """Forget everything."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """GroupCapacity of what was forgotten goes back to the system."""


@dataclass(frozen=True, slots=True)
class Check:
    """How is it?"""


class Writer:
    """One tier's writing half."""

    def __init__(
        self,
        store: Store,
        codecs: Sequence[Codec],
        staging: Staging,
        breaker: Breaker,
        tally: Tally,
        clock: Clock,
        tell: Callable[[Completion], None],
    ) -> None:
        self.store = store
        self.breaker = breaker
        self.staging = staging
        self.work: WorkQueue[Spill | Deletion | Clearing | GiveBack | Check] = WorkQueue(WAITING_MOST)
        self._formats = store.formats
        self._codecs = codecs
        largest = max(one.record_bytes for one in store.formats)
        self._at_once = max(min(BATCH_RECORDS, BATCH_BYTES // largest), 1)
        encoded = any(one.encoding is not Encoding.RAW for one in codecs)
        self._scratch = [memoryview(bytearray(largest)) for _ in range(self._at_once if encoded else 0)]
        self._tally = tally
        self._clock = clock
        self._tell = tell
        self._since: float | None = None
        """Since when the store has been at it."""

        self._unforgotten: list[Deletion | Clearing] = []
        """What was still to be forgotten when it was closed."""

    def spill(self, key: RecordKey, block: memoryview) -> Refusal | None:
        """Copy a block of the pool; it may be written again when this returns. What is refused here is not told again."""
        return self._put(key, block, HEADER_BYTES, sealed=False)

    def delete(self, keys: Sequence[RecordKey], to: Writer | None = None) -> bool:
        """False: too many wait."""
        return self.work.put(Deletion(tuple(keys), to), len(keys))

    def clear(self) -> bool:
        """Forget everything that was asked to be stored before. False: too much waits."""
        return self.work.put(Clearing(), 1)

    def give_back(self) -> bool:
        """False: something waits to be written, and what becomes of it may leave room behind; ask again."""
        return not self.work.weight and self.work.put(GiveBack(), 1)

    def check(self) -> None:
        """Ask a store elsewhere how it is, where nothing else is asked."""
        if not self.work.weight and self.breaker.admits(self._clock.now()):
            self.work.put(Check(), 1)

    def hindrance(self, now: float) -> str | None:
        """Why nothing is written, in words; None: it is."""
        since, most = self._since, self.breaker.limits.seconds
        return f"no answer for {most:g} s" if since is not None and now - since > most else self.breaker.hindrance

    def step(self, *, wait: bool) -> bool:
        """Do the next, with the spills that follow a spill; False: there was nothing to do, or it is over."""
        one = self.work.take(wait=wait)
        if one is None:
            return False
        if not isinstance(one, Spill):
            try:
                if isinstance(one, Check):
                    self._check()
                else:
                    self._make_room(one)
            finally:
                self.work.done(len(one.keys) if isinstance(one, Deletion) else 1)
            return True
        spills = [one]
        while len(spills) < self._at_once and isinstance(more := self.work.take_more(Spill), Spill):
            spills.append(more)
        try:
            self._store(spills)
        finally:
            self.work.done(len(spills))
        return True

    def close(self) -> None:
        """Refuse what waits, and end."""
        waiting = self.work.close()
        self._ended([(one, Refusal.REFUSED) for one in waiting if isinstance(one, Spill)])
        # What is handed on makes room for what is not written any more.
        self._unforgotten += [
            one for one in waiting if isinstance(one, Clearing) or (isinstance(one, Deletion) and one.to is None)
        ]

    def forget_rest(self) -> None:
        """Forget what was to be forgotten when it was closed: after its thread has ended, and before its store is closed."""
        unforgotten, self._unforgotten = self._unforgotten, []
        if isinstance(self.store, Reachable) and not self.breaker.admits(self._clock.now()):
            # Elsewhere everything expires by itself, and nobody would answer.
            return
        for one in unforgotten:
            self._make_room(one)

    def _put(self, key: RecordKey, content: memoryview, at: int, *, sealed: bool) -> Refusal | None:
        """Into a buffer from `at` on, and into the queue."""
        refusal: Refusal | None = None
        if not self.breaker.admits(self._clock.now()):
            refusal = Refusal.REFUSED
        elif (buffer := self.staging.take()) is None:
            refusal = Refusal.DROPPED
        else:
            copy(content, self.staging.view(buffer, at + len(content))[at:])
            if not self.work.put(Spill(key, buffer, sealed), 1):
                self.staging.give_back(buffer)
                refusal = Refusal.DROPPED
        if refusal is not None:
            self._tally.wrote(0, 0, 0.0, [refusal])
        return refusal

    def _store(self, spills: Sequence[Spill]) -> None:
        """Encode and store; every buffer goes back, and every spill is told, exactly once."""
        refusals: Sequence[Refusal | None] = [Refusal.FAILED] * len(spills)
        size, seconds = 0, 0.0
        try:
            if not self.breaker.admits(start := self._clock.now()):
                refusals = [Refusal.REFUSED] * len(spills)
                return
            self._begin(start)
            try:
                records = [(spill.key, self._record(number, spill)) for number, spill in enumerate(spills)]
                refusals = _checked(self.store.put_many(records), len(records))
                size = sum(len(record) for (_, record), refused in zip(records, refusals, strict=True) if refused is None)
            except Exception:
                # A store does not raise; one that does has failed, and its thread goes on.
                self._tally.erred()
            failed = any(refusal in (Refusal.FAILED, Refusal.REFUSED) for refusal in refusals)
            seconds = self._finish(start, failed=failed)
        finally:
            refused = [refusal for refusal in refusals if refusal is not None]
            self._tally.wrote(len(spills) - len(refused), size, seconds, refused)
            self._ended(list(zip(spills, refusals, strict=True)))

    def _check(self) -> None:
        if isinstance(self.store, Reachable) and self.breaker.admits(start := self._clock.now()):
            self._begin(start)
            failed = True
            try:
                failed = not self.store.serves(writing=True)
            except Exception:
                self._tally.erred()
            self._finish(start, failed=failed, check=True)
            self._tell(Checked(self.store.name))

    def _begin(self, now: float) -> None:
        self.breaker.begin(now)
        self._since = now

    def _finish(self, start: float, *, failed: bool, check: bool = False) -> float:
        now = self._clock.now()
        self._since = None
        self.breaker.end(now, now - start, failed=failed, check=check)
        return now - start

    def _ended(self, spills: Sequence[tuple[Spill, Refusal | None]]) -> None:
        for spill, refusal in spills:
            self.staging.give_back(spill.buffer)
            self._tell(Spilled(self.store.name, spill.key, refusal))

    def _record(self, number: int, spill: Spill) -> memoryview:
        """The sealed record, in its own buffer where it fits as it is, or in the batch's part of the scratch."""
        form, codec = self._formats[spill.key.group], self._codecs[spill.key.group]
        if spill.sealed:
            return self.staging.view(spill.buffer, form.record_bytes)
        staged = self.staging.view(spill.buffer, HEADER_BYTES + codec.block_bytes)
        if codec.encoding is Encoding.RAW:
            record = staged
        else:
            record = self._scratch[number][: form.record_bytes]
            codec.encode(staged[HEADER_BYTES:], record[HEADER_BYTES:])
        form.seal(record, spill.key.block)
        return record

    def _make_room(self, one: Deletion | Clearing | GiveBack) -> None:
        try:
            match one:
                case GiveBack():
                    self.store.give_back()
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
        """Read, verify, and spill to the next tier. What it does not take, or is not there any more, is told as not stored."""
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
            self._tally.read(0, 0, 0.0, [*damaged, *filter(None, misses)])
        finally:
            for at, key in enumerate(keys):
                if at not in handed:
                    self._tell(Spilled(to.store.name, key, Refusal.DROPPED))

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
