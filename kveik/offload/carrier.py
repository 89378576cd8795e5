"""Carries out what is to be moved between the pool and the tiers below it, and tells what became of it.

    scheduler, cache ──transfers──▶ carry_out ──▶ mover's threads ──completions──▶ attend ──▶ directory, loads, costs

On the step thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kveik.clock import Clock
from kveik.observe.events import Event, TierKept
from kveik.offload.cost import Costs
from kveik.offload.counts import Loaded, Probed, Stored
from kveik.offload.mailbox import Mailbox
from kveik.offload.manager import OffloadManager
from kveik.offload.mover import Mover
from kveik.offload.stores.record import Miss, RecordKey, Refusal
from kveik.offload.stores.store import Store
from kveik.offload.transfer import Cancel, Clear, Delete, Fetch, Load, Probe, Spill, Transfer, around_copies
from kveik.schedule.plan import StepPlan
from kveik.schedule.scheduler import Scheduler

LOST = frozenset({Miss.ABSENT, Miss.TORN, Miss.FOREIGN, Miss.DAMAGED})
"""What is not worth asking for again."""

COMPARE_SECONDS = 60.0
"""At least between two comparisons of a store with what is known of it; and so long nothing is offered to a shared one that was
full."""


class PoolMemory:
    """The pool's blocks as bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors`: per group, [blocks, …], each block in one piece."""
        self._rows = [tensor.view(torch.uint8).view(tensor.shape[0], -1).numpy() for tensor in tensors]

    def block(self, group: int, number: int) -> memoryview:
        return memoryview(self._rows[group][number])


@dataclass(frozen=True, slots=True)
class BelowParts:
    """What lies below the pool, ready to be joined with an engine."""

    directory: OffloadManager
    costs: Costs
    mover: Mover
    stores: tuple[Store, ...]
    """In the directory's order."""

    mailbox: Mailbox
    """Mailbox of the step thread, which the tiers' threads nudge."""


