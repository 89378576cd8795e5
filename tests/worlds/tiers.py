"""Tiers without bytes: they remember what the slots held, are slow, fail, lose records, and answer too late."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.layout import LayerGroup
from kveik.offload.mailbox import Mailbox
from kveik.offload.tier import Tier, TierSpec
from kveik.offload.tier_chain import TierChain
from kveik.offload.transfer import (
    Answered,
    Arrived,
    Cancel,
    Clear,
    Completion,
    Delete,
    LoadRecords,
    Probe,
    RecordLoad,
    Stored,
    StoreRecord,
    StoreUsage,
    Transfer,
)
from tests.worlds.memory import MemoryExecutor

Content = list[int | None]
RUBBISH = -7
"""In a block that is being loaded, until all of it has come."""


@dataclass
class Coming:
    """A record on its way into the pool."""

    load: int
    number: int
    record: RecordLoad
    block: int
    due: float
    content: Content | None


def draw_chain(chance: random.Random, groups: list[LayerGroup], block_size: int) -> TierChain:
    tiers = []
    for name in chance.choice((("ram",), ("ram", "disk"), ("ram", "remote"), ("remote",))):
        spec = TierSpec(
            name=name,
            capacity_bytes=chance.choice((3, 10, 60, 400)),
            record_bytes=tuple(chance.choice((1, 1, 2)) for _ in groups),
            writes=chance.choice(("filtered", "write-through", "second-touch")),
            factor=chance.choice((None, 1.0)),
            ours=name != "remote",
        )
        tiers.append(Tier(spec, LruPolicy()))
    return TierChain(groups, block_size, tiers)


class SimulatedTiers:
    """A carrier that carries transfers out over steps."""

    def __init__(self, chance: random.Random, chain: TierChain, executor: MemoryExecutor) -> None:
        self.chance, self.executor, self.now = chance, executor, 0.0
        self.mailbox, self.unsettled = Mailbox(), False
        self.capacities = [tier.spec.capacity_bytes for tier in chain.tiers]
        self.records: list[dict[tuple[bytes, int], Content]] = [{} for _ in chain.tiers]
        self.stored: list[tuple[float, Stored]] = []
        self.coming: list[Coming] = []
        self.asked: list[tuple[float, Probe]] = []
        self.ended: list[Completion] = []
        self.slowest = chance.choice((0, 1, 4, 30))
        self.failing = chance.choice((0.0, 0.0, 0.1))
        self.loads = self.landed = self.cancelled = self.found = 0

    def usage(self, tier: int) -> StoreUsage:
        return StoreUsage(0, self.capacities[tier])

    def deliver(self, now: float) -> None:
        """What has ended by now is told when the offload manager attends."""
        self.now = now
        self.ended += [one for due, one in self.stored if due <= now]
        self.stored = [(due, one) for due, one in self.stored if due > now]
        for due, probe in [one for one in self.asked if one[0] <= now]:
            self.asked.remove((due, probe))
            self._answer(probe)
        for one in [one for one in self.coming if one.due <= now]:
            self.coming.remove(one)
            self.ended.append(self._arrive(one))

    def completions(self) -> list[Completion]:
        ended, self.ended = self.ended, []
        return ended

    def cancel(self, load: int) -> list[Arrived]:
        """What has come in time is told, though all of its load has not."""
        came = [one for one in self.coming if one.load == load and self.chance.random() < 0.5]
        self.coming = [one for one in self.coming if one.load != load]
        return [self._arrive(one) for one in came]

    def _answer(self, probe: Probe) -> None:
        groups = range(len(self.executor.groups))
        found = [(key, group) for key in probe.keys for group in groups if (key, group) in self.records[probe.tier]]
        self.found += len(found)
        self.ended.append(Answered(probe.load, probe.tier, found))

    def _arrive(self, one: Coming) -> Arrived:
        record = (one.record.key, one.record.group)
        lost = self.chance.random() < self.failing
        if lost:
            self.records[one.record.tier].pop(record, None)
        found = one.content is not None and not lost
        if found and one.content is not None:
            self.executor.slots[one.record.group][one.block] = list(one.content)
            self.landed += 1
        return Arrived(one.load, one.number, one.record, found, lost=not found and (lost or self.chance.random() < 0.5))

    def carry_out(self, transfers: Iterable[Transfer]) -> None:
        for one in transfers:
            match one:
                case StoreRecord():
                    self._store(one)
                case Delete(key, group, tier):
                    self.records[tier].pop((key, group), None)
                case Clear(tier):
                    self.records[tier].clear()
                case LoadRecords():
                    self._load(one)
                case Probe():
                    self.asked.append((self.now + self.chance.randrange(self.slowest + 1), one))
                case Cancel(load):
                    self.cancelled += 1
                    self.coming = [other for other in self.coming if other.load != load]

    def _store(self, order: StoreRecord) -> None:
        record, content = (order.key, order.group), None
        if order.source is not None:
            content = self.records[order.source].get(record)
        else:
            assert order.block is not None
            content = list(self.executor.slots[order.group][order.block])
            assert None not in content, "a block is stored before it was written"
            assert RUBBISH not in content, "a block is stored before it has arrived"
        stored = content is not None and self.chance.random() >= self.failing
        if stored and content is not None:
            self.records[order.target][record] = content
        due = self.now + self.chance.randrange(3)
        self.stored.append((due, Stored(order.key, order.group, order.target, stored)))

    def _load(self, load: LoadRecords) -> None:
        self.loads += 1
        for number, (record, block) in enumerate(zip(load.records, load.blocks, strict=True)):
            content = self.records[record.tier].get((record.key, record.group))
            self.executor.slots[record.group][block] = [RUBBISH] * self.executor.size
            due = self.now + self.chance.randrange(self.slowest + 1)
            self.coming.append(Coming(load.load, number, record, block, due, content))
