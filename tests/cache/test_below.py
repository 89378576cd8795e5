"""A ledger with tiers below it: what its pool gives up goes down, and is found again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kveik.cache.directory.directory import Directory
from kveik.cache.directory.orders import Spill
from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy
from kveik.cache.layout import LayerGroup
from kveik.cache.ledger import CacheLedger
from tests.cache.directory.making import Stores, tier
from tests.cache.making import compute, leave, serve

SIZE = 4


def world(
    policy: EvictionPolicy, blocks: Sequence[int], windows: Sequence[int | None]
) -> tuple[CacheLedger, Directory, Stores]:
    groups = [LayerGroup((number,), 1, 2, window) for number, window in enumerate(windows)]
    ledger = CacheLedger(groups, blocks, block_size=SIZE, rows=4, max_model_len=32, max_chunk=8, eviction=policy)
    below = Directory(groups, SIZE, [tier(1000, sizes=(1,) * len(groups))])
    ledger.evictor.below = below
    return ledger, below, Stores(below, evictor=ledger.evictor)


def reach(ledger: CacheLedger, below: Directory, tokens: list[int]) -> int:
    """Tokens that pool and tiers have together."""
    ledger.open(99, tokens, request="q")
    match = ledger.match(99, len(tokens) - 1)
    chain = ledger._accounts[99].chain
    keys = chain.extend(tokens, (len(tokens) - 1) // SIZE)[: (len(tokens) - 1) // SIZE]
    pools = [group.index.by_key for group in ledger._groups]
    hit = (match.tokens, match.full) if match else (0, 0)
    found = below.found(keys, hit, lambda group, key: key in pools[group])
    ledger.close(99)
    return int(found.prospect.tokens[-1])


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_what_the_pool_gave_up_is_found_below_from_its_beginning(windows: Sequence[int | None]) -> None:
    ledger, below, stores = world(LruPolicy(), [12] * len(windows), windows)
    for number in range(12):
        ledger.evictor.now = float(number)
        serve(ledger, number, range(100 * number, 100 * number + 17))
        stores.work()
    for number in range(12):
        assert reach(ledger, below, [*range(100 * number, 100 * number + 17)]) == 16
    assert len(stores.records[0]) > 30


def test_of_a_windowed_group_only_what_a_window_needs_goes_down() -> None:
    ledger, _, stores = world(LruPolicy(), [12, 40], (None, 9))
    for number in range(12):
        serve(ledger, number, range(100 * number, 100 * number + 17))
        stores.work()
    full, windowed = (sum(group == one for _, group in stores.records[0]) for one in (0, 1))
    # A window of 9 needs the last two of a chain's four blocks.
    assert 0 < windowed * 2 <= full + 2


def test_a_preempted_request_s_blocks_go_down_when_others_need_them() -> None:
    ledger, below, stores = world(HazardPolicy(SIZE, random.Random(0)), [10], (None,))
    compute(ledger, 0, range(100, 117))
    ledger.release(0, 17)
    for number in range(2, 8):
        compute(ledger, number, range(200 + 40 * number, 200 + 40 * number + 30))
        leave(ledger, number, 30)
        stores.work()
    assert reach(ledger, below, [*range(100, 117)]) == 16


def test_a_new_content_is_written_through_once_and_at_once() -> None:
    groups = [LayerGroup((0,), 1, 2, None)]
    ledger = CacheLedger(groups, [16], block_size=SIZE, rows=4, max_model_len=32, eviction=LruPolicy())
    below = Directory(groups, SIZE, [tier(100, writes="write-through")])
    ledger.evictor.below = below
    compute(ledger, 0, range(10))
    account = ledger._accounts[0]
    assert [order for order in ledger.evictor.take_transfers() if isinstance(order, Spill)] == [
        Spill(key, 0, None, 0, block) for key, block in zip(account.chain.keys[:2], account.blocks[0][:2], strict=True)
    ]
    compute(ledger, 1, range(9), request="s")
    assert ledger.evictor.take_transfers() == []


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_requests_leaves_pool_and_tiers_consistent(seed: int) -> None:
    chance = random.Random(seed)
    ledger, below, stores = world(HazardPolicy(SIZE, random.Random(0), samples=4), [14, 12], (None, 9))
    for number in range(120):
        ledger.evictor.now = float(number)
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 31))]
        ledger.open(number, tokens, request="r")
        match = ledger.match(number, len(tokens) - 1)
        if ledger.can_admit(number, match):
            ledger.admit(number, match, len(tokens))
            ledger.grow(number, len(tokens))
            ledger.commit(number, len(tokens))
            ledger.release(number, len(tokens))
        ledger.close(number)
        ledger.check()
        stores.work(chance.randrange(6))
        ledger.evictor.learn()
    stores.work()
    held = {(one.keys[0], group) for one in below.tiers[0].records() for group in range(2) if one.groups >> group & 1}
    assert held == stores.records[0]
    assert held