class Transfers:
    """One engine's dealings with its tiers."""

    def __init__(
        self,
        parts: BelowParts,
        scheduler: Scheduler,
        memory: PoolMemory,
        clock: Clock,
        publish: Callable[[Event], None],
    ) -> None:
        """`publish` gets what becomes of the tiers, seldom enough for a log."""
        self.parts = parts
        self._scheduler = scheduler
        self._memory = memory
        self._clock = clock
        self._groups = len(scheduler.kv_cache.usage)
        self._names = [store.name for store in parts.stores]
        self._publish = publish
        self._fetches: dict[int, Mapping[tuple[str, RecordKey], int]] = {}
        """Job -> its fetches' numbers, until the answers have come."""

        self._answers: dict[int, int] = {}
        """Job -> answers that are still to come."""

        self._owed: dict[int, list[RecordKey]] = {number: [] for number in range(len(parts.stores))}
        """Deletions for which there was no room in the queue."""

        self._unclear: set[int] = set()
        """Tiers that are to be emptied, for which there was no room in the queue either."""

        self._cleared: set[int] = set()
        """Tiers whose room goes back to the system once nothing is being written there."""

        self._compared = {number: float("-inf") for number in self._owed}

    def attend(self) -> None:
        """Take note of what has ended, and of what comes too late. Before every plan."""
        now, below = self._clock.now(), self._scheduler.below
        self._take_completions(now)
        for tier, store in zip(self.parts.directory.tiers, self.parts.stores, strict=True):
            if tier.spec.ours:
                tier.resize(store.usable_bytes)
        shared = [number for number, tier in enumerate(self.parts.directory.tiers) if not tier.spec.ours]
        self.parts.directory.closed = frozenset(number for number in shared if self._is_full(number, now))
        for job in below.due(now):
            # What has come is of use, though not all of it has.
            came = self.parts.mover.cancel(job)
            for (_, key), number in self._fetches.get(job, {}).items():
                if key in came:
                    below.arrived(job, number, found=True)
        self._pay_owed()
        self.parts.mover.check_tiers()
        for number in list(self._cleared):
            if number not in self._unclear and not self._owed[number] and self.parts.mover.give_back(self._names[number]):
                self._cleared.remove(number)

    @property
    def unsettled(self) -> bool:
        """Whether there may be something to tell of a tier soon, or to do there, though none has anything to say."""
        return self.parts.mover.unsettled or bool(self._cleared)

    def carry_out(self, copy: Callable[[], object] = lambda: None) -> None:
        """All that was decided, in order: after every plan, before anything is written into the pool.

        `copy` carries out the plan's copies.
        """
        before, loads = around_copies(self._scheduler.below.take_transfers(self._clock.now()))
        deleted: list[Delete] = []
        for one in before:
            if isinstance(one, Delete) and (not deleted or deleted[0].tier == one.tier):
                deleted.append(one)
                continue
            self._delete(deleted)
            deleted = []
            if isinstance(one, Delete):
                deleted.append(one)
            else:
                self._carry_out(one)
        self._delete(deleted)
        copy()
        for load in loads:
            self._load(load)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step has run: how long computing takes is learnt from it, and what it brought may have to be written below."""
        behind = ~plan.decoding
        if behind.any():
            counts, starts = plan.counts[behind], plan.starts[behind]
            pairs = float((counts * starts + counts * (counts + 1) / 2).sum())
            self.parts.costs.prefill.observe(int(counts.sum()), pairs, seconds)
        self.carry_out()

    def retire(self, seconds: float) -> None:
        """The engine stops: what is worth keeping goes where it lasts, as far as the time suffices; then all is closed."""
        mover, directory = self.parts.mover, self.parts.directory
        deadline = self._clock.now() + seconds
        in_time, budget = mover.drain(deadline), 0
        self._pay_owed()
        written = [mover.snapshot(name).counts.records_stored for name in self._names]
        orders = self._scheduler.below.take_transfers(self._clock.now())
        directory.retire(self._scheduler.kv_cache.cached_contents(), self._clock.now())
        orders += directory.take_transfers()
        for one in orders:
            if isinstance(one, Spill):
                in_time = in_time and (budget > 0 or mover.drain(deadline))
                if not in_time:
                    break
                budget = (budget or min(mover.room(name) for name in self._names)) - 1
            self._carry_out(one)
        in_time = mover.drain(deadline) and in_time
        self._publish_events(last=True)
        mover.stop()
        wanted = Counter(one.target for one in orders if isinstance(one, Spill))
        for number, tier in enumerate(directory.tiers):
            if tier.spec.lasts:
                self._tell_kept(tier.spec.name, wanted[number], written[number], None if in_time else seconds)
        mover.close()

    def _tell_kept(self, name: str, wanted: int, written: int, late: float | None) -> None:
        """`written`: before the end, at which so many more were wanted."""
        state = self.parts.mover.snapshot(name)
        new = state.counts.records_stored - written
        self._publish(TierKept(name, state.records, state.bytes_used, new, max(wanted - new, 0), late))

    def _carry_out(self, one: Transfer) -> None:
        mover = self.parts.mover
        match one:
            case Spill():
                self._spill(one)
            case Delete():
                self._delete([one])
            case Clear(tier):
                # All that was to be deleted before goes with it.
                self._owed[tier] = []
                self._unclear.add(tier)
                self._cleared.add(tier)
                self._pay_owed()
            case Load():
                self._load(one)
            case Cancel(job):
                mover.cancel(job)
            case Probe(job, tier, keys, deadline):
                asked = [RecordKey(group, key) for key in keys for group in range(self._groups)]
                mover.probe(self._names[tier], asked, job, deadline)

    def _spill(self, order: Spill) -> None:
        key, directory, target = RecordKey(order.group, order.key), self.parts.directory, self._names[order.target]
        if order.source is None:
            assert order.block is not None
            refusal = self.parts.mover.store(target, key, self._memory.block(order.group, order.block))
            if refusal is not None:
                directory.failed(order.target, order.key, order.group)
        elif not self.parts.mover.move(self._names[order.source], [key], target):
            directory.failed(order.target, order.key, order.group)

    def _delete(self, orders: Sequence[Delete]) -> None:
        if orders:
            self._forget(orders[0].tier, [RecordKey(one.group, one.key) for one in orders])

    def _forget(self, tier: int, keys: list[RecordKey]) -> None:
        if self._owed[tier] or tier in self._unclear or not self.parts.mover.delete(self._names[tier], keys):
            self._owed[tier] += keys

    def _pay_owed(self) -> None:
        """What there was no room for in the queue, as far as there is now."""
        for tier, keys in self._owed.items():
            if tier in self._unclear and self.parts.mover.clear(self._names[tier]):
                self._unclear.remove(tier)
            if keys and tier not in self._unclear and self.parts.mover.delete(self._names[tier], keys):
                self._owed[tier] = []

    def _load(self, load: Load) -> None:
        by_tier: dict[int, list[tuple[RecordKey, memoryview]]] = {}
        numbers: dict[tuple[str, RecordKey], int] = {}
        for number, (fetch, block) in enumerate(zip(load.fetches, load.blocks, strict=True)):
            key = _key_of(fetch)
            by_tier.setdefault(fetch.tier, []).append((key, self._memory.block(fetch.group, block)))
            numbers[self._names[fetch.tier], key] = number
        self._fetches[load.job], self._answers[load.job] = numbers, len(by_tier)
        for tier, records in by_tier.items():
            self.parts.mover.load(self._names[tier], records, load.job, load.deadline)

    def _take_completions(self, now: float) -> None:
        for one in self.parts.mover.completions():
            match one:
                case Stored():
                    self._stored(one)
                case Loaded():
                    self._loaded(one)
                case Probed():
                    there = [key for key, found in zip(one.keys, one.found, strict=True) if found]
                    tier = self._names.index(one.tier)
                    self.parts.directory.adopt(tier, [(key.block, key.group) for key in there], now)
                    self._scheduler.below.answered(one.job)
        for name in self._names:
            for sample in self.parts.mover.samples(name):
                if not sample.writing:
                    self.parts.costs.tiers[name].observe(sample.bytes, sample.seconds, now)
        self._publish_events()

    def _publish_events(self, *, last: bool = False) -> None:
        for event in self.parts.mover.events(last=last):
            self._publish(event)

    def _stored(self, one: Stored) -> None:
        tier, directory = self._names.index(one.tier), self.parts.directory
        if one.refusal is not None:
            directory.failed(tier, one.key.block, one.key.group)
            if one.refusal is Refusal.FULL:
                self._compare(tier)
            return
        directory.stored(tier, one.key.block, one.key.group)
        if not directory.tiers[tier].stored(one.key.block) >> one.key.group & 1:
            # It was to go while it was being written.
            self._forget(tier, [one.key])

    def _compare(self, tier: int) -> None:
        """A store is full where there should be room: after trouble it may have what was given up for lost."""
        records, now = self.parts.directory.tiers[tier], self._clock.now()
        if now >= self._compared[tier] + COMPARE_SECONDS:
            self._compared[tier] = now
            if not records.spec.ours:
                # What others wrote is there by right.
                return
            contents = self.parts.stores[tier].contents()
            self._forget(tier, [key for key, _ in contents if not records.holds(key.block)])

    def _is_full(self, tier: int, now: float) -> bool:
        """Whether a tier in which we make no room by deleting would refuse what it is offered, or did so a moment ago."""
        store, largest = self.parts.stores[tier], max(self.parts.directory.tiers[tier].spec.record_bytes)
        return store.bytes_used + largest > store.usable_bytes or now < self._compared[tier] + COMPARE_SECONDS

    def _loaded(self, one: Loaded) -> None:
        numbers = self._fetches[one.job]
        for key, miss in zip(one.keys, one.misses, strict=True):
            number = numbers[one.tier, key]
            told = self._scheduler.below.arrived(one.job, number, found=miss is None, sound=miss not in LOST)
            if miss in LOST:
                self._lost(self._names.index(one.tier), key, told=told)
        self._answers[one.job] -= 1
        if not self._answers[one.job]:
            del self._answers[one.job], self._fetches[one.job]

    def _lost(self, tier: int, key: RecordKey, *, told: bool) -> None:
        """A record is not there, or not what it should be: it is computed again, and written again when it goes."""
        if not told:
            # Nobody waits for it any more, mostly because another one before it was lost.
            self.parts.directory.gone(tier, key.block, key.group)
        self._forget(tier, [key])


def _key_of(fetch: Fetch) -> RecordKey:
    return RecordKey(fetch.group, fetch.key)
