"""Loads into the pool: what has arrived is found and is what it should be, what has not is not, and no block is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy, Key
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup
from kveik.offload.loader import Loader
from kveik.offload.manager import OffloadManager
from kveik.offload.transfer import Delete, Spill
from tests.offload.making import tier
from tests.seeds import over_seeds

SIZE, CONTEXT = 4, 32


class Memory:
    """A KV cache manager whose blocks and tiers hold something: the key of what was written into them."""

    def __init__(self, policy: EvictionPolicy, blocks: Sequence[int], windows: Sequence[int | None]) -> None:
        groups = [LayerGroup((number,), 1, 2, window) for number, window in enumerate(windows)]
        self.kv_cache = KVCacheManager(
            groups, blocks, block_size=SIZE, rows=4, max_model_len=CONTEXT, max_chunk=8, eviction=policy, record_facts=True
        )
        self.directory = OffloadManager(groups, SIZE, [tier(60, sizes=(1,) * len(groups)), tier(200, sizes=(1,) * len(groups))])
        self.loader = Loader(self.kv_cache, self.directory)
        self.now = 0.0
        self.pool: dict[tuple[int, int], Key] = {}
        self.tiers: list[dict[tuple[Key, int], Key]] = [{}, {}]
        self.count = 0

    def serve(self, tokens: list[int]) -> int:
        """A whole life; tokens that were found in the pool."""
        number = self.open(tokens)
        match = self.kv_cache.match(number, len(tokens) - 1)
        matched = match.tokens if match else 0
        if not self.kv_cache.can_admit(number, match):
            self.kv_cache.close(number, self.now)
            return 0
        self.kv_cache.admit(number, match, len(tokens), self.now)
        self.kv_cache.grow(number, len(tokens), self.now)
        self.spill()
        seq = self.kv_cache._seqs[number]
        keys = seq.chain.extend(tokens, len(tokens) // SIZE)
        for group, blocks in enumerate(seq.blocks):
            for place in range(seq.firsts[group], len(keys)):
                if place * SIZE >= matched // SIZE * SIZE:
                    self.pool[group, blocks[place]] = keys[place]
                assert self.pool[group, blocks[place]] == keys[place], "another's content was found"
        self.kv_cache.commit(number, len(tokens))
        self.kv_cache.release(number, len(tokens))
        self.kv_cache.close(number, self.now)
        self.kv_cache.check()
        return matched

    def open(self, tokens: list[int]) -> int:
        self.count += 1
        self.now += 1.0
        self.kv_cache.open(self.count, tokens, request="r")
        return self.count

    def spill(self) -> None:
        """Before anything is written into a block that was given up."""
        self.directory.apply(self.kv_cache.take_facts(), self.now)
        for order in self.directory.take_transfers():
            if isinstance(order, Spill):
                if order.source is None:
                    block = next(one for one, key in self.pool.items() if one[0] == order.group and key == order.key)
                    content = self.pool[block]
                else:
                    content = self.tiers[order.source][order.key, order.group]
                self.tiers[order.target][order.key, order.group] = content
                self.directory.stored(order.target, order.key, order.group)
            elif isinstance(order, Delete):
                del self.tiers[order.tier][order.key, order.group]

    def begin(self, tokens: list[int]) -> tuple[int, int]:
        """Open a sequence and begin to load all that lies below. Its number, and the tokens that should be known afterwards."""
        number = self.open(tokens)
        limit = len(tokens) - 1
        match = self.kv_cache.match(number, limit)
        below = self.loader.find(number, match, limit)
        cut = len(below.cuts) - 1
        if not below or self.loader.begin(number, below, cut, self.now) is None:
            return number, match.tokens if match else 0
        self.spill()
        self.kv_cache.check()
        return number, int(below.prospect.tokens[cut])

    def copy(self, number: int, which: int, *, found: bool = True) -> None:
        loading = self.loader.active[number]
        fetch = loading.fetches[which]
        if found:
            self.pool[fetch.group, loading.targets[which]] = self.tiers[fetch.tier][fetch.key, fetch.group]
        else:
            del self.tiers[fetch.tier][fetch.key, fetch.group]
        self.loader.arrived(number, which, found=found)
        self.kv_cache.check()

    def finish(self, number: int) -> int:
        """End the load; tokens that the pool has then."""
        if number in self.loader.active:
            self.loader.end(number)
        self.kv_cache.check()
        match = self.kv_cache.match(number, len(self.kv_cache._seqs[number].tokens) - 1)
        return match.tokens if match else 0


def filled(windows: Sequence[int | None]) -> Memory:
    """The first chain has gone below."""
    memory = Memory(LruPolicy(), [16] * len(windows), windows)
    for number in range(8):
        memory.serve(list(range(100 * number, 100 * number + 18)))
    return memory


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_what_was_loaded_is_found_in_the_pool_and_computed_no_more(windows: Sequence[int | None]) -> None:
    memory = filled(windows)
    tokens = list(range(18))
    number, known = memory.begin(tokens)
    assert known == 16
    for which in sorted(memory.loader.active[number].waiting, reverse=True):
        memory.copy(number, which)
    assert memory.finish(number) == 16
    memory.kv_cache.close(number, memory.now)
    memory.kv_cache.check()
    assert memory.serve(tokens) == 16


def test_nothing_is_found_before_it_has_arrived() -> None:
    memory = filled((None,))
    number, _ = memory.begin(list(range(18)))
    other = memory.open(list(range(18)))
    assert memory.kv_cache.match(other, 17) is None
    memory.copy(number, 0)
    match = memory.kv_cache.match(other, 17)
    assert match is not None
    assert match.tokens == 4


def test_a_load_that_is_called_off_leaves_what_had_arrived() -> None:
    memory = filled((None,))
    number, _ = memory.begin(list(range(18)))
    memory.copy(number, 0)
    memory.copy(number, 1)
    assert memory.finish(number) == 8
    memory.kv_cache.close(number, memory.now)
    memory.kv_cache.check()


def test_a_record_that_is_missing_ends_the_hit_before_it_and_is_asked_for_no_more() -> None:
    memory = filled((None,))
    number, _ = memory.begin(list(range(18)))
    for which in (0, 2, 3):
        memory.copy(number, which)
    memory.copy(number, 1, found=False)
    assert memory.finish(number) == 4
    below = memory.loader.find(number, memory.kv_cache.match(number, 17), 17)
    assert not below
    memory.kv_cache.close(number, memory.now)
    memory.kv_cache.check()


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
@pytest.mark.parametrize("make", [LruPolicy, lambda: HazardPolicy(SIZE, random.Random(0), samples=4)], ids=["lru", "hazard"])
@over_seeds(8)
def test_whatever_is_loaded_lost_or_called_off_contents_are_right(
    make: type[LruPolicy], windows: Sequence[int | None], seed: int
) -> None:
    """Requests are served while loads go on; blocks are scarce and records are lost."""
    chance = random.Random(seed)
    memory = Memory(make(), [24, 20][: len(windows)], windows)
    open_loads, loaded = dict[int, int](), 0
    prompts = [[chance.randrange(2) for _ in range(chance.randrange(9, CONTEXT - 1))] for _ in range(16)]
    for _ in range(300):
        tokens = chance.choice(prompts)
        active = [one for one in open_loads if one in memory.loader.active]
        draw = chance.random()
        if draw < 0.3:
            memory.serve(tokens)
        elif draw < 0.4 and len(open_loads) < 2:
            number, known = memory.begin(tokens)
            open_loads[number] = known
        elif active and draw < 0.9:
            one = chance.choice(active)
            waiting = sorted(memory.loader.active[one].waiting)
            if waiting:
                which, shared = chance.choice(waiting), len(active) > 1
                memory.copy(one, which, found=shared or chance.random() < 0.9)
                loaded += 1
        elif open_loads:
            one = chance.choice(sorted(open_loads))
            complete = one in active and not memory.loader.active[one].waiting
            assert memory.finish(one) <= CONTEXT or complete
            memory.kv_cache.close(one, memory.now)
            memory.kv_cache.check()
            del open_loads[one]
        memory.spill()
        for group in range(len(windows)):
            for key, block in memory.kv_cache._groups[group].index.by_key.items():
                assert memory.pool[group, block] == key, "a block is found that holds something else"
    assert loaded > 5
