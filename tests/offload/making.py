"""Small tiers, and the stores that carry out a chain's orders."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy, Key, Owner, Visit
from kveik.cache.facts import Evicted, Fact, Gone
from kveik.cache.layout import LayerGroup
from kveik.offload.mailbox import Mailbox
from kveik.offload.tier import Tier, TierSpec, Writes
from kveik.offload.tier_chain import TierChain
from kveik.offload.transfer import (
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
    Transfer,
)

SIZE = 4


def groups_of(windows: Sequence[int | None]) -> list[LayerGroup]:
    return [LayerGroup((number,), 1, 1, window) for number, window in enumerate(windows)]


def tier(
    capacity: int,
    *,
    name: str = "ram",
    sizes: Sequence[int] = (1,),
    policy: EvictionPolicy | None = None,
    writes: Writes = "filtered",
    factor: float | None = None,
    lasts: bool = False,
    ours: bool = True,
) -> Tier:
    """By least recent use and unfiltered, unless something else is asked for."""
    spec = TierSpec(
        name=name, capacity_bytes=capacity, record_bytes=tuple(sizes), writes=writes, factor=factor, lasts=lasts, ours=ours
    )
    return Tier(spec, policy or LruPolicy())


def hazard(seed: int = 0) -> HazardPolicy:
    return HazardPolicy(512, random.Random(seed))


def chained(*tiers: Tier, windows: Sequence[int | None] = (None,)) -> TierChain:
    return TierChain(groups_of(windows), SIZE, tiers)


def evicted(keys: Sequence[Key], groups: int, owner: Owner = b"", *, wanted: bool = False) -> Evicted:
    """These contents, all from block 0."""
    blocks = [[0] * len(keys)] * groups.bit_length()
    return Evicted([Gone(keys, groups, owner, wanted)], keys, blocks)


def offer(one: TierChain, key: Key, groups: int, now: float, owner: Owner = b"", *, wanted: bool = False) -> None:
    """The pool evicts one content."""
    one.absorb([evicted((key,), groups, owner, wanted=wanted)], now)


class Stores:
    """What really lies in the tiers, when orders are carried out one by one; a write may fail."""

    def __init__(
        self,
        chain: TierChain,
        chance: random.Random | None = None,
        failing: float = 0.0,
        take_facts: Callable[[], list[Fact]] = list,
    ) -> None:
        """`take_facts`: of the pool above, where there is one."""
        self.chain = chain
        self.take_facts = take_facts
        self.records: list[set[tuple[Key, int]]] = [set() for _ in chain.tiers]
        self.waiting: list[StoreRecord | Delete | Clear] = []
        self.writes = 0
        self._chance, self._failing = chance, failing

    def collect(self, now: float = 0.0) -> None:
        self.chain.absorb(self.take_facts(), now)
        self.waiting += self.chain.take_transfers()

    def work(self, orders: int | None = None, now: float = 0.0) -> None:
        """Carry out the next orders; all, where no number is given."""
        self.collect(now)
        count = len(self.waiting) if orders is None else min(orders, len(self.waiting))
        due, self.waiting = self.waiting[:count], self.waiting[count:]
        for order in due:
            self._do(order)

    def _do(self, order: StoreRecord | Delete | Clear) -> None:
        if isinstance(order, Clear):
            self.records[order.tier].clear()
        elif isinstance(order, Delete):
            assert (order.key, order.group) in self.records[order.tier], "something is deleted that is not there"
            self.records[order.tier].remove((order.key, order.group))
        else:
            self._store(order)

    def _store(self, order: StoreRecord) -> None:
        record = (order.key, order.group)
        there = order.source is None or record in self.records[order.source]
        self.writes += 1
        if not there or (self._chance is not None and self._chance.random() < self._failing):
            self.chain.failed(order.target, *record)
            return
        self.records[order.target].add(record)
        self.chain.stored(order.target, *record)


class HandCarrier:
    """Stores at once, and loads when a test puts an end into `ended`."""

    def __init__(self, chain: TierChain) -> None:
        self.mailbox = Mailbox()
        self.unsettled = False
        self.loads: list[LoadRecords] = []
        self.probes: list[Probe] = []
        self.cancelled: list[int] = []
        self.ended: list[Completion] = []
        self._rooms = [StoreUsage(0, tier.spec.capacity_bytes) for tier in chain.tiers]

    def carry_out(self, transfers: Iterable[Transfer]) -> None:
        for one in transfers:
            self._carry_out(one)

    def _carry_out(self, one: Transfer) -> None:
        match one:
            case StoreRecord():
                self.ended.append(Stored(one.key, one.group, one.target, stored=True))
            case LoadRecords():
                self.loads.append(one)
            case Probe():
                self.probes.append(one)
            case Cancel(load):
                self.cancelled.append(load)

    def completions(self) -> list[Completion]:
        ended, self.ended = self.ended, []
        return ended

    def cancel(self, load: int) -> list[Arrived]:
        return []

    def usage(self, tier: int) -> StoreUsage:
        return self._rooms[tier]

    def contents(self, tier: int) -> list[tuple[Key, int]]:
        return []

    def stats(self) -> list[TierStats]:
        return []

    def start(self) -> None: ...

    def finish(self, transfers: Sequence[Transfer], lasting: Sequence[int], seconds: float) -> None: ...


def seen(keys: Sequence[Key], now: float, out: int = 100) -> Visit:
    return Visit(keys, 0, out, now, now)
