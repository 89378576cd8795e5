"""Moves blocks between the pool and the tiers below it, on two threads per tier: one reads, one writes.

    step thread                                   per tier
    store ──copies──▶ staging ──▶ writer: encode, store ─────────┐
    delete, move ───────────────▶ writer: delete, hand on        ├──▶ completions, which the step thread takes
    load, probe ────────────────▶ reader: read, verify, copy ────┘
    cancel: nothing more is written to the pool for that load

Everything that waits is bounded: stores by their staging, loads and deletions by number. Work beyond that is refused at once
and counted. A tier that is slow or broken costs its own threads' time alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from kveik.clock import Clock
from kveik.observe.events import Event, TierState
from kveik.observe.tiers import TierSnapshot
from kveik.offload.availability import BreakerLimits, TierAvailability
from kveik.offload.block_load import BlockLoad
from kveik.offload.counts import Checked, RecordsLoaded, Sample, Tally, ThreadCompletion
from kveik.offload.reader import Probe, Reader
from kveik.offload.stores.encode import Codec
from kveik.offload.stores.record import RecordKey, Refusal
from kveik.offload.stores.store import Reachable, Store
from kveik.offload.tier_thread import TierParts
from kveik.offload.writer import Staging, Writer

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""Least time between two checks of a remote store; a breaker may wait for longer."""

STOP_SECONDS = 5.0
"""Time for which `close` waits for a thread that is in the middle of something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedTier:
    """One store, the codecs of its records, and the limits of its breakers."""

    store: Store
    codecs: Sequence[Codec]
    """Per group, of the store's formats."""

    staging_bytes: int = 32 << 20
    """Bytes of blocks that may wait to be written."""

    limits: BreakerLimits = field(default_factory=BreakerLimits)

    place: str = ""
    """Option that names the store and its place, for the log; without password."""


class _Tier:
    def __init__(self, tier: MovedTier, clock: Clock, tell: Callable[[ThreadCompletion], None]) -> None:
        store, codecs = tier.store, tier.codecs
        for form, codec in zip(store.formats, codecs, strict=True):
            assert (form.encoding, form.payload_bytes) == (codec.encoding, codec.payload_bytes), "format and codec disagree"
        block = max(max(codec.block_bytes, codec.payload_bytes) for codec in codecs)
        self.store = store
        self.place = tier.place
        self.tally = Tally()
        self.staging = Staging(block, tier.staging_bytes)
        self.availability = TierAvailability(store.name, lambda: store.availability, tier.limits, clock.now())
        parts = TierParts(store, codecs, self.tally, clock, tell)
        self.reader = Reader(parts, self.availability.reading)
        self.writer = Writer(parts, self.availability.writing, self.staging)
        self.check_after = float("-inf")

    @property
    def unsettled(self) -> bool:
        return self.availability.unsettled(self.tally.records_damaged)

    def needs_check(self, now: float) -> bool:
        """True for a remote store that is not available."""
        return isinstance(self.store, Reachable) and self.availability.current(now).state is not TierState.AVAILABLE

    def check(self, now: float) -> None:
        if isinstance(self.store, Reachable) and now >= self.check_after:
            self.check_after = now + CHECK_SECONDS
            self.reader.check()
            self.writer.check()

    def events(self, now: float, *, last: bool) -> Iterator[Event]:
        for event in (
            self.availability.changed(now, last=last),
            self.availability.damaged(self.tally.records_damaged, now, last=last),
        ):
            if event is not None:
                yield event

    def snapshot(self, now: float) -> TierSnapshot:
        store, (state, reason) = self.store, self.availability.current(now)
        return TierSnapshot(
            name=store.name,
            state=state,
            reason=reason,
            capacity_bytes=store.capacity_bytes,
            usable_bytes=store.usable_bytes,
            bytes_used=store.bytes_used,
            records=store.records,
            loads_waiting=self.reader.work.weight,
            stores_waiting_bytes=self.staging.bytes_used,
            staging_bytes=self.staging.buffers * self.staging.buffer_bytes,
            counts=self.tally.counts(),
        )


