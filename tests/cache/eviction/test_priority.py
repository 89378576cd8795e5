"""Hints bound whatever policy there is: low ones go first, high ones last, for their time and within their share."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy, Key, Retention, Visit
from kveik.cache.eviction.priority import PriorityPolicy
from tests.cache.eviction.making import always, chain, drawn_chain, victim
from tests.seeds import over_seeds

INNER: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy, "hazard": lambda: HazardPolicy(512, random.Random(0))}


@pytest.fixture(params=INNER)
def policy(request: pytest.FixtureRequest) -> PriorityPolicy:
    return PriorityPolicy(INNER[request.param](), records=20)


def use(policy: PriorityPolicy, keys: list[Key], now: float, priority: int | None = None, seconds: float = 100.0) -> None:
    hint = None if priority is None else Retention(priority, seconds)
    policy.used(Visit(keys, len(keys), 100, now, now, hint))


def drained(policy: PriorityPolicy, now: float) -> list[Key]:
    victims = []
    while (key := victim(policy, always, now)) is not None:
        victims.append(key)
    return victims


def test_low_goes_first_and_high_goes_last_each_from_its_end(policy: PriorityPolicy) -> None:
    high, low, usual = chain(1, 1), chain(2, 2), chain(3, 3)
    use(policy, high, 0.0, 80)
    use(policy, usual, 1.0)
    use(policy, low, 2.0, 10)
    assert drained(policy, 3.0) == [*reversed(low), *reversed(usual), *reversed(high)]


def test_of_several_levels_the_lowest_goes_first(policy: PriorityPolicy) -> None:
    for number, level in enumerate((90, 20, 60, 5)):
        use(policy, chain(number), float(number), level)
    assert drained(policy, 9.0) == [bytes([3]), bytes([1]), bytes([2]), bytes([0])]


def test_a_hint_runs_out(policy: PriorityPolicy) -> None:
    use(policy, chain(1), 0.0, 80, seconds=50.0)
    use(policy, chain(2), 10.0)
    assert victim(policy, always, 20.0) == b"\x02"
    assert victim(policy, lambda key: key != b"\x01", 21.0) is None
    use(policy, chain(3), 60.0, 50)
    assert victim(policy, always, 61.0) == b"\x01"
    assert policy.retained == 1


def test_another_use_at_the_same_level_lengthens_a_hint_and_a_lower_one_does_not_weaken_it(policy: PriorityPolicy) -> None:
    use(policy, chain(1), 0.0, 80, seconds=50.0)
    use(policy, chain(1), 40.0, 80, seconds=50.0)
    use(policy, chain(1), 41.0, 60, seconds=1.0)
    use(policy, chain(1), 42.0)
    use(policy, chain(1), 43.0, 0)
    use(policy, chain(2), 44.0)
    assert victim(policy, always, 80.0) == b"\x02"
    assert policy.retained == 1


def test_a_low_hint_does_not_pull_down_what_others_use(policy: PriorityPolicy) -> None:
    use(policy, chain(1), 0.0)
    use(policy, chain(1, 5), 1.0, 0)
    use(policy, chain(2), 2.0)
    assert victim(policy, always, 3.0) == chain(1, 5)[1]
    use(policy, chain(1, 5), 4.0, 0)
    use(policy, chain(1, 5), 5.0)
    assert not policy._low.level


def test_hints_get_half_of_the_store_and_a_chain_s_beginning_of_it(policy: PriorityPolicy) -> None:
    long = chain(*range(1, 15))
    use(policy, long, 0.0, 100)
    assert policy.retained == 10
    use(policy, chain(0), 1.0)
    assert drained(policy, 2.0)[-10:] == [*reversed(long[:10])]


def test_what_is_held_is_not_given_up_at_any_level(policy: PriorityPolicy) -> None:
    use(policy, chain(1), 0.0, 80)
    use(policy, chain(2), 0.0, 0)
    assert victim(policy, lambda _: False, 1.0) is None
    assert victim(policy, lambda key: key == b"\x01", 1.0) == b"\x01"


@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
@over_seeds(8)
def test_nothing_that_may_go_is_withheld_and_beginnings_outlive_ends(make: Callable[[], EvictionPolicy], seed: int) -> None:
    chance, policy, now, stored = random.Random(seed), PriorityPolicy(make(), records=20), 0.0, set[Key]()
    for _ in range(200):
        now += chance.expovariate(0.1)
        keys = drawn_chain(chance)
        use(policy, keys, now, chance.choice((None, None, 0, 20, 35, 50, 90)), chance.choice((5.0, 50.0, 1000.0)))
        stored.update(keys)
        while len(stored) > 20 or (stored and chance.random() < 0.3):
            gone = victim(policy, always, now)
            assert gone is not None
            assert not any(other != gone and other[: len(gone)] == gone for other in stored), "a parent went before its child"
            stored.remove(gone)
        if chance.random() < 0.1 and stored:
            # A leaf is found damaged.
            damaged = max(stored, key=len)
            policy.discarded(damaged)
            stored.remove(damaged)
        policy.check(stored)
    assert sorted(drained(policy, now)) == sorted(stored)
    policy.check(())
