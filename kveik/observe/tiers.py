"""Snapshot of a tier below the pool, and its metrics and log lines."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kveik.observe.events import Event, RecordsDamaged, TierKept, TierState, TierStateChanged

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TierCounts:
    """Totals of one tier since the start."""

    records_loaded: int
    bytes_loaded: int
    seconds_loading: float
    """Time of reading from the store, misses included."""

    records_stored: int
    bytes_stored: int
    seconds_storing: float
    """Time of encoding records and writing to the store, refusals included."""

    records_deleted: int
    misses: Mapping[str, int]
    """Records asked for and not loaded, by reason: every reason, so that a first one shows as a change."""

    refusals: Mapping[str, int]
    """Blocks evicted and not stored, by reason: every reason, too."""

    errors: int
    """Exceptions of the store that should have been answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSnapshot:
    """One tier at one moment."""

    name: str
    state: TierState
    reason: str
    """Reason of the state, in words; empty where the tier is available."""

    capacity_bytes: int
    usable_bytes: int
    """Bytes that records may take: less while the disk is full."""

    bytes_used: int
    records: int
    loads_waiting: int
    """Records that wait to be read."""

    stores_waiting_bytes: int
    staging_bytes: int
    """Bound of the bytes that wait to be written."""

    counts: TierCounts


_GAUGES = (
    ("kv_tier_capacity_bytes", "Bytes that a tier below the pool takes at most.", "capacity_bytes"),
    ("kv_tier_usable_bytes", "Bytes that records may take there: less while a disk is full.", "usable_bytes"),
    ("kv_tier_bytes", "Bytes that it takes.", "bytes_used"),
    ("kv_tier_records", "Blocks of layer groups that it holds.", "records"),
    ("kv_tier_stores_waiting_bytes", "Bytes that wait to be written to it.", "stores_waiting_bytes"),
    ("kv_tier_staging_bytes", "Bytes that may wait to be written to it.", "staging_bytes"),
)

_COUNTERS = (
    ("kv_tier_loads", "Records loaded from it.", "records_loaded"),
    ("kv_tier_loaded_bytes", "Bytes of them.", "bytes_loaded"),
    ("kv_tier_load_seconds", "Seconds that its store was reading.", "seconds_loading"),
    ("kv_tier_stores", "Records written to it.", "records_stored"),
    ("kv_tier_stored_bytes", "Bytes of them.", "bytes_stored"),
    ("kv_tier_store_seconds", "Seconds that records were encoded and its store was writing.", "seconds_storing"),
    ("kv_tier_deletions", "Records removed from it.", "records_deleted"),
    ("kv_tier_errors", "Exceptions of its store that should have been answers.", "errors"),
)


def tier_metrics(tiers: Sequence[TierSnapshot]) -> Iterable[Metric]:
    """A sample of every metric for each tier; nothing where there is none."""
    if not tiers:
        return
    for name, text, of in _GAUGES:
        gauge = GaugeMetricFamily(f"kveik:{name}", text, labels=["tier"])
        for tier in tiers:
            gauge.add_metric([tier.name], float(getattr(tier, of)))
        yield gauge
    states = GaugeMetricFamily("kveik:kv_tier_state", "1 for the state that it is in.", labels=["tier", "state"])
    for tier in tiers:
        for state in TierState:
            states.add_metric([tier.name, state], float(tier.state is state))
    yield states
    for name, text, of in _COUNTERS:
        counter = CounterMetricFamily(f"kveik:{name}", text, labels=["tier"])
        for tier in tiers:
            counter.add_metric([tier.name], float(getattr(tier.counts, of)))
        yield counter
    misses = {tier.name: tier.counts.misses for tier in tiers}
    yield _by_reason("kv_tier_misses", "Records not loaded, by reason.", misses)
    yield _by_reason("kv_tier_drops", "Blocks not stored, by reason.", {tier.name: tier.counts.refusals for tier in tiers})


def _by_reason(name: str, text: str, counts: Mapping[str, Mapping[str, int]]) -> Metric:
    counter = CounterMetricFamily(f"kveik:{name}", text, labels=["tier", "reason"])
    for tier, reasons in counts.items():
        for reason, count in reasons.items():
            counter.add_metric([tier, reason], count)
    return counter


def log_tiers(event: Event, places: Mapping[str, str] = MappingProxyType({})) -> None:
    """Logs what happens to tiers; a listener of the bus. `places`: where each tier is, without password."""
    match event:
        case TierStateChanged():
            place = f' place="{places[event.tier]}"' if places.get(event.tier) else ""
            reason = f' reason="{event.reason}"' if event.reason else ""
            log.log(
                logging.INFO if event.state is TierState.AVAILABLE else logging.WARNING,
                "tier state: tier=%s%s state=%s%s seconds=%.1f changes=%d",
                *(event.tier, place, event.state, reason, event.seconds, event.changes),
            )
        case RecordsDamaged():
            log.warning("tier records damaged: tier=%s records=%d", event.tier, event.records)
        case TierKept():
            late = "" if event.late_seconds is None else f" drain_seconds={event.late_seconds:g}"
            log.log(
                logging.WARNING if event.missing else logging.INFO,
                "tier kept: tier=%s records=%d bytes=%d written=%d missing=%d%s",
                *(event.tier, event.records, event.bytes, event.written, event.missing, late),
            )