class Mover:
    """Tiers below the pool, in order. Called by the step thread alone.

    `wake` is called when there are completions: by the tiers' threads, and by the caller's where work is refused at once.
    """

    def __init__(self, tiers: Sequence[MovedTier], clock: Clock, wake: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._wake = wake
        self._completions: SimpleQueue[ThreadCompletion] = SimpleQueue()
        self._tiers = {tier.store.name: _Tier(tier, clock, self._tell) for tier in tiers}
        self._loads: dict[int, list[BlockLoad]] = {}
        self._stopped = False

    @property
    def _threads(self) -> list[Reader | Writer]:
        return [thread for tier in self._tiers.values() for thread in (tier.reader, tier.writer)]

    def start(self) -> None:
        """Start the threads. Remote stores are checked in the background."""
        for tier in self._tiers.values():
            tier.check(self._clock.now())
        for thread in self._threads:
            thread.start()

    def step(self) -> bool:
        """Without threads: do one thing per direction; False: there was none. For tests and simulations."""
        return sum(thread.step(wait=False) for thread in self._threads) > 0

    def limit(self, tier: str, limits: BreakerLimits) -> None:
        """Judge a tier by other limits from now on."""
        availability = self._tiers[tier].availability
        availability.reading.limits = availability.writing.limits = limits

    @property
    def unsettled(self) -> bool:
        """True while there is work, an event to be published, or a remote store to be checked."""
        now = self._clock.now()
        return self.busy or any(tier.unsettled or tier.needs_check(now) for tier in self._tiers.values())

    def check_tiers(self) -> None:
        """Check remote stores that are not available, so that their recovery is noticed."""
        now = self._clock.now()
        for tier in self._tiers.values():
            if tier.needs_check(now):
                tier.check(now)

    def events(self, *, last: bool = False) -> list[Event]:
        """Changes of the tiers' states and damaged records, to be published now. `last`: there is no later call."""
        now = self._clock.now()
        return [event for tier in self._tiers.values() for event in tier.events(now, last=last)]

    def store(self, tier: str, key: RecordKey, block: memoryview) -> Refusal | None:
        """Copy a block of the pool, to be stored. None: a `RecordStored` follows. Otherwise nothing follows."""
        return self._tiers[tier].writer.write(key, block)

    def delete(self, tier: str, keys: Sequence[RecordKey]) -> bool:
        """Delete records, after all work before. False: too much waits; ask again."""
        return self._tiers[tier].writer.delete(keys)

    def clear(self, tier: str) -> bool:
        """Delete everything there, after all work before. False: as above."""
        return self._tiers[tier].writer.clear()

    def release_space(self, tier: str) -> bool:
        """Return the space of deleted records to the system. False: a write is waiting; ask again."""
        return self._tiers[tier].writer.release_space()

    def move(self, tier: str, keys: Sequence[RecordKey], to: str) -> bool:
        """Store records in another tier and delete them here. A `RecordStored` follows for each key. False: as above."""
        return self._tiers[tier].writer.delete(keys, self._tiers[to].writer)

    def load(self, tier: str, records: Sequence[tuple[RecordKey, memoryview]], load_id: int, deadline: float) -> None:
        """Read records into blocks of the pool, which nothing else may use until a `RecordsLoaded` follows or `cancel` returns.

        One load may read from several tiers; each tier answers for itself.
        """
        load = BlockLoad(load_id, records, deadline)
        self._loads.setdefault(load_id, []).append(load)
        self._tiers[tier].reader.put(load)

    def probe(self, tier: str, keys: Sequence[RecordKey], load_id: int, deadline: float) -> None:
        """Ask which records are there; a `Probed` follows."""
        self._tiers[tier].reader.put(Probe(load_id, tuple(keys), deadline))

    def cancel(self, load_id: int) -> set[RecordKey]:
        """Write nothing more for this load. Returns the records that had come; the answers of tiers still follow."""
        return {key for load in self._loads.get(load_id, []) for key in load.call_off()}

    def completions(self) -> list[ThreadCompletion]:
        """Returns what has ended since the last call, in order."""
        found: list[ThreadCompletion] = []
        while True:
            try:
                found.append(self._completions.get_nowait())
            except Empty:
                break
        for one in found:
            if isinstance(one, RecordsLoaded):
                self._remove(one.load_id)
        return [one for one in found if not isinstance(one, Checked)]

    @property
    def places(self) -> dict[str, str]:
        """Place of each tier, for the log."""
        return {name: tier.place for name, tier in self._tiers.items()}

    def free_buffers(self, tier: str) -> int:
        """Blocks that can be stored now without one being dropped."""
        return self._tiers[tier].staging.free_count

    def samples(self, tier: str) -> list[Sample]:
        """Times of batches since the last call."""
        return self._tiers[tier].tally.samples()

    def snapshot(self, tier: str) -> TierSnapshot:
        """The tier at this moment. From any thread."""
        return self._tiers[tier].snapshot(self._clock.now())

    def snapshots(self) -> list[TierSnapshot]:
        """All tiers at this moment, from the nearest to the pool down. From any thread."""
        return [self.snapshot(name) for name in self._tiers]

    @property
    def busy(self) -> bool:
        """True while a tier has work."""
        return any(thread.work.weight > 0 for thread in self._threads)

    def drain(self, deadline: float) -> bool:
        """Wait until all writes are done, from the upper tier down. False: the deadline came first."""
        return all(tier.writer.work.wait_until_empty(deadline - self._clock.now()) for tier in self._tiers.values())

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End the threads that come back in time. Work that has not begun is refused, and nothing moves any more."""
        if self._stopped:
            return
        self._stopped = True
        for load_id in list(self._loads):
            self.cancel(load_id)
        for thread in self._threads:
            thread.close()
        for thread in self._threads:
            thread.join(seconds)

    def close(self, seconds: float = STOP_SECONDS) -> None:
        """Stop, and close the stores. A thread that does not come back in time keeps its store open."""
        self.stop(seconds)
        for name, tier in self._tiers.items():
            if tier.reader.join(0.0) and tier.writer.join(0.0):
                tier.writer.delete_rest()
                tier.store.close()
            else:
                log.warning("tier does not answer: tier=%s; its store is left open.", name)

    def _remove(self, load_id: int) -> None:
        """Remove the parts of this load whose answers have come."""
        loads = [load for load in self._loads.get(load_id, []) if not load.told]
        if loads:
            self._loads[load_id] = loads
        else:
            self._loads.pop(load_id, None)

    def _tell(self, one: ThreadCompletion) -> None:
        self._completions.put(one)
        try:
            self._wake()
        except Exception:
            # The listener may be gone when the engine stops; the completion can be taken all the same.
            log.debug("wake failed", exc_info=True)
