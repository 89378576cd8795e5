"""Contents and totals of pool and tiers, for /cache/stats, and their reset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kveik.cache.group import GroupUsage
from kveik.engine.engine import Engine
from kveik.observe.tiers import TierSnapshot


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens looked up in the cache, and those hit, in the pool or by loading, since the start."""

    queried: int
    hit: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Contents and totals of pool and tiers. The answer in JSON has the same fields."""

    pool: tuple[GroupUsage, ...]
    """Blocks of each layer group."""

    prompt_tokens: PromptTokens
    loads_waiting: int
    """Loads for which requests wait."""

    tiers: tuple[TierSnapshot, ...]
    """From the nearest to the pool down."""

    contents: Mapping[str, int]
    """Blocks that the offload manager knows in each tier, by its name."""


def tier_snapshots(engine: Engine) -> list[TierSnapshot]:
    """Returns the tiers at this moment, from the nearest to the pool down. Any thread may call it."""
    return [one.snapshot for one in engine.offload.stats()]


def cache_stats(engine: Engine) -> CacheStats:
    """Returns the statistics of one moment between two steps."""
    scheduler, tiers = engine.scheduler, engine.offload.stats()
    return CacheStats(
        pool=tuple(scheduler.kv_cache.usage),
        prompt_tokens=PromptTokens(scheduler.prefix_queries, scheduler.prefix_hits),
        loads_waiting=engine.offload.loading,
        tiers=tuple(one.snapshot for one in tiers),
        contents={one.snapshot.name: one.contents for one in tiers},
    )


def reset_cache(engine: Engine) -> None:
    """Remove all contents, in the pool and in every tier that is not shared; running requests keep their blocks."""
    # Loads under way are called off: they would bring contents from before.
    while engine.offload.release_for_blocks():
        pass
    engine.scheduler.kv_cache.reset()
    engine.recorder.idled()
    # Facts recorded before concern contents that are removed now.
    engine.attend()
    engine.offload.reset()
    engine.attend()
