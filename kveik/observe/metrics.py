"""Prometheus metrics: a listener that counts events, and a collector that shows the counts. Named in vLLM's manner.

The counts are plain numbers under one lock, so an event costs a few microseconds and a scrape sees one moment: sums that hold
in every event (prompt tokens = computed + cached) hold in every scrape. Label values are closed sets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kveik.observe.events import (
    FINISHED_REASONS,
    LOAD_REASONS,
    REFUSED_REASONS,
    Event,
    FinishedReason,
    FirstToken,
    Load,
    LoadChanged,
    LoadDecided,
    LoadReason,
    Preempted,
    PromptComputed,
    RefusedReason,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestRefused,
    RequestWaits,
    Stepped,
    StreamOverrun,
)
from kveik.observe.histogram import Histogram
from kveik.observe.tiers import TierSnapshot, tier_metrics

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Content type of `Metrics.exposition`."""

_FIRST_TOKEN_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_GAP_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_REQUEST_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Properties that do not change while the engine runs."""

    threads: int
    dtype: str
    arithmetic: str
    """Arithmetic of products: bfloat16, float32, w8a8 or w4a8."""

    isa: str
    """Instruction set of the native kernels; none without them."""

    kv_cache_dtype: str
    block_size: int
    pool_bytes: int
    planned_bytes: int
    """Memory of the process as a whole, by its plan."""

    tiers: tuple[str, ...] = ()
    """Names of the tiers, from the nearest to the pool down."""


@dataclass(slots=True)
class _Counts:
    """Everything counted so far."""

    load: Load = field(default_factory=lambda: Load(0, 0, ()))
    arrived: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    pool_tokens: int = 0
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    load_decisions: dict[LoadReason, int] = field(default_factory=lambda: dict.fromkeys(LOAD_REASONS, 0))
    prompt_tokens: int = 0
    computed_tokens: int = 0
    unreached_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    overruns: int = 0
    finished: dict[FinishedReason, int] = field(default_factory=lambda: dict.fromkeys(FINISHED_REASONS, 0))
    refused: dict[RefusedReason, int] = field(default_factory=lambda: dict.fromkeys(REFUSED_REASONS, 0))
    queue: Histogram = field(default_factory=lambda: Histogram(_REQUEST_SECONDS))
    first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_SECONDS))
    gaps: Histogram = field(default_factory=lambda: Histogram(_GAP_SECONDS))
    whole: Histogram = field(default_factory=lambda: Histogram(_REQUEST_SECONDS))
    step: Histogram = field(default_factory=lambda: Histogram(_GAP_SECONDS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_STEP_TOKENS))


class Metrics(Collector):
    """Subscribe `listen` to the bus; serve `exposition()` to scrapers. Has a registry of its own."""

    def __init__(
        self,
        facts: EngineFacts,
        listener_errors: Callable[[], int] = lambda: 0,
        tiers: Callable[[], Sequence[TierSnapshot]] = lambda: (),
        resident_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """listener_errors: number of exceptions of the bus's listeners, which only grows. tiers, resident_bytes: now."""
        self._facts = facts
        self._listener_errors = listener_errors
        self._tiers = tiers
        self._resident_bytes = resident_bytes
        self._counts = _Counts(loaded_tokens=dict.fromkeys(facts.tiers, 0))
        self._lock = threading.Lock()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def listen(self, event: Event) -> None:
        with self._lock:
            _count(self._counts, event)

    @property
    def prompt_tokens(self) -> dict[str, int]:
        """Prompt tokens of admitted requests, by source of keys and values: computed, cached (in the pool), a tier's name."""
        with self._lock:
            return dict(_sources(self._counts))

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format, in `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return [
                *_now(self._counts.load),
                *_totals(self._counts, self._listener_errors()),
                *_times(self._counts),
                *_told(self._facts),
                _gauge("resident_memory_bytes", "Memory of the process that is resident now.", self._resident_bytes()),
                *tier_metrics(self._tiers()),
            ]


def _count(counts: _Counts, event: Event) -> None:
    match event:
        case Stepped():
            counts.load = event.load
            counts.new_tokens += event.new_tokens
            counts.step.observe(event.seconds)
            counts.step_tokens.observe(event.prefill_tokens + event.decode_tokens)
            counts.gaps.observe_all(event.gaps)
        case LoadChanged():
            counts.load = event.load
        case RequestArrived():
            counts.arrived += 1
        case RequestAdmitted():
            # The bus counts what is raised here, so the engine goes on. Checks come first: no event is counted by half.
            assert 0 <= event.cached_tokens < event.prompt_tokens
            assert event.queried or event.cached_tokens == 0
            counts.queried_tokens += event.prompt_tokens if event.queried else 0
            assert event.pool_tokens >= 0
            counts.prompt_tokens += event.prompt_tokens
            counts.cached_tokens += event.cached_tokens
            counts.pool_tokens += event.pool_tokens
            for tier, tokens in event.loaded_tokens.items():
                counts.loaded_tokens[tier] = counts.loaded_tokens.get(tier, 0) + tokens
            counts.queue.observe(event.queue_seconds)
        case PromptComputed():
            assert event.computed_tokens >= 0
            assert event.unreached_tokens >= 0
            counts.computed_tokens += event.computed_tokens
            counts.unreached_tokens += event.unreached_tokens
        case RequestWaits():
            pass
        case LoadDecided():
            counts.load_decisions[event.reason] += 1
        case FirstToken():
            counts.first_token.observe(event.seconds)
        case Preempted():
            counts.preemptions += 1
        case RequestFinished():
            counts.finished[event.reason] += 1
            counts.whole.observe(event.seconds)
        case RequestRefused():
            counts.refused[event.reason] += 1
        case StreamOverrun():
            counts.overruns += 1


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kveik:{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kveik:{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = CounterMetricFamily(f"kveik:{name}", text, labels=[label])
    for value, count in values:
        family.add_metric([value], count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(f"kveik:{name}", text, buckets=histogram.buckets, sum_value=histogram.sum)


def _now(load: Load) -> Iterable[Metric]:
    usage = GaugeMetricFamily(
        "kveik:kv_cache_usage_perc", "Share of a group's blocks in use; 1 is all of them.", labels=["group"]
    )
    blocks = GaugeMetricFamily("kveik:kv_cache_blocks", "Blocks of a layer group by state.", labels=["group", "state"])
    for group, counts in enumerate(load.blocks):
        usage.add_metric([str(group)], counts.held / counts.total if counts.total else 0.0)
        for state, count in (("free", counts.free), ("cached", counts.cached), ("held", counts.held)):
            blocks.add_metric([str(group), state], count)
    yield from (usage, blocks)


def _sources(counts: _Counts) -> tuple[tuple[str, int], ...]:
    return (("computed", counts.computed_tokens), ("cached", counts.pool_tokens), *counts.loaded_tokens.items())


def _totals(counts: _Counts, listener_errors: int) -> Iterable[Metric]:
    sources = _sources(counts)
    yield _counter("requests", "Requests that were queued.", counts.arrived)
    yield _counter("prefix_cache_queries", "Prompt tokens looked up in the cache, at admission.", counts.queried_tokens)
    yield _counter("prefix_cache_hits", "Prompt tokens hit in the cache, at admission.", counts.cached_tokens)
    yield _counter("num_preemptions", "Preemptions of running choices.", counts.preemptions)
    yield _counter("prompt_tokens", "Prompt tokens of admitted requests.", counts.prompt_tokens)
    yield _labelled("prompt_tokens_by_source", "Prompt tokens by source of their keys and values.", "source", sources)
    if counts.loaded_tokens:
        text = "Admissions by the reason why they loaded from tiers or did not."
        yield _labelled("kv_load_decisions", text, "reason", counts.load_decisions.items())
    text = "Prompt tokens neither hit nor computed, because their request ended."
    yield _counter("prompt_tokens_unreached", text, counts.unreached_tokens)
    yield _counter("generation_tokens", "Tokens sampled.", counts.new_tokens)
    yield _labelled("request_success", "Choices that ended, by reason.", "finished_reason", counts.finished.items())
    yield _labelled("requests_refused", "Requests that were refused, by reason.", "reason", counts.refused.items())
    yield _counter("listener_errors", "Exceptions in listeners of the engine's events.", listener_errors)
    yield _counter("stream_overruns", "Requests ended because their reader was too slow.", counts.overruns)


def _times(counts: _Counts) -> Iterable[Metric]:
    yield _histogram("request_queue_time_seconds", "From arrival to first admission.", counts.queue)
    yield _histogram("time_to_first_token_seconds", "From arrival to a choice's first token.", counts.first_token)
    yield _histogram("inter_token_latency_seconds", "Between two tokens of a choice.", counts.gaps)
    yield _histogram("e2e_request_latency_seconds", "From arrival to a choice's end.", counts.whole)
    yield _histogram("step_seconds", "Seconds of one step of the engine.", counts.step)
    yield _histogram("step_tokens", "Tokens computed in one step.", counts.step_tokens)


def _told(facts: EngineFacts) -> Iterable[Metric]:
    info = GaugeMetricFamily(
        "kveik:engine_info",
        "Arithmetic of products, its instruction set, and the type of stored keys and values; always 1.",
        labels=["dtype", "arithmetic", "isa", "kv_cache_dtype"],
    )
    info.add_metric([facts.dtype, facts.arithmetic, facts.isa, facts.kv_cache_dtype], 1)
    yield info
    yield _gauge("threads", "Threads of the arithmetic.", facts.threads)
    yield _gauge("block_size_tokens", "Tokens per block.", facts.block_size)
    yield _gauge("kv_cache_pool_bytes", "Memory of the pool of keys and values.", facts.pool_bytes)
    yield _gauge("planned_memory_bytes", "Memory of the process by its plan; resident memory stays below.", facts.planned_bytes)
