"""Blocks are free, cached or held (law 1), and allocated in the promised order."""

from __future__ import annotations

import random

import pytest

from kveik.cache.block_pool import FULL, PARTIAL, UNFINDABLE, BlockPool, LruOrder
from tests.seeds import over_seeds


class SlowPool:
    """The same promises with lists: obvious, and slow."""

    def __init__(self, blocks: int) -> None:
        self.unheld = list(range(blocks))
        self.references = [0] * blocks
        self.findable: dict[int, int] = {}

    def allocate(self) -> int:
        block = self.unheld.pop(0)
        self.references[block] = 1
        self.findable.pop(block, None)
        return block

    def join(self, block: int) -> None:
        """Behind all that are found as little, or as much and were there before; what is not found goes to the front."""
        found = self.findable.get(block, UNFINDABLE)
        before = [other for other in self.unheld if self.findable.get(other, UNFINDABLE) <= found]
        self.unheld.insert(len(before) if found else 0, block)

    def touch(self, block: int) -> None:
        if block in self.unheld:
            self.unheld.remove(block)
        self.references[block] += 1

    def free(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            self.join(block)

    def unmark(self, block: int) -> None:
        if self.findable.pop(block, None) and block in self.unheld:
            self.renew(block)

    def renew(self, block: int) -> None:
        self.unheld.remove(block)
        self.join(block)


@over_seeds(40)
def test_the_pool_does_what_the_slow_pool_does_and_no_block_is_lost_or_held_twice(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(1, 12)
    pool, slow = BlockPool(size), SlowPool(size)
    for _ in range(400):
        act(chance, pool, slow)
        holders = {block: count for block, count in enumerate(slow.references) if count}
        pool.check(holders)
        assert pool.available == len(slow.unheld)
        assert pool.cached == len(slow.findable.keys() & set(slow.unheld))
        assert list(pool.oldest()) == [block for block in slow.unheld if slow.findable.get(block) == FULL]
        assert pool.held == len(holders)
        assert pool.free_count == pool.total - pool.held - pool.cached


def act(chance: random.Random, pool: BlockPool, slow: SlowPool) -> None:
    held = [block for block, count in enumerate(slow.references) if count]
    match chance.randrange(6):
        case 0 if slow.unheld:
            count = chance.randint(1, len(slow.unheld))
            assert pool.allocate(count) == [slow.allocate() for _ in range(count)]
        case 1:
            # A hit: found by content, held or not.
            if slow.findable:
                block = chance.choice(sorted(slow.findable))
                pool.touch(block)
                slow.touch(block)
        case 2 if held:
            some = chance.sample(held, chance.randint(1, len(held)))
            pool.free(*some)
            for block in some:
                slow.free(block)
        case 3 if held:
            block, found = chance.choice(held), chance.choice((PARTIAL, FULL))
            pool.mark(block, found)
            slow.findable[block] = found
        case 4:
            some = chance.sample(range(pool.total), chance.randint(1, pool.total))
            pool.unmark(*some)
            for block in some:
                slow.unmark(block)
        case 5 if slow.unheld:
            block = chance.choice(slow.unheld)
            pool.renew(block)
            slow.renew(block)


def test_a_sequence_s_tail_is_allocated_before_its_head_and_the_longest_unused_first() -> None:
    pool = BlockPool(6)
    older, newer = pool.allocate(3), pool.allocate(3)
    for block in (*older, *newer):
        pool.mark(block, FULL)
    for blocks in (older, newer):
        for block in reversed(blocks):
            pool.free(block)
    assert pool.allocate(6) == [*reversed(older), *reversed(newer)]


def test_what_nobody_can_find_is_allocated_before_what_can_be_found() -> None:
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.mark(first, FULL)
    pool.free(first)
    pool.mark(second, FULL)
    pool.free(second)
    pool.free(third)
    assert pool.allocate(3) == [third, first, second]


def test_a_hit_saves_a_block_from_being_allocated() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.mark(block, FULL)
        pool.free(block)
    pool.touch(first)
    assert pool.allocate(1) == [second]
    assert pool.available == 0


def test_giving_back_what_nobody_holds_is_caught() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="not held"):
        pool.free(0)


def test_taking_from_an_empty_order_is_caught() -> None:
    order = LruOrder(1)
    with pytest.raises(AssertionError, match="no block is left"):
        order.next()


def test_a_partial_block_is_allocated_before_full_ones_however_old_they_are() -> None:
    pool = BlockPool(3)
    full, partial, again = pool.allocate(3)
    for block, found in ((full, FULL), (partial, PARTIAL), (again, FULL)):
        pool.mark(block, found)
        pool.free(block)
    assert pool.allocate(3) == [partial, full, again]


def test_the_check_finds_a_wrong_count_and_a_lost_block() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="lost"):
        pool.check({})
    with pytest.raises(AssertionError, match="count"):
        pool.check({block: 2})
    with pytest.raises(AssertionError, match="free and held"):
        pool.check({1 - block: 1})
