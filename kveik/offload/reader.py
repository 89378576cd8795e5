"""Reading direction of a tier: loads and probes, in order and in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kveik.clock import Clock
from kveik.offload.availability import Breaker
from kveik.offload.block_load import BlockLoad
from kveik.offload.counts import Probed, RecordsLoaded
from kveik.offload.stores.encode import Codec
from kveik.offload.stores.record import Encoding, Miss, RecordFormat, RecordKey
from kveik.offload.tier_thread import TierParts, TierThread

BATCH_RECORDS, BATCH_BYTES = 32, 16 << 20
"""Most that is read at once: a load that was called off ends between two batches, and a breaker judges each batch."""

WAITING_MAX = 16_384
"""Records that may wait for a tier; more are refused."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a tier for the records that it has among these."""

    load_id: int
    keys: tuple[RecordKey, ...]
    deadline: float

    def __len__(self) -> int:
        return len(self.keys)


class Reader(TierThread[BlockLoad | Probe]):
    """Reads from one tier."""

    def __init__(self, parts: TierParts, breaker: Breaker) -> None:
        super().__init__(parts, breaker, WAITING_MAX, writing=False)
        self._at_once = max(min(BATCH_RECORDS, BATCH_BYTES // max(one.record_bytes for one in self._formats)), 1)

    def put(self, one: BlockLoad | Probe) -> None:
        """Do this in its turn. What cannot be done now is answered at once."""
        if not self._admits() or not self.work.put(one, len(one)):
            self._refuse(one)

    def _do(self, one: BlockLoad | Probe) -> None:
        if not self._admits():
            self._refuse(one)
        elif isinstance(one, Probe):
            self._probe(one)
        else:
            self._load(one)

    def _refuse(self, one: BlockLoad | Probe) -> None:
        if isinstance(one, Probe):
            self._tell(Probed(self.store.name, one.load_id, one.keys, (False,) * len(one)))
        else:
            one.miss_rest(Miss.REFUSED)
            self._end(one, 0, 0.0)

    def _load(self, load: BlockLoad) -> None:
        size, seconds = 0, 0.0
        for start in range(0, len(load), self._at_once):
            if load.called_off or not self._admits():
                break
            read, took = self._batch(load, range(start, min(start + self._at_once, len(load))))
            size, seconds = size + read, seconds + took
        load.miss_rest(Miss.LATE if load.called_off else Miss.REFUSED)
        self._end(load, size, seconds)

    def _end(self, load: BlockLoad, size: int, seconds: float) -> None:
        misses = [miss for miss in load.misses if miss is not None]
        self._tally.loaded(len(load) - len(misses), size, seconds, misses)
        load.told = True
        self._tell(RecordsLoaded(self.store.name, load.load_id, load.keys, load.misses, size, seconds))

    def _batch(self, load: BlockLoad, numbers: range) -> tuple[int, float]:
        """Bytes of the records that were loaded, and seconds."""
        part = _Part(load, numbers.start, self._formats, self._codecs, self._clock)
        keys = load.keys[numbers.start : numbers.stop]
        with self._attempt() as attempt:
            try:
                for at, miss in zip(numbers, self.store.get_many(keys, part.use, load.deadline, part), strict=True):
                    if miss is not None:
                        load.miss(at, miss)
            finally:
                load.give_up(numbers)
            attempt.failed = Miss.FAILED in load.so_far(numbers)
        return part.bytes, attempt.seconds

    def _probe(self, probe: Probe) -> None:
        found: Sequence[bool | None] = (None,) * len(probe)
        with self._attempt() as attempt:
            found = self.store.probe_many(probe.keys, probe.deadline)
            attempt.failed = None in found
        self._tell(Probed(self.store.name, probe.load_id, probe.keys, tuple(one is True for one in found)))


class _Part:
    """The records of one batch on their way to their blocks; a `Direct` for those that are stored as the pool has them."""

    def __init__(
        self, load: BlockLoad, first: int, formats: Sequence[RecordFormat], codecs: Sequence[Codec], clock: Clock
    ) -> None:
        self.bytes = 0
        """Bytes of the records that have come."""
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
        """Verify a record that is in its block already; a block whose record is wrong is never read."""
        at = self._first + number
        key, payload = self._load.keys[at], self._load.targets[at]
        miss = self._formats[key.group].verify_parts(header, payload, key)
        self.bytes += 0 if miss else len(header) + len(payload)
        self._load.end(at, miss)

    def withdraw(self, number: int) -> None:
        self._load.withdraw(self._first + number)
