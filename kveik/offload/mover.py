"""Moves blocks between the pool and the tiers below it, on two threads per tier: one that reads, one that writes.

    step thread                                   per tier
    spill ──copies──▶ staging ──▶ writer: encode, store ─────────┐
    delete, move ───────────────▶ writer: forget, hand on        ├──▶ completions, which the step thread takes
    load, probe ────────────────▶ reader: read, verify, copy ────┘
    cancel: nothing is written to the pool for that job any more

Everything that waits is bounded: spills by their staging, loads and deletions by number. What is too much is refused at once
and counted. A tier that is slow or broken costs its own threads' time and nobody else's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from kveik.clock import Clock
from kveik.offload.breaker import Breaker, BreakerLimits, BreakerState
from kveik.offload.counts import Checked, Completion, Counts, Loaded, Sample, Tally
from kveik.offload.load_job import Load
from kveik.offload.reader import Probe, Reader
from kveik.offload.staging import Staging
from kveik.offload.stores.encode import Codec
from kveik.offload.stores.record import RecordKey, Refusal
from kveik.offload.stores.store import Reachable, Store
from kveik.offload.writer import Writer

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""At least between two times that a store elsewhere is asked how it is; a breaker may know that it is worth more patience."""

STOP_SECONDS = 5.0
"""How long `close` waits for a thread that is in the middle of something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedTier:
    """One store, how its records are made of blocks, and how far it is trusted."""

    store: Store
    codecs: Sequence[Codec]
    """Per group, of the store's formats."""

    staging_bytes: int = 32 << 20
    """Blocks that may wait to be written."""

    limits: BreakerLimits = field(default_factory=BreakerLimits)

    place: str = ""
    """Where the store is, and what named it, for people; without password."""

    @property
    def title(self) -> str:
        """For the log."""
        return f"{self.store.name} ({self.place})" if self.place else self.store.name


@dataclass(frozen=True, slots=True)
class TierState:
    """A tier at one moment, for gauges and for the log."""

    name: str
    capacity_bytes: int
    room_bytes: int
    bytes_used: int
    records: int
    trouble: str | None
    reading: BreakerState
    writing: BreakerState
    loads_waiting: int
    """Records."""

    spills_waiting_bytes: int
    staging_bytes: int
    counts: Counts


class _Lane:
    def __init__(self, tier: MovedTier, clock: Clock, tell: Callable[[Completion], None]) -> None:
        store, codecs = tier.store, tier.codecs
        for form, codec in zip(store.formats, codecs, strict=True):
            assert (form.encoding, form.payload_bytes) == (codec.encoding, codec.payload_bytes), "format and codec disagree"
        block = max(max(codec.block_bytes, codec.payload_bytes) for codec in codecs)
        self.tally = Tally()
        self.staging = Staging(block, tier.staging_bytes)
        self.reader = Reader(store, codecs, Breaker(tier.limits), self.tally, clock, tell)
        self.writer = Writer(store, codecs, self.staging, Breaker(tier.limits), self.tally, clock, tell)
        self.store = store
        self.title = tier.title
        self.threads: list[threading.Thread] = []
        self.check_after = float("-inf")

    @property
    def ailing(self) -> bool:
        """Whether something is wrong with a store that can be asked how it is."""
        wrong = self.store.trouble or self.reader.breaker.hindrance or self.writer.breaker.hindrance
        return wrong is not None and isinstance(self.store, Reachable)

    def check(self, now: float) -> None:
        if isinstance(self.store, Reachable) and now >= self.check_after:
            self.check_after = now + CHECK_SECONDS
            self.reader.check()
            self.writer.check()


