"""Contents and totals of pool and tiers, for /cache/stats, and the reset of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kveik.cache.group import GroupUsage
from kveik.engine.engine import Engine
from kveik.observe.tiers import TierSnapshot
from kveik.offload.carrier import BelowParts


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
    return [] if engine.transfers is None else engine.transfers.parts.mover.snapshots()


def cache_stats(engine: Engine) -> CacheStats:
    """Everything at one moment between two steps."""
    scheduler = engine.scheduler
    parts = None if engine.transfers is None else engine.transfers.parts
    return CacheStats(
        pool=tuple(scheduler.kv_cache.usage),
        prompt_tokens=PromptTokens(scheduler.prefix_queries, scheduler.prefix_hits),
        loads_waiting=scheduler.below.loading,
        tiers=tuple(tier_snapshots(engine)),
        known=_known(parts),
    )


def _known(parts: BelowParts | None) -> dict[str, int]:
    """Contents that the offload manager counts, per tier."""
    return {} if parts is None else {tier.spec.name: len(tier) for tier in parts.directory.tiers}


def reset_cache(engine: Engine) -> None:
    """Forget all contents that no request uses, in the pool and in every tier that is not shared."""
    scheduler = engine.scheduler
    scheduler.kv_cache.reset()
    engine.recorder.idled()
    if engine.transfers is not None:
        # Facts recorded before are of contents that are forgotten now.
        engine.transfers.carry_out()
        engine.transfers.parts.directory.reset()
        engine.attend()
