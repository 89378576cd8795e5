import random
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from kveik.observe.bus import EventBus
from kveik.observe.events import (
    FINISHED_REASONS,
    REFUSED_REASONS,
    BlockCounts,
    Event,
    FirstToken,
    Load,
    LoadChanged,
    Preempted,
    PromptComputed,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestRefused,
    Stepped,
    StreamOverrun,
)
from kveik.observe.metrics import EngineFacts, Metrics

FACTS = EngineFacts(
    threads=4,
    dtype="bfloat16",
    arithmetic="w4a8",
    isa="avx2",
    kv_cache_dtype="int8",
    block_size=16,
    pool_bytes=1 << 30,
    planned_bytes=3 << 30,
)
IDLE = Load(0, 0, (BlockCounts(10, 0, 0),))

Labels = tuple[tuple[str, str], ...]


def scrape(metrics: Metrics) -> dict[str, dict[Labels, float]]:
    """Sample name → labels → value, read by the client library's own parser."""
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def heard(*events: Event) -> dict[str, dict[Labels, float]]:
    metrics = Metrics(FACTS)
    for event in events:
        metrics.listen(event)
    return scrape(metrics)


def value(samples, name: str, **labels: str) -> float:
    return samples[f"kveik:{name}"][tuple(sorted(labels.items()))]


def stepped(**changes: object) -> Stepped:
    plain = {"prefill_tokens": 0, "decode_tokens": 1, "new_tokens": 1, "rows": 1, "seconds": 0.01, "load": IDLE}
    return Stepped(**(plain | changes))


def test_the_load_is_shown_per_group_and_state():
    load = Load(3, 5, (BlockCounts(2, 3, 5), BlockCounts(0, 0, 8), BlockCounts(0, 0, 0)))
    for event in (stepped(load=load), LoadChanged(load)):
        samples = heard(event)
        assert [value(samples, "kv_cache_usage_perc", group=group) for group in "012"] == [0.5, 1.0, 0.0]
        assert [value(samples, "kv_cache_blocks", group="0", state=state) for state in ("free", "cached", "held")] == [2, 3, 5]


def test_a_prompt_is_counted_by_source_and_hits_by_token():
    samples = heard(
        RequestAdmitted("r", prompt_tokens=1000, cached_tokens=600, queue_seconds=0.2), PromptComputed("r", 300, 100)
    )
    assert value(samples, "prompt_tokens_unreached_total") == 100
    assert value(samples, "prefix_cache_hits_total") == 600
    assert value(samples, "prefix_cache_queries_total") == 1000
    assert value(samples, "prompt_tokens_total") == 1000
    assert value(samples, "prompt_tokens_by_source_total", source="computed") == 300
    assert value(samples, "prompt_tokens_by_source_total", source="cached") == 600
    assert value(samples, "request_queue_time_seconds_sum") == pytest.approx(0.2)


def test_a_request_that_does_not_ask_the_cache_is_no_query():
    samples = heard(RequestAdmitted("r", prompt_tokens=100, cached_tokens=0, queue_seconds=0.0, queried=False))
    assert value(samples, "prefix_cache_queries_total") == 0
    assert value(samples, "prompt_tokens_total") == 100