class Mover:
    """All tiers below the pool, in order. Called by the step thread alone.

    `wake` is called when there are completions: by the tiers' threads, and by the caller's where something is refused at once.
    """

    def __init__(self, tiers: Sequence[MovedTier], clock: Clock, wake: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._wake = wake
        self._completions: SimpleQueue[Completion] = SimpleQueue()
        self._lanes = {tier.store.name: _Lane(tier, clock, self._tell) for tier in tiers}
        self._loads: dict[int, list[Load]] = {}
        self._stopped = False

    def start(self) -> None:
        """Start the threads. Stores elsewhere are asked how they are, which nobody waits for."""
        for name, lane in self._lanes.items():
            lane.check(self._clock.now())
            for half in (lane.reader, lane.writer):
                title = f"kveik {name} {type(half).__name__.lower()}"
                thread = threading.Thread(target=_run, args=(half,), name=title, daemon=True)
                lane.threads.append(thread)
                thread.start()

    def step(self) -> bool:
        """Without threads: do one thing per half; whether there was any. For tests and simulations."""
        halves = [half for lane in self._lanes.values() for half in (lane.reader, lane.writer)]
        return sum(half.step(wait=False) for half in halves) > 0

    @property
    def ailing(self) -> bool:
        """Whether `look_after` may have something to do."""
        return any(lane.ailing for lane in self._lanes.values())

    def look_after(self) -> None:
        """Stores elsewhere with which something is wrong are asked how they are, so that it is known when they are well."""
        now = self._clock.now()
        for lane in self._lanes.values():
            if lane.ailing:
                lane.check(now)

    def spill(self, tier: str, key: RecordKey, block: memoryview) -> Refusal | None:
        """Copy a block of the pool, to be stored. None: a `Spilled` will follow. Otherwise that was all."""
        return self._lanes[tier].writer.spill(key, block)

    def delete(self, tier: str, keys: Sequence[RecordKey]) -> bool:
        """Forget records, after what was asked before. False: too much waits; ask again."""
        return self._lanes[tier].writer.delete(keys)

    def clear(self, tier: str) -> bool:
        """Forget everything there, after what was asked before. False: as above."""
        return self._lanes[tier].writer.clear()

    def give_back(self, tier: str) -> bool:
        """GroupCapacity of forgotten records goes back to the system. False: something is being written still; ask again."""
        return self._lanes[tier].writer.give_back()

    def move(self, tier: str, keys: Sequence[RecordKey], to: str) -> bool:
        """Delete, and store in another tier what is there: a `Spilled` of that tier follows for each key. False: as above."""
        return self._lanes[tier].writer.delete(keys, self._lanes[to].writer)

    def load(self, tier: str, records: Sequence[tuple[RecordKey, memoryview]], job: int, deadline: float) -> None:
        """Read records into blocks of the pool, which nobody else may use until a `Loaded` follows or `cancel` has returned.

        A job may load from several tiers; each load gets its own answer.
        """
        load = Load(job, records, deadline)
        self._loads.setdefault(job, []).append(load)
        self._lanes[tier].reader.put(load)

    def probe(self, tier: str, keys: Sequence[RecordKey], job: int, deadline: float) -> None:
        """Ask which records are there; a `Probed` follows."""
        self._lanes[tier].reader.put(Probe(job, tuple(keys), deadline))

    def cancel(self, job: int) -> set[RecordKey]:
        """From now on nothing is written for this job. The records that had come before; each load's answer follows still."""
        return {key for load in self._loads.get(job, []) for key in load.call_off()}

    def completions(self) -> list[Completion]:
        """All that has ended since it was last asked, in order."""
        found: list[Completion] = []
        while True:
            try:
                found.append(self._completions.get_nowait())
            except Empty:
                break
        for one in found:
            if isinstance(one, Loaded):
                self._forget(one.job)
        return [one for one in found if not isinstance(one, Checked)]

    @property
    def titles(self) -> dict[str, str]:
        """Name of each tier -> how the log calls it."""
        return {name: lane.title for name, lane in self._lanes.items()}

    def room(self, tier: str) -> int:
        """Blocks that can be spilled now without one being dropped."""
        return self._lanes[tier].staging.free

    def samples(self, tier: str) -> list[Sample]:
        """What batches have taken since it was last asked."""
        return self._lanes[tier].tally.samples()

    def state(self, tier: str) -> TierState:
        """For gauges."""
        lane, now = self._lanes[tier], self._clock.now()
        return TierState(
            name=tier,
            capacity_bytes=lane.store.capacity_bytes,
            room_bytes=lane.store.room_bytes,
            bytes_used=lane.store.bytes_used,
            records=lane.store.records,
            trouble=lane.store.trouble,
            reading=lane.reader.breaker.state(now),
            writing=lane.writer.breaker.state(now),
            loads_waiting=lane.reader.work.weight,
            spills_waiting_bytes=lane.staging.bytes_used,
            staging_bytes=lane.staging.buffers * lane.staging.buffer_bytes,
            counts=lane.tally.counts(),
        )

    def hindrances(self, tier: str) -> dict[str, str]:
        """What is wrong with `reading`, `writing` and the `store` itself, in words; nothing where all is well."""
        lane, now = self._lanes[tier], self._clock.now()
        found = {
            "reading": lane.reader.hindrance(now),
            "writing": lane.writer.hindrance(now),
            "store": lane.store.trouble,
        }
        return {part: why for part, why in found.items() if why is not None}

    @property
    def busy(self) -> bool:
        """Whether a tier has something to do."""
        return any(half.work.weight > 0 for lane in self._lanes.values() for half in (lane.reader, lane.writer))

    def drain(self, deadline: float) -> bool:
        """Wait until all that was to be written is, from the upper tier down. False: the deadline came first."""
        return all(lane.writer.work.wait_until_empty(deadline - self._clock.now()) for lane in self._lanes.values())

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End the threads, as far as they come back in time. What has not begun is refused, and nothing moves any more."""
        if self._stopped:
            return
        self._stopped = True
        for job in list(self._loads):
            self.cancel(job)
        for lane in self._lanes.values():
            lane.reader.close()
            lane.writer.close()
        for lane in self._lanes.values():
            for thread in lane.threads:
                thread.join(seconds)

    def close(self, seconds: float = STOP_SECONDS) -> None:
        """Stop, and close the stores. A thread that does not come back in time keeps its store open."""
        self.stop(seconds)
        for lane in self._lanes.values():
            if any(thread.is_alive() for thread in lane.threads):
                log.warning("The tier %s does not answer; its store is left as it is.", lane.title)
            else:
                lane.writer.forget_rest()
                lane.store.close()

    def _forget(self, job: int) -> None:
        """Forget the loads of this job whose answers have come."""
        loads = [load for load in self._loads.get(job, []) if not load.told]
        if loads:
            self._loads[job] = loads
        else:
            self._loads.pop(job, None)

    def _tell(self, one: Completion) -> None:
        self._completions.put(one)
        try:
            self._wake()
        except Exception:
            # Who listens may be gone when the engine stops; the completion is there for who asks.
            log.debug("nobody was woken", exc_info=True)


def _run(half: Reader | Writer) -> None:
    while True:
        try:
            if not half.step(wait=True):
                return
        except Exception:
            log.exception("A tier's thread goes on after an error of its own.")
