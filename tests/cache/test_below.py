"""A KV cache manager with tiers below it: what its pool gives up goes down, and is found again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup
from kveik.offload.tier_chain import TierChain
from kveik.offload.transfer import StoreRecord
from tests.cache.making import compute, leave, serve
from tests.offload.making import Stores, tier
from tests.seeds import over_seeds

SIZE = 4


def world(
    policy: EvictionPolicy, blocks: Sequence[int], windows: Sequence[int | None]
) -> tuple[KVCacheManager, TierChain, Stores]:
    groups = [LayerGroup((number,), 1, 2, window) for number, window in enumerate(windows)]
    kv_cache = KVCacheManager(
        groups, blocks, block_size=SIZE, rows=4, max_model_len=32, max_chunk=8, eviction=policy, record_facts=True
    )
    below = TierChain(groups, SIZE, [tier(1000, sizes=(1,) * len(groups))])
    return kv_cache, below, Stores(below, take_facts=kv_cache.take_facts)


def reach(kv_cache: KVCacheManager, below: TierChain, tokens: list[int]) -> int:
    """Tokens that pool and tiers have together."""
    kv_cache.open(99, tokens, request="q")
    match = kv_cache.match(99, len(tokens) - 1)
    hit = (match.tokens, match.full) if match else (0, 0)
    found = below.found(kv_cache.chain_keys(99, len(tokens) - 1), hit, kv_cache.in_pool)
    kv_cache.close(99, 0.0)
    return int(found.prospect.tokens[-1])


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_what_the_pool_gave_up_is_found_below_from_its_beginning(windows: Sequence[int | None]) -> None:
    kv_cache, below, stores = world(LruPolicy(), [12] * len(windows), windows)
    for number in range(12):
        serve(kv_cache, number, range(100 * number, 100 * number + 17), now=float(number))
        stores.work(now=float(number))
    for number in range(12):
        assert reach(kv_cache, below, [*range(100 * number, 100 * number + 17)]) == 16
    assert len(stores.records[0]) > 30


def test_of_a_windowed_group_only_what_a_window_needs_goes_down() -> None:
    kv_cache, _, stores = world(LruPolicy(), [12, 40], (None, 9))
    for number in range(12):
        serve(kv_cache, number, range(100 * number, 100 * number + 17))
        stores.work()
    full, windowed = (sum(group == one for _, group in stores.records[0]) for one in (0, 1))
    # A window of 9 needs the last two of a chain's four blocks.
    assert 0 < windowed * 2 <= full + 2


def test_a_preempted_request_s_blocks_go_down_when_others_need_them() -> None:
    kv_cache, below, stores = world(HazardPolicy(SIZE, random.Random(0)), [10], (None,))
    compute(kv_cache, 0, range(100, 117))
    kv_cache.release(0, 17)
    for number in range(2, 8):
        compute(kv_cache, number, range(200 + 40 * number, 200 + 40 * number + 30))
        leave(kv_cache, number, 30)
        stores.work()
    assert reach(kv_cache, below, [*range(100, 117)]) == 16


def test_a_new_content_is_written_through_once_and_at_once() -> None:
    groups = [LayerGroup((0,), 1, 2, None)]
    kv_cache = KVCacheManager(groups, [16], block_size=SIZE, rows=4, max_model_len=32, eviction=LruPolicy(), record_facts=True)
    below = TierChain(groups, SIZE, [tier(100, writes="write-through")])
    compute(kv_cache, 0, range(10))
    seq = kv_cache._seqs[0]
    below.absorb(kv_cache.take_facts(), 0.0)
    assert [order for order in below.take_transfers() if isinstance(order, StoreRecord)] == [
        StoreRecord(key, 0, None, 0, block) for key, block in zip(seq.chain.keys[:2], seq.blocks[0][:2], strict=True)
    ]
    compute(kv_cache, 1, range(9), request="s")
    below.absorb(kv_cache.take_facts(), 0.0)
    assert below.take_transfers() == []


@over_seeds(5)
def test_any_order_of_requests_leaves_pool_and_tiers_consistent(seed: int) -> None:
    chance = random.Random(seed)
    kv_cache, below, stores = world(HazardPolicy(SIZE, random.Random(0), samples=4), [14, 12], (None, 9))
    for number in range(120):
        now = float(number)
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 31))]
        kv_cache.open(number, tokens, request="r")
        match = kv_cache.match(number, len(tokens) - 1)
        if kv_cache.can_admit(number, match):
            kv_cache.admit(number, match, len(tokens), now)
            kv_cache.grow(number, len(tokens), now)
            kv_cache.commit(number, len(tokens))
            kv_cache.release(number, len(tokens))
        kv_cache.close(number, now)
        kv_cache.check()
        stores.work(chance.randrange(6), now)
        kv_cache.evictor.learn(now)
        below.learn(now)
    stores.work()
    held = {(one.keys[0], group) for one in below.tiers[0].records() for group in range(2) if one.groups >> group & 1}
    assert held == stores.records[0]
    assert held
