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
from kveik.observe.events import LoadDecided
from kveik.offload.cost import LoadCost
from kveik.offload.manager import OffloadManager
from kveik.offload.sequence_load import LoadWait
from kveik.offload.transfer import Arrived, Delete, LoadRecords, StoreRecord
from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence as Choice
from kveik.schedule.step_cost import StepCost
from tests.offload.making import HandCarrier, tier
from tests.offload.making import chained as chain_of
from tests.seeds import over_seeds

SIZE, CONTEXT = 4, 32


class Memory(HandCarrier):
    """A KV cache manager whose blocks and tiers hold something: the key of what was written into them."""

    def __init__(self, policy: EvictionPolicy, blocks: Sequence[int], windows: Sequence[int | None]) -> None:
        groups = [LayerGroup((number,), 1, 2, window) for number, window in enumerate(windows)]
        self.kv_cache = KVCacheManager(
            groups, blocks, block_size=SIZE, rows=4, max_model_len=CONTEXT, max_chunk=8, eviction=policy, record_facts=True
        )
        sizes = (1,) * len(groups)
        chain = chain_of(tier(60, sizes=sizes), tier(200, sizes=sizes), windows=windows)
        super().__init__(chain)
        self.decided: list[LoadDecided] = []
        # Computing is dear and loading is not, so that everything there is is loaded.
        costs = [LoadCost((1e-9, 1e-15)), LoadCost((1e-9, 1e-15))]
        self.offload = OffloadManager(
            self.kv_cache,
            chain,
            StepCost((1.0, 1.0, 1e-9)),
            costs,
            self,
            self.decided.append,
        )
        self.pool: dict[tuple[int, int], Key] = {}
        self.tiers: list[dict[tuple[Key, int], Key]] = [{}, {}]
        self.count, self.now = 0, 0.0
        self.open_ids: set[int] = set()

    def _carry_out(self, one: object) -> None:
        super()._carry_out(one)
        if isinstance(one, StoreRecord):
            source = self.pool[one.group, one.block] if one.source is None else self.tiers[one.source][one.key, one.group]
            assert source == one.key, "another's content is stored"
            self.tiers[one.target][one.key, one.group] = source
        elif isinstance(one, Delete):
            self.tiers[one.tier].pop((one.key, one.group), None)

    def serve(self, tokens: list[int]) -> int:
        """A whole life; tokens that were found in the pool."""
        number = self.open(tokens)
        match = self.kv_cache.match(number, len(tokens) - 1)
        matched = match.tokens if match else 0
        if not self.kv_cache.can_admit(number, match):
            self.close(number)
            return 0
        self.kv_cache.admit(number, match, len(tokens), self.now)
        self.kv_cache.grow(number, len(tokens), self.now)
        self.put()
        seq = self.kv_cache._seqs[number]
        keys = seq.chain.extend(tokens, len(tokens) // SIZE)
        for group, blocks in enumerate(seq.blocks):
            for place in range(seq.firsts[group], len(keys)):
                if place * SIZE >= matched // SIZE * SIZE:
                    self.pool[group, blocks[place]] = keys[place]
                assert self.pool[group, blocks[place]] == keys[place], "another's content was found"
        self.kv_cache.commit(number, len(tokens))
        self.kv_cache.release(number, len(tokens))
        self.close(number)
        return matched

    def open(self, tokens: list[int]) -> int:
        self.count += 1
        self.now += 1.0
        self.kv_cache.open(self.count, tokens, request="r")
        self.open_ids.add(self.count)
        return self.count

    def close(self, number: int) -> None:
        self.offload.dropped(number)
        self.kv_cache.close(number, self.now)
        self.open_ids.remove(number)
        self.check()

    def check(self) -> None:
        self.kv_cache.check()
        self.offload.check(self.open_ids)

    def put(self) -> None:
        """Before anything is written into a block that was evicted."""
        self.offload.carry_out(self.now)
        self.offload.attend(self.now)

    def ask(self, number: int) -> LoadWait | None:
        """Whether this open sequence has to wait for a load."""
        tokens = self.kv_cache._seqs[number].tokens
        request = Request(id=f"r{number}", prompt=tuple(tokens), sampling=SamplingParams(max_tokens=1))
        choice = Choice.start(id=number, request=request, choice=0, seed=0, arrived=0.0)
        limit = len(tokens) - 1
        return self.offload.begin(choice, self.kv_cache.match(number, limit), limit, self.now)

    def begin(self, tokens: list[int]) -> tuple[int, int]:
        """Open a sequence and begin to load all that lies below. Its number, and the tokens that should be known afterwards."""
        number, decided = self.open(tokens), len(self.decided)
        self.ask(number)
        self.put()
        self.offload.start_loads()
        self.check()
        event = self.decided[-1] if len(self.decided) > decided else None
        return number, event.tokens_in_pool + event.tokens_chosen if event else 0

    def load_of(self, number: int) -> LoadRecords | None:
        """The load of an open sequence, where it has one."""
        load = self.offload._loads.get(number)
        return None if load is None or not load.waited_for else next(one for one in self.loads if one.load == load.number)

    def waiting(self, number: int) -> list[int]:
        """Its records that have not ended."""
        return sorted(self.offload._loads[number].remaining) if self.load_of(number) else []

    def copy(self, number: int, which: int, *, found: bool = True) -> None:
        load = self.load_of(number)
        assert load is not None
        record = load.records[which]
        if found:
            self.pool[record.group, load.blocks[which]] = self.tiers[record.tier][record.key, record.group]
        self.ended.append(Arrived(load.load, which, record, found=found, lost=not found))
        self.put()
        self.offload.carry_out(self.now)
        self.check()

    def finish(self, number: int) -> int:
        """End the load; tokens that the pool has then."""
        self.offload.dropped(number)
        self.check()
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
    for which in reversed(memory.waiting(number)):
        memory.copy(number, which)
    assert memory.finish(number) == 16
    memory.close(number)
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
    memory.close(number)


def test_a_record_that_is_missing_ends_the_hit_before_it_and_is_asked_for_no_more() -> None:
    memory = filled((None,))
    number, _ = memory.begin(list(range(18)))
    for which in (0, 2, 3):
        memory.copy(number, which)
    memory.copy(number, 1, found=False)
    assert memory.finish(number) == 4
    assert not memory.offload.find(number, memory.kv_cache.match(number, 17), 17)
    memory.close(number)


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
        active = [one for one in open_loads if memory.load_of(one)]
        draw = chance.random()
        if draw < 0.3:
            memory.serve(tokens)
        elif draw < 0.4 and len(open_loads) < 2:
            number, known = memory.begin(tokens)
            open_loads[number] = known
        elif active and draw < 0.9:
            one = chance.choice(active)
            waiting = memory.waiting(one)
            if waiting:
                which, shared = chance.choice(waiting), len(active) > 1
                memory.copy(one, which, found=shared or chance.random() < 0.9)
                loaded += 1
        elif open_loads:
            one = chance.choice(sorted(open_loads))
            complete = one in active and not memory.waiting(one)
            assert memory.finish(one) <= CONTEXT or complete
            memory.close(one)
            del open_loads[one]
        memory.put()
        for group in range(len(windows)):
            for key, block in memory.kv_cache._groups[group].index.by_key.items():
                assert memory.pool[group, block] == key, "a block is found that holds something else"
    assert loaded > 5
