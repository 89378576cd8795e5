"""Snapshot of a tier, and its metrics and log lines."""

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
    """Time spent reading from the store, misses included."""

    records_stored: int
    bytes_stored: int
    seconds_storing: float
    """Time spent encoding records and writing to the store, refusals included."""

    records_deleted: int
    misses: Mapping[str, int]
    """Records looked up and not loaded, by reason. Every reason has an entry, so that a first miss shows as a change."""

    refusals: Mapping[str, int]
    """Blocks evicted and not stored, by reason. Every reason has an entry."""

    errors: int
    """Unexpected exceptions of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSnapshot:
    """One tier at one moment."""

    name: str
    state: TierState
    reason: str
    """Reason of the state, in words; empty where the tier is available."""

    capacity_bytes: int
    usable_bytes: int
    """Bytes that records may take; fewer while the disk is full."""

    bytes_used: int
    records: int
    loads_waiting: int
    """Records that wait to be read."""

    stores_waiting_bytes: int
    staging_bytes: int
    """Bound of the bytes that wait to be written."""

    counts: TierCounts


_GAUGES = (
    ("kv_tier_capacity_bytes", "Capacity of a tier, in bytes.", "capacity_bytes"),
    ("kv_tier_usable_bytes", "Bytes that a tier's records may take; fewer while a disk is full.", "usable_bytes"),
    ("kv_tier_bytes", "Bytes that a tier takes.", "bytes_used"),
    ("kv_tier_records", "Records of a tier: blocks of one layer group each.", "records"),
    ("kv_tier_stores_waiting_bytes", "Bytes that wait to be written to a tier.", "stores_waiting_bytes"),
    ("kv_tier_staging_bytes", "Bytes that may wait to be written to a tier, at most.", "staging_bytes"),
)

_COUNTERS = (
    ("kv_tier_loads", "Records loaded from a tier.", "records_loaded"),
    ("kv_tier_loaded_bytes", "Bytes of records loaded from a tier.", "bytes_loaded"),
    ("kv_tier_load_seconds", "Seconds spent reading from a tier's store.", "seconds_loading"),
    ("kv_tier_stores", "Records written to a tier.", "records_stored"),
    ("kv_tier_stored_bytes", "Bytes of records written to a tier.", "bytes_stored"),
    ("kv_tier_store_seconds", "Seconds spent encoding records and writing to a tier's store.", "seconds_storing"),
    ("kv_tier_deletions", "Records removed from a tier.", "records_deleted"),
    ("kv_tier_errors", "Unexpected exceptions of a tier's store.", "errors"),
)


def tier_metrics(tiers: Sequence[TierSnapshot]) -> Iterable[Metric]:
    """Returns a sample of every metric for each tier; nothing without tiers."""
    if not tiers:
        return
    for name, text, of in _GAUGES:
        gauge = GaugeMetricFamily(f"kveik:{name}", text, labels=["tier"])
        for tier in tiers:
            gauge.add_metric([tier.name], float(getattr(tier, of)))
        yield gauge
    states = GaugeMetricFamily("kveik:kv_tier_state", "1 for the state that a tier is in.", labels=["tier", "state"])
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
    """Logs events of tiers; a listener of the bus. `places`: address of each tier, without password."""
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
