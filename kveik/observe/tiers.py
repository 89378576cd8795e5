"""What the tiers below the pool hold and have done, as values that the engine gives, and as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """One tier at one moment; counts are since start."""

    name: str
    capacity_bytes: int
    room_bytes: int
    """What records may take of it: less while the disk is full."""

    bytes_used: int
    records: int
    trouble: str | None
    """What is wrong at the moment; None: nothing."""

    open_for_reading: bool
    """Whether its breaker lets loads through."""

    open_for_writing: bool
    spills_waiting_bytes: int
    staging_bytes: int
    """Bound of the former."""

    records_loaded: int
    bytes_loaded: int
    seconds_loading: float
    """That its store was reading, misses included."""

    records_spilled: int
    bytes_spilled: int
    seconds_spilling: float
    """That records were encoded and its store was writing, refusals included."""

    records_deleted: int
    misses: Mapping[str, int]
    """Records that were asked for and not loaded, by reason; every reason that there is, so that its first is seen to come."""

    refusals: Mapping[str, int]
    """Blocks that were given up and not stored, by reason; every reason, too."""

    errors: int

    @property
    def in_trouble(self) -> bool:
        return self.trouble is not None


_GAUGES = (
    ("kv_tier_capacity_bytes", "Bytes that a tier below the pool takes at most.", "capacity_bytes"),
    ("kv_tier_room_bytes", "Bytes that records may take there: less while a disk is full.", "room_bytes"),
    ("kv_tier_bytes", "Bytes that it takes.", "bytes_used"),
    ("kv_tier_records", "Blocks of layer groups that it holds.", "records"),
    ("kv_tier_spills_waiting_bytes", "Bytes that wait to be written to it.", "spills_waiting_bytes"),
    ("kv_tier_staging_bytes", "Bytes that may wait to be written to it.", "staging_bytes"),
    ("kv_tier_trouble", "Whether its store tells of trouble; /cache/stats has it in words.", "in_trouble"),
    ("kv_tier_reads_admitted", "Whether its breaker lets loads through.", "open_for_reading"),
    ("kv_tier_writes_admitted", "Whether its breaker lets spills through.", "open_for_writing"),
)

_COUNTERS = (
    ("kv_tier_loads", "Records loaded from it.", "records_loaded"),
    ("kv_tier_loaded_bytes", "Bytes of them.", "bytes_loaded"),
    ("kv_tier_load_seconds", "Seconds that its store was reading.", "seconds_loading"),
    ("kv_tier_spills", "Records written to it.", "records_spilled"),
    ("kv_tier_spilled_bytes", "Bytes of them.", "bytes_spilled"),
    ("kv_tier_spill_seconds", "Seconds that records were encoded and its store was writing.", "seconds_spilling"),
    ("kv_tier_deletions", "Records removed from it.", "records_deleted"),
    ("kv_tier_errors", "Exceptions of its store that should have been answers.", "errors"),
)


def tier_metrics(tiers: Sequence[TierFacts]) -> Iterable[Metric]:
    """A sample of every metric for each tier; nothing where there is none."""
    if not tiers:
        return
    for name, text, of in _GAUGES:
        gauge = GaugeMetricFamily(f"kveik:{name}", text, labels=["tier"])
        for tier in tiers:
            gauge.add_metric([tier.name], float(getattr(tier, of)))
        yield gauge
    for name, text, of in _COUNTERS:
        counter = CounterMetricFamily(f"kveik:{name}", text, labels=["tier"])
        for tier in tiers:
            counter.add_metric([tier.name], float(getattr(tier, of)))
        yield counter
    yield _by_reason("kv_tier_misses", "Records not loaded, by reason.", {tier.name: tier.misses for tier in tiers})
    yield _by_reason("kv_tier_drops", "Blocks not stored, by reason.", {tier.name: tier.refusals for tier in tiers})


def _by_reason(name: str, text: str, counts: Mapping[str, Mapping[str, int]]) -> Metric:
    counter = CounterMetricFamily(f"kveik:{name}", text, labels=["tier", "reason"])
    for tier, reasons in counts.items():
        for reason, count in reasons.items():
            counter.add_metric([tier, reason], count)
    return counter
