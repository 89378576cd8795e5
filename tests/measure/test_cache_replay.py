"""The replay finds what plain simulations find, and keeps the laws of the pool while it does."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.traces import agents, cycle
from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy
from kveik.measure.replay import Replay, TraceRequest, read_trace, tier_of

TRACES = Path(__file__).parents[1] / "traces"
CONVERSATION, SYNTHETIC = TRACES / "conversation_1200.jsonl.gz", TRACES / "synthetic_700.jsonl.gz"


def hits(requests: Sequence[TraceRequest], blocks: int, policy: EvictionPolicy, **how: bool) -> float:
    """Share of all prompt blocks found in the pool."""
    return two_hits(requests, Replay(blocks, policy, beside=longest(requests), **how))[0]


def longest(requests: Sequence[TraceRequest]) -> int:
    return max(len(one.keys) for one in requests)


def two_hits(requests: Sequence[TraceRequest], world: Replay) -> tuple[float, float]:
    """Shares of all prompt blocks found in the pool and below."""
    pool = lower = 0
    for number, request in enumerate(requests):
        found = world.serve(request)
        pool, lower = pool + found.pool, lower + found.below
        world.learn()
        if number % 100 == 0:
            world.check()
    world.check()
    total = sum(len(one.keys) for one in requests)
    return pool / total, lower / total


def hazard(seed: int = 0) -> HazardPolicy:
    return HazardPolicy(512, random.Random(seed))


def slow_plain(requests: Sequence[TraceRequest], blocks: int) -> float:
    """Least recently used block first, blocks used in prompt order."""
    cached: OrderedDict[bytes, None] = OrderedDict()
    found = 0
    for request in requests:
        found += next((place for place, key in enumerate(request.keys) if key not in cached), len(request.keys))
        for key in request.keys:
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > blocks:
            cached.popitem(last=False)
    return found / sum(len(one.keys) for one in requests)


def slow_tail_first(requests: Sequence[TraceRequest], blocks: int) -> float:
    """The same, full blocks only, used from the prompt's end to its beginning."""
    cached: OrderedDict[bytes, None] = OrderedDict()
    found = 0
    for request in requests:
        keys = request.keys[: request.full]
        found += next((place for place, key in enumerate(keys) if key not in cached), len(keys))
        for key in reversed(keys):
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > blocks:
            cached.popitem(last=False)
    return found / sum(len(one.keys) for one in requests)


@pytest.mark.parametrize("trace", [CONVERSATION, SYNTHETIC], ids=lambda path: path.name)
@pytest.mark.parametrize("blocks", [300, 1000, 3000])
def test_lru_finds_what_plain_simulations_find(trace: Path, blocks: int) -> None:
    requests = read_trace(trace)
    assert hits(requests, blocks, LruPolicy(), plain=True) == slow_plain(requests, blocks)
    assert hits(requests, blocks, LruPolicy()) == slow_tail_first(requests, blocks)


@pytest.mark.parametrize("trace", [CONVERSATION, SYNTHETIC], ids=lambda path: path.name)
@pytest.mark.parametrize("blocks", [1000, 3000])
def test_hazard_finds_a_quarter_more_than_lru_in_real_traces(trace: Path, blocks: int) -> None:
    requests = read_trace(trace)
    assert hits(requests, blocks, hazard()) > 1.25 * hits(requests, blocks, LruPolicy())


def test_hazard_finds_half_of_a_loop_of_which_lru_finds_nothing() -> None:
    requests = list(cycle(5000, rounds=20))
    assert hits(requests, 3000, LruPolicy()) == 0.0
    assert hits(requests, 3000, hazard()) >= 0.5


@pytest.mark.parametrize("blocks", [300, 1000])
def test_hazard_is_not_below_lru_in_a_loop_of_agents(blocks: int) -> None:
    requests = list(agents(random.Random(1), 1500))
    assert hits(requests, blocks, hazard()) > hits(requests, blocks, LruPolicy()) - 0.003


def slow_two(requests: Sequence[TraceRequest], blocks: int, below: int) -> tuple[float, float, int]:
    """Two stores by recency, each from the prompt's end to its beginning; what the upper gives up is written into the lower."""
    upper, lower = OrderedDict[bytes, None](), OrderedDict[bytes, None]()
    in_upper = in_both = writes = 0
    for request in requests:
        keys = request.keys[: request.full]
        here = next((place for place, key in enumerate(keys) if key not in upper), len(keys))
        in_upper += here
        in_both += next((at for at in range(here, len(keys)) if keys[at] not in lower and keys[at] not in upper), len(keys))
        for key in reversed(keys):
            upper[key] = None
            upper.move_to_end(key)
            if key in lower:
                lower.move_to_end(key)
        while len(upper) > blocks:
            gone, _ = upper.popitem(last=False)
            if gone not in lower:
                if len(lower) == below:
                    lower.popitem(last=False)
                lower[gone] = None
                writes += 1
    total = sum(len(one.keys) for one in requests)
    return in_upper / total, (in_both - in_upper) / total, writes


@pytest.mark.parametrize("trace", [CONVERSATION, SYNTHETIC], ids=lambda path: path.name)
def test_two_stores_by_recency_find_and_write_what_a_plain_simulation_does(trace: Path) -> None:
    requests = read_trace(trace)
    world = Replay(300, LruPolicy(), beside=longest(requests), below=[tier_of(1000, LruPolicy(), None)])
    assert (*two_hits(requests, world), world.writes) == slow_two(requests, 300, 1000)


def two_stores(
    requests: Sequence[TraceRequest], upper: EvictionPolicy, lower: EvictionPolicy, factor: float | None
) -> tuple[float, float, int]:
    """1,000 blocks over 3,000: found in the pool, found in both, written below."""
    world = Replay(1000, upper, beside=longest(requests), below=[tier_of(3000, lower, factor)])
    pool, below = two_hits(requests, world)
    return pool, pool + below, world.writes


@pytest.mark.parametrize("trace", [CONVERSATION, SYNTHETIC], ids=lambda path: path.name)
def test_hazard_finds_a_quarter_more_than_lru_in_pool_and_tier_together(trace: Path) -> None:
    requests = read_trace(trace)
    recency = two_stores(requests, LruPolicy(), LruPolicy(), None)
    learnt = two_stores(requests, hazard(), hazard(1), None)
    assert learnt[0] > 1.3 * recency[0]
    assert learnt[1] > 1.25 * recency[1]


def test_the_write_filter_saves_a_third_of_the_writes_and_loses_next_to_no_hits() -> None:
    requests = read_trace(CONVERSATION)
    everything = two_stores(requests, hazard(), hazard(1), None)
    filtered = two_stores(requests, hazard(), hazard(1), 1.5)
    assert filtered[1] > 0.97 * everything[1]
    assert filtered[2] < 0.67 * everything[2]
