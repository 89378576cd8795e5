"""What a lower store takes: what it has not, what it has room for, and what is worth more than what it gives up."""

from __future__ import annotations

import random

import pytest

from kveik.cache.eviction.below import StoreBelow, WriteFilter
from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import Key
from tests.cache.eviction.making import always, chain, drawn_chain, visit


class Fixed(LruPolicy):
    """Least recently used first; a record's worth is its last byte."""

    def worth(self, key: Key, now: float) -> float:
        return float(key[-1])


def test_what_is_there_already_is_not_written_again() -> None:
    store = StoreBelow(4, LruPolicy())
    assert store.offer(b"a", always, 0.0)
    assert not store.offer(b"a", always, 1.0)
    assert store.writes == 1


def test_a_full_store_gives_up_what_was_not_used_for_longest() -> None:
    store = StoreBelow(2, LruPolicy())
    for key in (b"a", b"b", b"c"):
        assert store.offer(key, always, 0.0)
    assert [store.holds(key) for key in (b"a", b"b", b"c")] == [False, True, True]


def test_a_filter_lets_everything_in_while_there_is_room_and_then_only_what_is_worth_more_than_what_went() -> None:
    store = StoreBelow(2, Fixed(), WriteFilter(1.5))
    assert all(store.offer(bytes([name, 4]), always, 0.0) for name in (2, 3))
    assert store.offer(bytes([1, 9]), always, 1.0)
    # 4 was given up; so less than 6 is not worth a write.
    assert not store.offer(bytes([1, 5]), always, 2.0)
    assert store.offer(bytes([1, 6]), always, 3.0)
    assert store.writes == 4


def test_a_record_that_is_being_read_is_not_given_up_for_another() -> None:
    store = StoreBelow(1, LruPolicy())
    assert store.offer(b"a", always, 0.0)
    assert not store.offer(b"b", lambda _: False, 1.0)
    assert store.holds(b"a")


def test_the_mean_of_what_went_follows_what_went_lately() -> None:
    one = WriteFilter(1.0)
    for _ in range(5000):
        one.gave_up(1.0)
    for _ in range(2000):
        one.gave_up(3.0)
    assert one.passes(3.0)
    assert not one.passes(2.9)


@pytest.mark.parametrize("seed", range(5))
def test_its_bound_holds_whatever_is_offered(seed: int) -> None:
    chance, now = random.Random(seed), 0.0
    store = StoreBelow(7, HazardPolicy(512, random.Random(0)), WriteFilter() if seed % 2 else None)
    held = set[Key]()
    for _ in range(300):
        now += 1.0
        keys = drawn_chain(chance)
        store.policy.used(visit(keys, now, stored=0))
        for key in reversed(keys):
            if chance.random() < 0.5 and store.offer(key, always, now):
                held.add(key)
        held = {key for key in held if store.holds(key)}
        store.check()
        store.policy.check(held)
        if chance.random() < 0.1:
            store.policy.learn(now)
    assert len(held) == 7


def test_a_chain_comes_down_end_first_and_is_found_from_its_beginning() -> None:
    store = StoreBelow(10, HazardPolicy(512, random.Random(0)))
    keys = chain(1, 2, 3, 4)
    store.policy.used(visit(keys, 0.0, stored=0))
    for key in reversed(keys):
        store.offer(key, always, 1.0)
    assert [store.holds(key) for key in keys] == [True] * 4
    assert [store.policy.victim(always, 2.0) for _ in range(4)] == [*reversed(keys)]
