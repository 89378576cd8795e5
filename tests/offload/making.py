"""Small tiers, and the stores that carry out what a directory orders."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy, Key, Owner, Visit
from kveik.cache.facts import Evicted, Fact, Gone, Inserted
from kveik.cache.layout import LayerGroup
from kveik.offload.manager import OffloadManager
from kveik.offload.tier import Tier
from kveik.offload.tier_spec import TierSpec, Writes
from kveik.offload.transfer import Clear, Delete, Spill

SIZE = 4
BLOCK = 7


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


def directory(*tiers: Tier, windows: Sequence[int | None] = (None,)) -> OffloadManager:
    return OffloadManager(groups_of(windows), SIZE, tiers)


def offer(one: OffloadManager, key: Key, groups: int, now: float, owner: Owner = b"", *, wanted: bool = False) -> None:
    """The pool gives up one content."""
    one.apply([evicted(Gone((key,), groups, owner, wanted))], now)


def evicted(run: Gone) -> Evicted:
    """As if every key had been in block 7 of every group."""
    return Evicted([run], run.keys, [[BLOCK] * len(run.keys)] * 2)


def inserted(key: Key, groups: int = 1, owner: Owner = b"") -> Inserted:
    return Inserted(key, groups, owner, (BLOCK, BLOCK))


class Stores:
    """What really lies in the tiers, when orders are carried out one by one; a write may fail."""

    def __init__(
        self,
        directory: OffloadManager,
        chance: random.Random | None = None,
        failing: float = 0.0,
        take_facts: Callable[[], list[Fact]] = list,
    ) -> None:
        """`take_facts`: of the pool, where there is one."""
        self.directory = directory
        self.take_facts = take_facts
        self.records: list[set[tuple[Key, int]]] = [set() for _ in directory.tiers]
        self.waiting: list[Spill | Delete | Clear] = []
        self.writes = 0
        self._chance, self._failing = chance, failing

    def collect(self, now: float = 0.0) -> None:
        self.directory.apply(self.take_facts(), now)
        self.waiting += [one for one in self.directory.take_transfers() if isinstance(one, Spill | Delete | Clear)]

    def work(self, orders: int | None = None, now: float = 0.0) -> None:
        """Carry out the next orders; all, where no number is given."""
        self.collect(now)
        count = len(self.waiting) if orders is None else min(orders, len(self.waiting))
        next_ones, self.waiting = self.waiting[:count], self.waiting[count:]
        for order in next_ones:
            self._do(order)

    def _do(self, order: Spill | Delete | Clear) -> None:
        if isinstance(order, Clear):
            self.records[order.tier].clear()
        elif isinstance(order, Delete):
            assert (order.key, order.group) in self.records[order.tier], "something is deleted that is not there"
            self.records[order.tier].remove((order.key, order.group))
        else:
            self._spill(order)

    def _spill(self, order: Spill) -> None:
        record = (order.key, order.group)
        there = order.source is None or record in self.records[order.source]
        self.writes += 1
        if not there or (self._chance is not None and self._chance.random() < self._failing):
            self.directory.failed(order.target, *record)
            return
        self.records[order.target].add(record)
        self.directory.stored(order.target, *record)


def seen(keys: Sequence[Key], now: float, out: int = 100) -> Visit:
    return Visit(keys, 0, out, now, now)