def test_times_and_tokens_of_steps_are_counted():
    samples = heard(
        stepped(prefill_tokens=30, decode_tokens=2, new_tokens=3, seconds=0.03, gaps=(0.02, 0.04)), FirstToken("r", 0.3)
    )
    assert value(samples, "generation_tokens_total") == 3
    assert value(samples, "inter_token_latency_seconds_count") == 2
    assert value(samples, "inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert value(samples, "inter_token_latency_seconds_bucket", le="0.025") == 1
    assert value(samples, "time_to_first_token_seconds_bucket", le="0.25") == 0
    assert value(samples, "time_to_first_token_seconds_bucket", le="0.5") == 1
    assert value(samples, "step_seconds_sum") == pytest.approx(0.03)
    assert value(samples, "step_tokens_sum") == 32


def test_ends_refusals_preemptions_and_overruns_are_counted():
    finished = [RequestFinished("r", reason, 10, 0, 3, 1.5) for reason in (*FINISHED_REASONS, "stop")]
    refused = [RequestRefused(reason) for reason in (*REFUSED_REASONS, "overloaded")]
    samples = heard(
        RequestArrived("r", 10, 1), *finished, *refused, Preempted("r", "blocks", 40), StreamOverrun("r"), StreamOverrun("r")
    )
    for reason in FINISHED_REASONS:
        assert value(samples, "request_success_total", finished_reason=reason) == 1 + (reason == "stop")
    for reason in REFUSED_REASONS:
        assert value(samples, "requests_refused_total", reason=reason) == 1 + (reason == "overloaded")
    assert value(samples, "e2e_request_latency_seconds_count") == len(finished)
    assert value(samples, "requests_total") == 1
    assert value(samples, "num_preemptions_total") == 1
    assert value(samples, "stream_overruns_total") == 2


def test_what_does_not_change_is_told():
    samples = heard()
    assert value(samples, "engine_info", dtype="bfloat16", arithmetic="w4a8", isa="avx2", kv_cache_dtype="int8") == 1
    assert value(samples, "threads") == 4
    assert value(samples, "block_size_tokens") == 16
    assert value(samples, "kv_cache_pool_bytes") == 1 << 30
    assert value(samples, "planned_memory_bytes") == 3 << 30


def test_resident_memory_is_read_when_it_is_asked_for():
    sizes = iter((1024, 2048))
    metrics = Metrics(FACTS, resident_bytes=lambda: next(sizes))
    for size in (1024, 2048):
        assert f"kveik:resident_memory_bytes {float(size)}" in metrics.exposition().decode()


def test_every_label_value_is_there_from_the_start():
    samples = heard()
    assert len(samples["kveik:request_success_total"]) == len(FINISHED_REASONS)
    assert len(samples["kveik:requests_refused_total"]) == len(REFUSED_REASONS)
    assert all(count == 0 for count in samples["kveik:request_success_total"].values())


def test_every_metric_has_its_own_name_help_and_kind():
    families = list(text_string_to_metric_families(Metrics(FACTS).exposition().decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    assert all(family.name.startswith("kveik:") and family.documentation.endswith(".") for family in families)
    assert {family.type for family in families} == {"gauge", "counter", "histogram"}


def test_the_process_wide_registry_stays_untouched():
    before = {family.name for family in REGISTRY.collect()}
    Metrics(FACTS)
    Metrics(FACTS)
    assert {family.name for family in REGISTRY.collect()} == before


def test_an_idle_engine_shows_the_same_at_every_scrape():
    metrics = Metrics(FACTS, listener_errors=lambda: 7)
    for event in (RequestAdmitted("r", 20, 4, 0.1), stepped(gaps=(0.1,)), RequestFinished("r", "stop", 20, 4, 3, 1.0)):
        metrics.listen(event)
    assert len({metrics.exposition() for _ in range(60)}) == 1
    assert value(scrape(metrics), "listener_errors_total") == 7


@pytest.mark.parametrize("prompt, cached, queried", [(10, 11, True), (10, 10, True), (10, -1, True), (10, 3, False)])
def test_an_impossible_admission_is_an_error_and_counts_nothing(prompt, cached, queried):
    bus = EventBus()
    metrics = Metrics(FACTS, listener_errors=lambda: bus.errors)
    bus.subscribe(metrics.listen)
    bus.publish(RequestAdmitted("r", prompt, cached, 0.0, queried))
    samples = scrape(metrics)
    assert value(samples, "listener_errors_total") == 1
    assert value(samples, "prompt_tokens_total") == value(samples, "prefix_cache_queries_total") == 0


class World:
    """Requests that arrive, wait, run, are preempted, come back, end or are aborted; tells events as an engine would."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.waiting: list[tuple[int, int, bool]] = []
        self.running: list[tuple[int, int, bool]] = []
        self.prompt_tokens = self.cached_tokens = self.preemptions = self.ended = 0

    def happen(self) -> Iterator[Event]:
        deed = self.chance.choice([self.arrive, self.admit, self.preempt, self.end, self.step, self.refuse])
        yield from deed()

    def arrive(self) -> Iterator[Event]:
        prompt = self.chance.randint(1, 500)
        self.waiting.append((prompt, self.chance.randint(0, prompt - 1), False))
        yield RequestArrived("r", prompt, 1)

    def admit(self) -> Iterator[Event]:
        if self.waiting:
            prompt, cached, known = self.waiting.pop(0)
            self.running.append((prompt, cached, True))
            if not known:
                self.prompt_tokens += prompt
                self.cached_tokens += cached
                yield RequestAdmitted("r", prompt, cached, self.chance.random())
                yield PromptComputed("r", prompt - cached, 0)

    def preempt(self) -> Iterator[Event]:
        if self.running:
            self.waiting.insert(0, self.running.pop())
            self.preemptions += 1
            yield Preempted("r", "blocks", 40)

    def end(self) -> Iterator[Event]:
        queue = self.chance.choice([self.waiting, self.running])
        if queue:
            prompt, cached, known = queue.pop(self.chance.randrange(len(queue)))
            self.ended += 1
            yield RequestFinished("r", self.chance.choice(FINISHED_REASONS), prompt, cached if known else 0, 5, 1.0)

    def step(self) -> Iterator[Event]:
        gaps = tuple(self.chance.random() for _ in self.running)
        load = Load(len(self.running), len(self.waiting), (BlockCounts(0, 1, len(self.running)),))
        yield stepped(new_tokens=len(gaps), gaps=gaps, load=load)

    def refuse(self) -> Iterator[Event]:
        yield RequestRefused(self.chance.choice(REFUSED_REASONS))


@given(st.integers(0, 1 << 30), st.integers(1, 120))
def test_counts_never_fall_and_sums_always_hold(seed, events):
    world, metrics, before = World(seed), Metrics(FACTS), {}
    for at in range(events):
        for event in world.happen():
            metrics.listen(event)
        if at % 10 and at < events - 1:
            continue
        samples = scrape(metrics)
        prompt, cached = value(samples, "prompt_tokens_total"), value(samples, "prompt_tokens_by_source_total", source="cached")
        assert prompt >= cached >= 0
        assert sum(samples["kveik:prompt_tokens_by_source_total"].values()) == prompt == world.prompt_tokens
        assert value(samples, "prefix_cache_queries_total") >= value(samples, "prefix_cache_hits_total") == world.cached_tokens
        assert value(samples, "num_preemptions_total") == world.preemptions
        assert sum(samples["kveik:request_success_total"].values()) == world.ended
        counters = {
            (name, labels): count
            for name, found in samples.items()
            if name.endswith(("_total", "_bucket", "_count", "_sum"))
            for labels, count in found.items()
        }
        assert all(counters[key] >= count for key, count in before.items())
        before = counters


def test_a_scrape_from_another_thread_sees_whole_events():
    metrics, over = Metrics(FACTS), threading.Event()

    def work() -> None:
        while not over.is_set():
            metrics.listen(RequestAdmitted("r", 10, 4, 0.0))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(30):
            samples = scrape(metrics)
            prompt = value(samples, "prompt_tokens_total")
            assert value(samples, "prompt_tokens_by_source_total", source="cached") * 10 == prompt * 4
            assert value(samples, "prefix_cache_queries_total") == prompt
            assert value(samples, "request_queue_time_seconds_count") * 10 == prompt
    finally:
        over.set()
        thread.join()
