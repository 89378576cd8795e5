"""The replay finds what plain simulations find, and keeps the laws of the pool while it does."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.traces import agents, cycle
from kveik.cache.eviction.below import StoreBelow, WriteFilter
from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy
from kveik.cache.replay import Replay, TraceRequest
from kveik.engine.replaying import read_trace

TRACES = Path(__file__).parents[1] / "traces"
CONVERSATION, SYNTHETIC = TRACES / "conversation_1200.jsonl.gz", TRACES / "synthetic_700.jsonl.gz"


def hits(
    requests: Sequence[TraceRequest],
    blocks: int,
    policy: EvictionPolicy | None,
    *,
    below: StoreBelow | None = None,
    **how: bool,
) -> tuple[float, float]:
    """Shares of all prompt blocks found in the pool and below."""
    world = Replay(blocks, policy, beside=max(len(one.keys) for one in requests), below=below, **how)
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
    assert hits(requests, blocks, None, plain=True)[0] == slow_plain(requests, blocks)
    assert hits(requests, blocks, None)[0] == slow_tail_first(requests, blocks)


def test_the_pool_s_own_order_and_a_policy_of_least_recent_use_are_the_same() -> None:
    requests = read_trace(SYNTHETIC)
    assert hits(requests, 1000, LruPolicy()) == hits(requests, 1000, None)


@pytest.mark.parametrize("trace", [CONVERSATION, SYNTHETIC], ids=lambda path: path.name)
@pytest.mark.parametrize("blocks", [1000, 3000])
def test_hazard_finds_a_quarter_more_than_lru_in_real_traces(trace: Path, blocks: int) -> None:
    requests = read_trace(trace)
    assert hits(requests, blocks, hazard())[0] > 1.25 * hits(requests, blocks, None)[0]


def test_hazard_finds_half_of_a_loop_of_which_lru_finds_nothing() -> None:
    requests = list(cycle(5000, rounds=20))
    assert hits(requests, 3000, None)[0] == 0.0
    assert hits(requests, 3000, hazard())[0] >= 0.5


@pytest.mark.parametrize("blocks", [300, 1000])
def test_hazard_is_not_below_lru_in_a_loop_of_agents(blocks: int) -> None:
    requests = list(agents(random.Random(1), 1500))
    assert hits(requests, blocks, hazard())[0] > hits(requests, blocks, None)[0] - 0.003


def test_a_store_below_is_found_in_and_a_filter_saves_writes() -> None:
    requests = read_trace(CONVERSATION)
    found = {}
    for name, filtered in (("all", None), ("filtered", WriteFilter(1.5))):
        below = StoreBelow(3000, hazard(1), filtered)
        found[name] = (sum(hits(requests, 500, hazard(), below=below)), below.writes)
    assert found["all"][0] > hits(requests, 3000, hazard())[0] - 0.01
    assert found["filtered"][0] > found["all"][0] - 0.01
    assert found["filtered"][1] < 0.9 * found["all"][1]
