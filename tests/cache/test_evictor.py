"""One policy decides on chains, and the blocks of all groups follow."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy, Key, MayGo, Retention
from kveik.cache.eviction.priority import PriorityPolicy
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup
from tests.cache.making import admit, compute, leave, serve
from tests.seeds import over_seeds


def kv_cache(policy: EvictionPolicy, blocks: Sequence[int] = (16,), windows: Sequence[int | None] = (None,)) -> KVCacheManager:
    groups = [LayerGroup((number,), 1, 2, window) for number, window in enumerate(windows)]
    return KVCacheManager(groups, blocks, block_size=4, rows=4, max_model_len=32, max_chunk=8, eviction=policy)


class Favouring(LruPolicy):
    """Least recently used first, but for chains that begin with a favoured key; these go last, and are worth something."""

    def __init__(self) -> None:
        super().__init__()
        self.favoured: set[Key] = set()

    def victims(self, count: int, may_go: MayGo, now: float) -> list[Key]:
        first = super().victims(count, lambda key: key not in self.favoured and may_go(key), now)
        self.returned([key for key in self._aside if key in self.favoured])
        return first + super().victims(count - len(first), may_go, now)

    def worths(self, keys: Sequence[Key], now: float) -> list[float]:
        return [float(key in self.favoured) for key in keys]


def favour(cache: KVCacheManager, policy: Favouring) -> None:
    """Whatever is cached now."""
    policy.favoured.update(cache._groups[0].index.by_key)


class PoolOrder(LruPolicy):
    """Names no victim; so those blocks go that the pool has had for longest."""

    def victims(self, count: int, may_go: MayGo, now: float) -> list[Key]:
        return []


@over_seeds(10)
def test_a_policy_of_least_recent_use_does_what_the_pool_does_by_itself(seed: int) -> None:
    hits = drawn_hits(kv_cache(LruPolicy()), random.Random(seed))
    assert hits == drawn_hits(kv_cache(PoolOrder()), random.Random(seed))
    assert sum(hits) > 100


def drawn_hits(cache: KVCacheManager, chance: random.Random) -> list[int]:
    """Tokens found by each of many requests, up to three at once; as in service, none computes what another is computing."""
    running, hits = dict[int, int](), []
    for number in range(150):
        now = float(number)
        if running and (len(running) == 3 or chance.random() < 0.4):
            one = chance.choice(sorted(running))
            leave(cache, one, running.pop(one), now)
            continue
        # Of a prompt of whole blocks the last one is computed again, and its first block is used without being held.
        tokens = [chance.randrange(3) // 2 for _ in range(4 * chance.randrange(5) + chance.randrange(1, 4))]
        cache.open(number, tokens, request="r")
        match = cache.match(number, len(tokens) - 1)
        if cache.blocker(number, match, len(tokens) - 1) or not cache.can_admit(number, match):
            cache.close(number, now)
            continue
        cache.admit(number, match, len(tokens), now)
        cache.grow(number, len(tokens), now)
        running[number] = len(tokens)
        hits.append(match.tokens if match else 0)
        for one, length in running.items():
            if chance.random() < 0.5:
                cache.commit(one, length)
        cache.check()
    return hits


def test_what_the_policy_values_stays_and_the_rest_goes() -> None:
    policy = Favouring()
    cache = kv_cache(policy)
    serve(cache, 0, range(100, 116))
    favour(cache, policy)
    for number in range(1, 12):
        serve(cache, number, range(200 + 20 * number, 216 + 20 * number), now=float(number))
    assert admit(cache, 20, range(100, 116)).matched == 15


def test_blocks_of_a_running_request_never_go_whatever_the_policy_wants() -> None:
    cache = kv_cache(HazardPolicy(4, random.Random(0)), blocks=(12,))
    serve(cache, 0, range(100, 116))
    admit(cache, 1, range(100, 117))
    for number in range(2, 8):
        serve(cache, number, range(200 + 20 * number, 216 + 20 * number))
    leave(cache, 1, 17)
    assert admit(cache, 20, range(100, 117)).matched == 16


def test_blocks_of_a_preempted_request_go_last() -> None:
    cache = kv_cache(HazardPolicy(4, random.Random(0)), blocks=(10,))
    compute(cache, 0, range(100, 112))
    cache.release(0, 12)
    for number in range(2, 8):
        serve(cache, number, range(200 + 20 * number, 216 + 20 * number))
    match = cache.match(0, 11)
    assert match is not None
    assert match.tokens >= 8


def test_what_a_request_left_in_an_earlier_life_goes_with_it() -> None:
    """Preempted with four blocks, of which the second goes meanwhile; admitted again with one, and aborted at once."""
    policy = HazardPolicy(4, random.Random(0))
    cache = kv_cache(policy)
    compute(cache, 0, range(100, 117))
    cache.release(0, 17)
    group = cache._groups[0]
    cache.evictor.remove(0, [group.index.by_key[cache._seqs[0].chain.keys[1]]])
    match = cache.match(0, 16)
    assert match is not None
    assert match.full == 1
    cache.admit(0, match, 17, 0.0)
    leave(cache, 0, match.tokens)
    assert policy.stored_count == 1
    assert group.pool.full == 1


def test_a_chain_that_goes_takes_its_blocks_in_every_group_with_it() -> None:
    cache = kv_cache(LruPolicy(), blocks=(8, 100), windows=(None, 9))
    for number in range(6):
        serve(cache, number, range(100 * number, 100 * number + 16), now=float(number))
    full, windowed = cache._groups
    assert set(windowed.index.by_key) <= set(full.index.by_key)
    assert cache.usage[1].free > 50


def test_a_windowed_group_that_runs_short_by_itself_keeps_what_the_policy_values() -> None:
    policy = Favouring()
    cache = kv_cache(policy, blocks=(200, 40), windows=(None, 9))
    serve(cache, 0, range(100, 116))
    favour(cache, policy)
    for number in range(1, 30):
        serve(cache, number, range(200 + 20 * number, 216 + 20 * number), now=float(number))
    assert admit(cache, 40, range(100, 116)).matched == 15
    assert cache.usage[0].free > 0


def test_without_prefix_caching_the_policy_is_left_with_nothing() -> None:
    policy = LruPolicy()
    cache = KVCacheManager(
        [LayerGroup((0,), 1, 2, None)],
        [16],
        block_size=4,
        rows=4,
        max_model_len=32,
        enable_prefix_caching=False,
        eviction=policy,
    )
    serve(cache, 0, range(16))
    assert policy.stored_count == 0


def test_an_emptied_cache_is_empty_for_the_policy_too() -> None:
    policy = HazardPolicy(4, random.Random(0))
    cache = kv_cache(policy)
    serve(cache, 0, range(16))
    assert policy.stored_count == 4
    cache.reset()
    cache.check()
    assert policy.stored_count == 0


def test_values_that_are_not_finite_leave_the_policy_nothing() -> None:
    policy = HazardPolicy(4, random.Random(0))
    cache = kv_cache(policy)
    compute(cache, 0, range(16))
    cache.invalidate(0)
    leave(cache, 0, 16)
    assert policy.stored_count == 0


def test_what_a_request_asks_to_keep_is_kept_and_what_it_lets_go_goes() -> None:
    cache = kv_cache(PriorityPolicy(LruPolicy(), 16))
    for number, priority in ((0, 80), (1, 0)):
        tokens = list(range(100 * number, 100 * number + 9))
        cache.open(number, tokens, request="r", retention=Retention(priority, 1000.0))
        cache.admit(number, None, 9, 0.0)
        cache.grow(number, 9, 0.0)
        leave(cache, number, 9)
    # Two full blocks each, of sixteen: the eighth request pushes a full block out, and the ninth and tenth two each.
    for number in range(2, 10):
        serve(cache, number, range(100 * number, 100 * number + 9))
    assert admit(cache, 20, range(100, 109)).matched == 0
    assert admit(cache, 21, range(9)).matched == 8
