"""What reads from one tier: loads and probes in the order in which they came, in batches, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kveik.clock import Clock
from kveik.offload.breaker import Breaker
from kveik.offload.counts import Checked, Completion, Loaded, Probed, Tally
from kveik.offload.load_job import Load
from kveik.offload.stores.encode import Codec
from kveik.offload.stores.record import Encoding, Miss, RecordFormat, RecordKey
from kveik.offload.stores.store import Reachable, Store
from kveik.offload.transfer_queue import WorkQueue

BATCH_RECORDS, BATCH_BYTES = 32, 16 << 20
"""Read at once, at most: between two batches a load that was called off is left, and a breaker judges what a batch takes."""

WAITING_MOST = 16_384
"""Records that may wait for a tier; more are refused."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Which of these are there?"""

    job: int
    keys: tuple[RecordKey, ...]
    deadline: float

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Check:
    """How is it?"""

    def __len__(self) -> int:
        return 1


class Reader:
    """One tier's reading half."""

    def __init__(
        self,
        store: Store,
        codecs: Sequence[Codec],
        breaker: Breaker,
        tally: Tally,
        clock: Clock,
        tell: Callable[[Completion], None],
    ) -> None:
        self.store = store
        self.breaker = breaker
        self.work: WorkQueue[Load | Probe | Check] = WorkQueue(WAITING_MOST)
        self._formats = store.formats
        self._codecs = codecs
        self._tally = tally
        self._clock = clock
        self._tell = tell
        self._since: float | None = None
        self._at_once = max(min(BATCH_RECORDS, BATCH_BYTES // max(one.record_bytes for one in store.formats)), 1)

    def put(self, one: Load | Probe) -> None:
        """Do this when its turn comes. What cannot be done now is answered at once."""
        now = self._clock.now()
        if self.stuck(now) or not self.breaker.admits(now) or not self.work.put(one, len(one)):
            self._refuse(one)

    def check(self) -> None:
        """Ask a store elsewhere how it is, where nothing else is asked."""
        if not self.work.weight and self.breaker.admits(self._clock.now()):
            self.work.put(Check(), 1)

    def stuck(self, now: float) -> bool:
        """Whether the store has not answered for longer than it may take."""
        since = self._since
        return since is not None and now - since > self.breaker.limits.seconds

    def hindrance(self, now: float) -> str | None:
        """Why nothing is read, in words; None: it is."""
        return f"no answer for {self.breaker.limits.seconds:g} s" if self.stuck(now) else self.breaker.hindrance

    def step(self, *, wait: bool) -> bool:
        """Do the next; False: there was nothing to do, or it is over."""
        one = self.work.take(wait=wait)
        if one is None:
            return False
        try:
            if isinstance(one, Check):
                self._check()
            elif not self.breaker.admits(self._clock.now()):
                self._refuse(one)
            elif isinstance(one, Probe):
                self._probe(one)
            else:
                self._load(one)
        finally:
            self.work.done(len(one))
        return True

    def close(self) -> None:
        """Refuse what waits, and end."""
        for one in self.work.close():
            if not isinstance(one, Check):
                self._refuse(one)

    def _refuse(self, one: Load | Probe) -> None:
        if isinstance(one, Probe):
            self._tell(Probed(self.store.name, one.job, one.keys, (False,) * len(one)))
        else:
            one.miss_rest(Miss.REFUSED)
            self._end(one, 0, 0.0)

    def _load(self, load: Load) -> None:
        size, seconds = 0, 0.0
        for start in range(0, len(load), self._at_once):
            if load.called_off or not self.breaker.admits(self._clock.now()):
                break
            read, took = self._batch(load, range(start, min(start + self._at_once, len(load))))
            size, seconds = size + read, seconds + took
        load.miss_rest(Miss.LATE if load.called_off else Miss.REFUSED)
        self._end(load, size, seconds)

    def _end(self, load: Load, size: int, seconds: float) -> None:
        misses = [miss for miss in load.misses if miss is not None]
        self._tally.read(len(load) - len(misses), size, seconds, misses)
        load.told = True
        self._tell(Loaded(self.store.name, load.job, load.keys, load.misses, size, seconds))

    def _batch(self, load: Load, numbers: range) -> tuple[int, float]:
        """Bytes of the records that were loaded, and seconds."""
        part = _Part(load, numbers.start, self._formats, self._codecs, self._clock)
        keys = load.keys[numbers.start : numbers.stop]
        start = self._begin()
        try:
            for at, miss in zip(numbers, self.store.get_many(keys, part.use, load.deadline, part), strict=True):
                if miss is not None:
                    load.miss(at, miss)
        except Exception:
            # A store does not raise; one that does has failed, and its thread goes on.
            self._tally.erred()
        load.give_up(numbers)
        failed = any(miss is Miss.FAILED for miss in load.so_far(numbers))
        return part.bytes, self._finish(start, failed=failed)

    def _probe(self, probe: Probe) -> None:
        start = self._begin()
        try:
            found = self.store.probe_many(probe.keys, probe.deadline)
        except Exception:
            self._tally.erred()
            found = (None,) * len(probe)
        self._finish(start, failed=None in found)
        self._tell(Probed(self.store.name, probe.job, probe.keys, tuple(one is True for one in found)))

    def _check(self) -> None:
        if isinstance(self.store, Reachable) and self.breaker.admits(self._clock.now()):
            start, failed = self._begin(), True
            try:
                failed = not self.store.serves(writing=False)
            except Exception:
                self._tally.erred()
            self._finish(start, failed=failed, check=True)
            self._tell(Checked(self.store.name))

    def _begin(self) -> float:
        now = self._clock.now()
        self.breaker.begin(now)
        self._since = now
        return now

    def _finish(self, start: float, *, failed: bool, check: bool = False) -> float:
        now = self._clock.now()
        self._since = None
        self.breaker.end(now, now - start, failed=failed, check=check)
        return now - start


class _Part:
    """The records of one batch on their way to their blocks; a `Direct` for those that are stored as the pool has them."""

    def __init__(self, load: Load, first: int, formats: Sequence[RecordFormat], codecs: Sequence[Codec], clock: Clock) -> None:
        self.bytes = 0
        """Of the records that have come."""
        self._load = load
        self._first = first
        self._formats = formats
        self._codecs = codecs
        self._clock = clock

    def use(self, number: int, record: memoryview) -> None:
        """Verify a record, then write it to its block."""
        at = self._first + number
        key = self._load.keys[at]
        payload = self._formats[key.group].verify(record, key)
        if isinstance(payload, Miss):
            self._load.miss(at, payload)
            return
        if not self._load.begin(at, self._clock.now()):
            return
        broke: Miss | None = Miss.FAILED
        try:
            self._codecs[key.group].decode(payload, self._load.targets[at])
            broke = None
            self.bytes += len(record)
        finally:
            self._load.end(at, broke)

    def begin(self, number: int) -> memoryview | None:
        at = self._first + number
        raw = self._codecs[self._load.keys[at].group].encoding is Encoding.RAW
        return self._load.targets[at] if raw and self._load.begin(at, self._clock.now()) else None

    def end(self, number: int, header: memoryview) -> None:
        """Verify a record that is in its block already: where it is not what was asked for, nobody will look at the block."""
        at = self._first + number
        key, payload = self._load.keys[at], self._load.targets[at]
        miss = self._formats[key.group].verify_parts(header, payload, key)
        self.bytes += 0 if miss else len(header) + len(payload)
        self._load.end(at, miss)

    def withdraw(self, number: int) -> None:
        self._load.withdraw(self._first + number)
