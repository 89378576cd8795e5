"""Tiers without bytes: they remember what the slots held, are slow, fail, lose records, and answer too late."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.layout import LayerGroup
from kveik.offload.loads import Loads
from kveik.offload.manager import OffloadManager
from kveik.offload.tier import Tier
from kveik.offload.tier_spec import TierSpec
from kveik.offload.transfer import Cancel, Clear, Delete, Fetch, Load, Probe, Spill, Transfer
from tests.worlds.memory import MemoryExecutor

Content = list[int | None]
RUBBISH = -7
"""In a block that is being loaded, until all of it has come."""


@dataclass
class Coming:
    """A record on its way into the pool."""

    job: int
    number: int
    fetch: Fetch
    block: int
    due: float
    content: Content | None


def draw_directory(chance: random.Random, groups: list[LayerGroup], block_size: int) -> OffloadManager:
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
    return OffloadManager(groups, block_size, tiers)


class SimulatedTiers:
    """Carries transfers out over steps."""

    def __init__(self, chance: random.Random, directory: OffloadManager, below: Loads, executor: MemoryExecutor) -> None:
        self.chance, self.directory, self.below, self.executor = chance, directory, below, executor
        self.records: list[dict[tuple[bytes, int], Content]] = [{} for _ in directory.tiers]
        self.spilled: list[tuple[float, int, bytes, int, bool]] = []
        self.coming: list[Coming] = []
        self.asked: list[tuple[float, Probe]] = []
        self.slowest = chance.choice((0, 1, 4, 30))
        self.failing = chance.choice((0.0, 0.0, 0.1))
        self.loads = self.landed = self.cancelled = self.found = 0

    def deliver(self, now: float) -> None:
        """What has ended by now is told."""
        ended, self.spilled = [one for one in self.spilled if one[0] <= now], [one for one in self.spilled if one[0] > now]
        for _, tier, key, group, stored in ended:
            (self.directory.stored if stored else self.directory.failed)(tier, key, group)
        for due, probe in [one for one in self.asked if one[0] <= now]:
            self.asked.remove((due, probe))
            self._answer(probe, now)
        for one in [one for one in self.coming if one.due <= now]:
            self.coming.remove(one)
            self._arrive(one)
        # What has come in time is told, though all of its load has not.
        for number in self.below.due(now):
            for one in [one for one in self.coming if one.job == number and self.chance.random() < 0.5]:
                self.coming.remove(one)
                self._arrive(one)

    def _answer(self, probe: Probe, now: float) -> None:
        groups = range(len(self.executor.groups))
        found = [(key, group) for key in probe.keys for group in groups if (key, group) in self.records[probe.tier]]
        self.found += len(found)
        self.directory.adopt(probe.tier, found, now)
        self.below.answered(probe.job)

    def _arrive(self, one: Coming) -> None:
        record = (one.fetch.key, one.fetch.group)
        lost = self.chance.random() < self.failing
        if lost:
            self.records[one.fetch.tier].pop(record, None)
        found = one.content is not None and not lost
        if found and one.content is not None:
            self.executor.slots[one.fetch.group][one.block] = list(one.content)
            self.landed += 1
        self.below.arrived(one.job, one.number, found=found, sound=not lost and self.chance.random() < 0.5)

    def carry_out(self, transfers: Iterable[Transfer], now: float) -> None:
        for one in transfers:
            match one:
                case Spill():
                    self._spill(one, now)
                case Delete(key, group, tier):
                    self.records[tier].pop((key, group), None)
                case Clear(tier):
                    self.records[tier].clear()
                case Load():
                    self._load(one, now)
                case Probe():
                    self.asked.append((now + self.chance.randrange(self.slowest + 1), one))
                case Cancel(job):
                    self.cancelled += 1
                    self.coming = [other for other in self.coming if other.job != job]

    def _spill(self, order: Spill, now: float) -> None:
        record, content = (order.key, order.group), None
        if order.source is not None:
            content = self.records[order.source].get(record)
        else:
            assert order.block is not None
            content = list(self.executor.slots[order.group][order.block])
            assert None not in content, "a block is spilled before it was written"
            assert RUBBISH not in content, "a block is spilled before it has arrived"
        stored = content is not None and self.chance.random() >= self.failing
        if stored and content is not None:
            self.records[order.target][record] = content
        self.spilled.append((now + self.chance.randrange(3), order.target, order.key, order.group, stored))

    def _load(self, load: Load, now: float) -> None:
        self.loads += 1
        for number, (fetch, block) in enumerate(zip(load.fetches, load.blocks, strict=True)):
            content = self.records[fetch.tier].get((fetch.key, fetch.group))
            self.executor.slots[fetch.group][block] = [RUBBISH] * self.executor.size
            due = now + self.chance.randrange(self.slowest + 1)
            self.coming.append(Coming(load.job, number, fetch, block, due, content))
