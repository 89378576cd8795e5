"""Contents and totals of pool and tiers, for /cache/stats, and the reset of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kveik.cache.group import GroupUsage
from kveik.engine.engine import Engine
from kveik.observe.tiers import TierSnapshot


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of prompts looked up in the cache, and those found, in the pool or by loading; since the start."""

    asked: int
    found: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Contents and totals of pool and tiers. Its fields are those of the answer in JSON."""

    pool: tuple[GroupUsage, ...]
    """Blocks of each layer group."""

    prompt_tokens: PromptTokens
    loads_waiting: int
    """Loads for which requests wait."""

    tiers: tuple[TierSnapshot, ...]
    """From the nearest to the pool down."""

    known: Mapping[str, int]
    """Contents that the offload manager counts, per tier."""


def tier_snapshots(engine: Engine) -> list[TierSnapshot]:
    """Each tier at this moment, from the nearest to the pool down. From any thread."""
    return [one.snapshot for one in engine.offload.stats()]


def cache_stats(engine: Engine) -> CacheStats:
    """Everything at one moment between two steps."""
    scheduler, tiers = engine.scheduler, engine.offload.stats()
    return CacheStats(
        pool=tuple(scheduler.kv_cache.usage),
        prompt_tokens=PromptTokens(scheduler.prefix_queries, scheduler.prefix_hits),
        loads_waiting=engine.offload.loading,
        tiers=tuple(one.snapshot for one in tiers),
        known={one.snapshot.name: one.contents for one in tiers},
    )


def reset_cache(engine: Engine) -> None:
    """Remove all contents, in the pool and in every tier that is not shared; running requests keep their blocks."""
    engine.scheduler.kv_cache.reset()
    engine.recorder.idled()
    # Facts recorded before are of contents that are removed now.
    engine.attend()
    engine.offload.reset()
    engine.attend()
