"""An engine's long life under a clock that moves only when told to: everything is real but for the model's arithmetic.

Requests come one after the other, most with a beginning that nobody has had before, some going on where an earlier one ended,
some hinted about, some hung up on. What is measured is what could grow: memory, files, and every object that can be reached.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import psutil

from benchmarks.scheduler import facts_without_model
from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.policy import EvictionPolicy
from kveik.cache.eviction.priority import PriorityPolicy
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.clock import StepClock
from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.device.cpu import CpuPoolMemory
from kveik.engine.engine import Engine
from kveik.engine.eviction import eviction_policy, tier_setting
from kveik.engine.planner import plan_model
from kveik.engine.recorder import Recorder
from kveik.model.rope import RopeSpec
from kveik.model.spec import ModelSpec
from kveik.observe.bus import EventBus
from kveik.observe.metrics import Metrics
from kveik.observe.tiers import log_tiers
from kveik.offload.carrier import TierCarrier
from kveik.offload.manager import OffloadManager
from kveik.offload.open_tiers import open_tiers
from kveik.offload.stores.disk import DiskStore
from kveik.request.request import CacheRetention, Request, SamplingParams
from kveik.schedule.plan import StepOutcome, StepPlan
from kveik.schedule.scheduler import Scheduler
from kveik.schedule.step_cost import StepCost
from tests.schedule.rows import outcome_of

BLOCK, CONTEXT, VOCABULARY = 8, 128, 256
RAM_BYTES, DISK_BYTES = 256 << 10, 2 << 20
TOGETHER = 4
DAY = 86_400.0

NOT_OURS = (type, ModuleType, FunctionType, BuiltinFunctionType)
"""What leads from an engine to the whole interpreter."""

CONTAINERS = (dict, list, set, frozenset, tuple, deque)


def spec_of(windows: tuple[int | None, ...]) -> ModelSpec:
    """One layer per window."""
    return ModelSpec(
        architecture="llama",
        layers=len(windows),
        hidden=8,
        heads=1,
        kv_heads=1,
        head_dim=8,
        intermediate=8,
        vocab=VOCABULARY,
        context=CONTEXT,
        norm_eps=1e-5,
        activation="silu",
        tied=True,
        windows=windows,
        rope=RopeSpec(base=10_000.0),
        attention_scale=1.0,
    )


class Drawn:
    """In place of a model: tokens are drawn, steps take a while of the clock, keys and values stay what they were."""

    def __init__(self, chance: random.Random, clock: StepClock) -> None:
        self._chance, self._clock, self._plan = chance, clock, StepPlan()

    def launch(self, plan: StepPlan) -> None:
        self._plan = plan

    def collect(self) -> StepOutcome:
        # Dear enough that loading pays.
        self._clock.advance(0.002 + 0.01 * self._plan.tokens)
        return outcome_of(self._plan, lambda row, ahead: self._chance.randrange(VOCABULARY))


@dataclass(frozen=True, slots=True)
class Measure:
    """What could grow, at one moment."""

    rss_bytes: int
    disk_bytes: int
    """That the file system has given out for the folder."""

    index_bytes: int
    objects: int
    """That can be reached from the engine and its metrics, and entries of containers among them."""

    series: int
    """Lines of the metrics."""

    segments: int
    keys_known: int
    """By all policies together."""

    def __str__(self) -> str:
        names = self.__slots__
        return ", ".join(f"{name} {getattr(self, name):,}" for name in names)


class Lifetime:
    """One engine with a pool, a RAM tier and a disk."""

    def __init__(self, folder: Path, windows: tuple[int | None, ...], *, writes: str, seed: int = 0) -> None:
        self.chance, self.clock, self.folder = random.Random(seed), StepClock(), folder
        config = EngineConfig(
            model=ModelConfig(model="none", dtype="float32"),
            cache=CacheConfig(
                block_size=BLOCK,
                num_gpu_blocks_override=48,
                kv_ram_bytes=RAM_BYTES,
                kv_disk=str(folder),
                kv_disk_bytes=DISK_BYTES,
                kv_write_policy=writes,  # type: ignore[arg-type]  # a test's own words
            ),
            schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=128, prefill_chunk_size=64),
        )
        plan = plan_model(config, spec_of(windows), available_bytes=1 << 30, weight_bytes=0, workspace_bytes=0, process_bytes=0)
        blocks, groups = plan.memory.blocks, plan.spec.groups
        self.kv_cache = KVCacheManager(
            groups,
            blocks,
            block_size=BLOCK,
            rows=4,
            max_model_len=plan.max_model_len,
            max_chunk=plan.max_chunk,
            eviction=eviction_policy(config.cache, blocks[0], seed),
            record_facts=True,
        )
        bus, step_cost = EventBus(), StepCost()
        memory = CpuPoolMemory(plan.memory.layouts, blocks, plan.kv_type.storage)
        setting = tier_setting(config, plan, b"model", "float32")
        offload = open_tiers(setting, self.kv_cache, step_cost, memory, self.clock, publish=bus.publish)
        assert isinstance(offload, OffloadManager)
        assert isinstance(offload.carrier, TierCarrier)
        self.carrier, self.chain = offload.carrier, offload.chain
        scheduler = Scheduler(self.kv_cache, config.schedule, plan.max_model_len, frozenset(), offload)
        facts = facts_without_model("float32", BLOCK, tuple(store.name for store in self.carrier.stores))
        self.metrics = Metrics(facts, lambda: bus.errors, lambda: [one.snapshot for one in offload.stats()])
        bus.subscribe(self.metrics.listen)
        bus.subscribe(log_tiers)
        executor = Drawn(self.chance, self.clock)
        self.engine = Engine(scheduler, executor, self.clock, Recorder(bus, scheduler), seed=seed, step_cost=step_cost)
        self.earlier: deque[tuple[int, ...]] = deque(maxlen=60)
        self.requests = 0

    def live(self, requests: int, seconds: float) -> None:
        """So many requests, a few at a time, in so much time."""
        for _ in range(requests // TOGETHER):
            self._serve()
            self.clock.advance(seconds * TOGETHER / requests)

    def _serve(self) -> None:
        chance, engine = self.chance, self.engine
        ids = [engine.add(self._request())[0] for _ in range(TOGETHER)]
        if chance.random() < 0.35:
            engine.step()
            engine.abort(chance.choice(ids))
        while engine.has_work:
            engine.step()
            waits = engine.pause > 0.0
            if chance.random() < (0.9 if waits else 0.1):
                while self.carrier.mover.step():
                    pass
            elif waits:
                # The tiers' threads do not come to it in time.
                self.clock.advance(engine.pause)
        engine.attend()
        engine.learn()

    def _request(self) -> Request:
        chance = self.chance
        goes_on = bool(self.earlier) and chance.random() < 0.35
        prompt = chance.choice(self.earlier) if goes_on else ()
        prompt = (*prompt, *(chance.randrange(VOCABULARY) for _ in range(chance.randint(16, 40))))[: CONTEXT - 8]
        self.earlier.append(prompt)
        self.requests += 1
        return Request(
            id=f"r{self.requests}",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=chance.randint(1, 4), ignore_eos=True),
            retention=CacheRetention(chance.choice((10, 80)), 60.0) if chance.random() < 0.05 else None,
        )

    # What could grow.

    def measure(self) -> Measure:
        """With nothing on its way."""
        while self.carrier.mover.step():
            self.engine.attend()
        policies = [hazard_of(policy) for policy in (self.kv_cache.evictor.policy, *self._tier_policies())]
        return Measure(
            rss_bytes=psutil.Process().memory_info().rss,
            disk_bytes=sum(allocated(path) for path in self.folder.rglob("*") if path.is_file()),
            index_bytes=allocated(self.folder / "kveik-kv" / "index"),
            objects=reachable([self.engine, self.metrics]),
            series=self.metrics.exposition().count(b"\n"),
            segments=sum(one._tree.count for one in policies),
            keys_known=sum(len(one._tree.owner) for one in policies),
        )

    def _tier_policies(self) -> Iterable[EvictionPolicy]:
        return (tier.policy for tier in self.chain.tiers)

    def check(self) -> None:
        """All laws, and that nothing is over its bound."""
        self.engine.scheduler.check()
        for store, tier in zip(self.carrier.stores, self.chain.tiers, strict=True):
            assert store.bytes_used <= store.capacity_bytes
            assert tier.bytes_used <= store.usable_bytes
            if isinstance(store, DiskStore):
                store.check()


def hazard_of(policy: EvictionPolicy) -> HazardPolicy:
    assert isinstance(policy, PriorityPolicy)
    assert isinstance(policy.policy, HazardPolicy)
    return policy.policy


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def reachable(roots: list[Any]) -> int:
    """How many objects that can refer to others are kept alive by these, and what their containers have in them."""
    gc.collect()
    seen, waiting, entries = {id(one) for one in roots}, list(roots), 0
    while waiting:
        for one in gc.get_referents(waiting.pop()):
            if isinstance(one, NOT_OURS) or id(one) in seen:
                continue
            if isinstance(one, CONTAINERS):
                entries += len(one)
            elif not gc.is_tracked(one):
                continue
            seen.add(id(one))
            waiting.append(one)
    return len(seen) + entries
