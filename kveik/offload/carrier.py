"""Carrier of transfers: hands them to the tiers' threads and tells what has ended. Decides nothing; on the step thread.

carry_out ──> mover's threads ──> completions
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kveik.cache.eviction.policy import Key
from kveik.clock import Clock
from kveik.device.device import PoolMemory
from kveik.observe.events import Event, TierKept
from kveik.offload.counts import Probed, RecordsLoaded, RecordStored
from kveik.offload.mailbox import Mailbox
from kveik.offload.mover import Mover
from kveik.offload.stores.record import Miss, RecordKey, Refusal
from kveik.offload.stores.store import Store
from kveik.offload.transfer import (
    Answered,
    Arrived,
    Cancel,
    Clear,
    Completion,
    Delete,
    LoadRecords,
    Probe,
    Stored,
    StoreRecord,
    StoreUsage,
    TierStats,
    Took,
    Transfer,
)

LOST = frozenset({Miss.ABSENT, Miss.TORN, Miss.FOREIGN, Miss.DAMAGED})
"""Not worth asking for again."""


class TierCarrier:
    """One engine's dealings with its tiers' threads."""

    def __init__(
        self,
        mover: Mover,
        stores: Sequence[Store],
        memory: PoolMemory,
        clock: Clock,
        mailbox: Mailbox,
        publish: Callable[[Event], None],
    ) -> None:
        """`stores`: in the chain's order. `mailbox`: nudged by the mover. `publish`: gets changes of the tiers'
        states, seldom enough for a log.
        """
        self.mover = mover
        self.stores = tuple(stores)
        self.mailbox = mailbox
        self._names = [store.name for store in stores]
        self._memory = memory
        self._clock = clock
        self._publish = publish
        self._loads: dict[int, LoadRecords] = {}
        """By number, until their answers have come."""

        self._numbers: dict[int, dict[tuple[str, RecordKey], int]] = {}
        """Load -> tier and record -> number of the record."""

        self._answers: Counter[int] = Counter()
        """Load -> answers that are still to come."""

        self._owed: list[list[RecordKey]] = [[] for _ in stores]
        """Per tier, deletions that the full queue refused."""

        self._unclear: set[int] = set()
        """Tiers to clear whose order the full queue refused."""

        self._cleared: set[int] = set()
        """Tiers that release their space once nothing is being written there."""

        self._refused: list[Stored] = []
        """Stores that were refused at once."""

    @property
    def unsettled(self) -> bool:
        return self.mover.unsettled or self.mover.busy or bool(self._cleared)

    def usage(self, tier: int) -> StoreUsage:
        store = self.stores[tier]
        return StoreUsage(store.bytes_used, store.usable_bytes)

    def contents(self, tier: int) -> list[tuple[Key, int]]:
        return [(key.block, key.group) for key, _ in self.stores[tier].contents()]

    def stats(self) -> list[TierStats]:
        return [TierStats(self.mover.snapshot(name), self.mover.places[name]) for name in self._names]

    def start(self) -> None:
        self.mover.start()

    # Transfers.

    def carry_out(self, transfers: Iterable[Transfer]) -> None:
        deleted: list[RecordKey] = []
        tier = 0
        for one in transfers:
            if isinstance(one, Delete):
                # Neighbours are one deletion of the mover's.
                if one.tier != tier:
                    self._delete(tier, deleted)
                    tier, deleted = one.tier, []
                deleted.append(RecordKey(one.group, one.key))
                continue
            self._delete(tier, deleted)
            deleted = []
            self._carry_out(one)
        self._delete(tier, deleted)

    def _carry_out(self, one: Transfer) -> None:
        match one:
            case StoreRecord():
                self._store(one)
            case Delete(key, group, tier):
                self._delete(tier, [RecordKey(group, key)])
            case Clear(tier):
                # All that was to be deleted before goes with it.
                self._owed[tier] = []
                self._unclear.add(tier)
                self._cleared.add(tier)
                self._pay_owed()
            case LoadRecords():
                self._load(one)
            case Cancel(load):
                self.mover.cancel(load)
            case Probe(load, tier, keys, deadline):
                asked = [RecordKey(group, key) for key in keys for group in range(len(self._memory.tensors))]
                self.mover.probe(self._names[tier], asked, load, deadline)

    def _store(self, one: StoreRecord) -> None:
        key, target = RecordKey(one.group, one.key), self._names[one.target]
        if one.source is None:
            assert one.block is not None
            taken = self.mover.store(target, key, self._memory.block(one.group, one.block)) is None
        else:
            taken = self.mover.move(self._names[one.source], [key], target)
        if not taken:
            self._refused.append(Stored(one.key, one.group, one.target, stored=False))

    def _delete(self, tier: int, keys: list[RecordKey]) -> None:
        if keys and (self._owed[tier] or tier in self._unclear or not self.mover.delete(self._names[tier], keys)):
            self._owed[tier] += keys

    def _pay_owed(self) -> None:
        """Repeat what the full queue refused."""
        for tier, keys in enumerate(self._owed):
            if tier in self._unclear and self.mover.clear(self._names[tier]):
                self._unclear.remove(tier)
            if keys and tier not in self._unclear and self.mover.delete(self._names[tier], keys):
                self._owed[tier] = []

    def _load(self, load: LoadRecords) -> None:
        by_tier: dict[int, list[tuple[RecordKey, memoryview]]] = {}
        numbers = self._numbers[load.load] = {}
        for number, (record, block) in enumerate(zip(load.records, load.blocks, strict=True)):
            key = RecordKey(record.group, record.key)
            by_tier.setdefault(record.tier, []).append((key, self._memory.block(record.group, block)))
            numbers[self._names[record.tier], key] = number
        self._loads[load.load], self._answers[load.load] = load, len(by_tier)
        for tier, records in by_tier.items():
            self.mover.load(self._names[tier], records, load.load, load.deadline)

    # What has ended.

    def completions(self) -> list[Completion]:
        ended = list[Completion](self._refused)
        self._refused = []
        for one in self.mover.completions():
            match one:
                case RecordStored(name, key, refusal):
                    full = refusal is Refusal.FULL
                    ended.append(Stored(key.block, key.group, self._names.index(name), refusal is None, full))
                case RecordsLoaded():
                    ended += self._loaded(one)
                case Probed():
                    there = [(key.block, key.group) for key, found in zip(one.keys, one.found, strict=True) if found]
                    ended.append(Answered(one.load_id, self._names.index(one.tier), there))
        for tier, name in enumerate(self._names):
            ended += [Took(tier, one.bytes, one.seconds) for one in self.mover.samples(name) if not one.writing]
        self._publish_events()
        self._pay_owed()
        self.mover.check_tiers()
        for tier in list(self._cleared):
            if tier not in self._unclear and not self._owed[tier] and self.mover.release_space(self._names[tier]):
                self._cleared.remove(tier)
        return ended

    def _loaded(self, one: RecordsLoaded) -> list[Arrived]:
        arrived = [
            self._arrived(one.load_id, self._numbers[one.load_id][one.tier, key], miss)
            for key, miss in zip(one.keys, one.misses, strict=True)
        ]
        self._answers[one.load_id] -= 1
        if not self._answers[one.load_id]:
            del self._answers[one.load_id], self._loads[one.load_id], self._numbers[one.load_id]
        return arrived

    def _arrived(self, load: int, number: int, miss: Miss | None) -> Arrived:
        return Arrived(load, number, self._loads[load].records[number], found=miss is None, lost=miss in LOST)

    def cancel(self, load: int) -> list[Arrived]:
        came = self.mover.cancel(load)
        return [self._arrived(load, number, None) for (_, key), number in self._numbers.get(load, {}).items() if key in came]

    def _publish_events(self, *, last: bool = False) -> None:
        for event in self.mover.events(last=last):
            self._publish(event)

    # The end.

    def finish(self, transfers: Sequence[Transfer], lasting: Sequence[int], seconds: float) -> None:
        deadline = self._clock.now() + seconds
        in_time, budget = self.mover.drain(deadline), 0
        self._pay_owed()
        written = [self.mover.snapshot(name).counts.records_stored for name in self._names]
        for one in transfers:
            if isinstance(one, StoreRecord):
                in_time = in_time and (budget > 0 or self.mover.drain(deadline))
                if not in_time:
                    break
                budget = (budget or min(self.mover.free_buffers(name) for name in self._names)) - 1
            self._carry_out(one)
        in_time = self.mover.drain(deadline) and in_time
        self._publish_events(last=True)
        self.mover.stop()
        wanted = Counter(one.target for one in transfers if isinstance(one, StoreRecord))
        for tier in lasting:
            self._tell_kept(self._names[tier], wanted[tier], written[tier], None if in_time else seconds)
        self.mover.close()

    def _tell_kept(self, name: str, wanted: int, written: int, late: float | None) -> None:
        """`written`: before the end, at which so many more were wanted."""
        state = self.mover.snapshot(name)
        new = state.counts.records_stored - written
        self._publish(TierKept(name, state.records, state.bytes_used, new, max(wanted - new, 0), late))
