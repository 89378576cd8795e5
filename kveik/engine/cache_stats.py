"""What the cache holds and has done, told to whoever asks: gauges, the route that tells and the one that forgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kveik.cache.group import GroupUsage
from kveik.engine.engine import Engine
from kveik.observe.tier_log import hindered
from kveik.observe.tiers import TierFacts
from kveik.offload.breaker import BreakerState
from kveik.offload.mover import TierState
from kveik.offload.protocol import Offload
from kveik.offload.stores.record import Miss, Refusal


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of prompts for which the cache was asked, and those found, in the pool or by loading; since the start."""

    asked: int
    found: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What pool and tiers hold and have done. Its fields are those of the answer in JSON."""

    pool: tuple[GroupUsage, ...]
    """Blocks of each layer group."""

    prompt_tokens: PromptTokens
    loads_waiting: int
    """Loads for which requests wait."""

    tiers: tuple[TierFacts, ...]
    """From the nearest to the pool down."""

    known: Mapping[str, int]
    """Contents that the offload manager knows of, per tier."""


def tier_facts(offload: Offload) -> list[TierFacts]:
    """Facts of every tier. From any thread."""
    return [_facts(one.state) for one in offload.stats()]


def _facts(state: TierState) -> TierFacts:
    counts = state.counts
    return TierFacts(
        name=state.name,
        capacity_bytes=state.capacity_bytes,
        room_bytes=state.room_bytes,
        bytes_used=state.bytes_used,
        records=state.records,
        trouble=state.trouble,
        open_for_reading=state.reading is not BreakerState.OPEN,
        open_for_writing=state.writing is not BreakerState.OPEN,
        spills_waiting_bytes=state.spills_waiting_bytes,
        staging_bytes=state.staging_bytes,
        records_loaded=counts.records_read,
        bytes_loaded=counts.bytes_read,
        seconds_loading=counts.seconds_reading,
        records_spilled=counts.records_written,
        bytes_spilled=counts.bytes_written,
        seconds_spilling=counts.seconds_writing,
        records_deleted=counts.records_deleted,
        misses={str(reason): counts.misses[reason] for reason in Miss},
        refusals={str(reason): counts.refusals[reason] for reason in Refusal},
        errors=counts.errors,
    )


def tier_status(engine: Engine) -> list[dict[str, object]]:
    """Figures of each tier that people want to see at a glance. From any thread."""
    return [
        {
            "name": one.state.name,
            "capacity_bytes": one.state.capacity_bytes,
            "bytes_used": one.state.bytes_used,
            "records": one.state.records,
            "left_alone": not one.hindrances.keys().isdisjoint({"reading", "writing"}),
            "trouble": hindered(one.hindrances) or None,
        }
        for one in engine.offload.stats()
    ]


def cache_stats(engine: Engine) -> CacheStats:
    """Everything at one moment between two steps."""
    scheduler, tiers = engine.scheduler, engine.offload.stats()
    return CacheStats(
        pool=tuple(scheduler.kv_cache.usage),
        prompt_tokens=PromptTokens(scheduler.prefix_queries, scheduler.prefix_hits),
        loads_waiting=engine.offload.loading,
        tiers=tuple(_facts(one.state) for one in tiers),
        known={one.state.name: one.contents for one in tiers},
    )


def reset_cache(engine: Engine) -> None:
    """Forget all contents that nobody holds, in the pool and in every tier that is ours alone."""
    engine.scheduler.kv_cache.reset()
    engine.recorder.idled()
    # Facts recorded before are of contents that are forgotten now.
    engine.attend()
    engine.offload.reset()
    engine.attend()
