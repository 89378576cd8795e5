"""Small tiers, and the stores that carry out what a directory orders."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy, Key, Owner, Visit
from kveik.cache.evictor import Evictor
from kveik.cache.layout import LayerGroup
from kveik.offload.evicted import Gone
from kveik.offload.manager import OffloadManager
from kveik.offload.tier import Tier
from kveik.offload.tier_spec import TierSpec, Writes
from kveik.offload.transfer import Clear, Delete, Spill

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


def directory(*tiers: Tier, windows: Sequence[int | None] = (None,)) -> OffloadManager:
    return OffloadManager(groups_of(windows), SIZE, tiers)


def offer(one: OffloadManager, key: Key, groups: int, now: float, owner: Owner = b"", *, wanted: bool = False) -> None:
    """The pool gives up one content."""
    one.offered([Gone((key,), groups, owner, wanted)], now)


class Stores:
    """What really lies in the tiers, when orders are carried out one by one; a write may fail."""

    def __init__(
        self,
        directory: OffloadManager,
        chance: random.Random | None = None,
        failing: float = 0.0,
        evictor: Evictor | None = None,
    ) -> None:
        """`evictor`: where there is a pool above, who takes its orders."""
        self.directory = directory
        self.take = directory.take_orders if evictor is None else evictor.take_transfers
        self.records: list[set[tuple[Key, int]]] = [set() for _ in directory.tiers]
        self.waiting: list[Spill | Delete | Clear] = []
        self.writes = 0
        self._chance, self._failing = chance, failing

    def collect(self) -> None:
        self.waiting += [one for one in self.take() if isinstance(one, Spill | Delete | Clear)]

    def work(self, orders: int | None = None) -> None:
        """Carry out the next orders; all, where no number is given."""
        self.collect()
        count = len(self.waiting) if orders is None else min(orders, len(self.waiting))
        now, self.waiting = self.waiting[:count], self.waiting[count:]
        for order in now:
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
