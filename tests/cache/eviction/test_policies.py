"""What every policy promises: it knows what is stored, gives up ends before beginnings, and never what is held."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy, Key
from kveik.cache.eviction.priority import PriorityPolicy
from tests.cache.eviction.making import always, chain, drawn_chain, victim, visit
from tests.seeds import over_seeds

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LruPolicy,
    "hazard": lambda: HazardPolicy(512, random.Random(0)),
    "hazard of few samples": lambda: HazardPolicy(512, random.Random(0), samples=2),
    "priority over lru": lambda: PriorityPolicy(LruPolicy(), 40),
    "priority over hazard": lambda: PriorityPolicy(HazardPolicy(512, random.Random(0)), 40),
}


LEARNING = {name: make for name, make in POLICIES.items() if "hazard" in name}


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return POLICIES[request.param]()


class Store:
    """A pool as the policy sees it: keys in it, and who holds them. Prefixes of what is stored are stored."""

    def __init__(self, policy: EvictionPolicy, chance: random.Random) -> None:
        self.policy, self.chance = policy, chance
        self.keys: set[Key] = set()
        self.running: list[list[Key]] = []
        self.now = 0.0

    def held(self) -> set[Key]:
        return {key for keys in self.running for key in keys}

    def may_go(self, key: Key) -> bool:
        return key not in self.held()

    def begin(self) -> None:
        """A request finds the beginning of its chain, and holds it."""
        keys = drawn_chain(self.chance)
        self.running.append([key for key in keys if key in self.keys])

    def end(self) -> None:
        """It computed the rest and is done, or gave way before it computed anything."""
        found = self.running.pop(self.chance.randrange(len(self.running)))
        if self.chance.random() < 0.2:
            self.policy.returned(found)
            return
        start = found[-1] if found else b""
        keys = chain(*start, *(self.chance.randrange(3) for _ in range(self.chance.randrange(1, 5))))
        self.keys.update(keys)
        self.policy.used(visit(keys, self.now, out=self.chance.randrange(400)))

    def give_up(self) -> None:
        key = victim(self.policy, self.may_go, self.now)
        movable = self.keys - self.held()
        if key is None:
            assert not movable, "something could go, and nothing was offered"
            return
        assert key in movable
        assert not any(other != key and other[: len(key)] == key for other in self.keys), "a parent went before its child"
        self.keys.remove(key)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@over_seeds(8)
def test_ends_go_first_and_what_is_held_never_goes(make: Callable[[], EvictionPolicy], seed: int) -> None:
    chance, policy = random.Random(seed), make()
    store = Store(policy, chance)
    for _ in range(300):
        store.now += chance.expovariate(0.1)
        if store.running and chance.random() < 0.5:
            store.end()
        elif chance.random() < 0.4:
            store.begin()
        else:
            for _ in range(chance.randrange(4)):
                store.give_up()
        if policy.learner is not None and (policy.learner.wants_lesson or chance.random() < 0.05):
            policy.learner.learn(store.now)
        policy.check(store.keys)
        assert policy.stored_count == len(store.keys)
    while store.running:
        store.end()
    for _ in range(len(store.keys)):
        store.give_up()
    assert not store.keys
    policy.check(())


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@over_seeds(6)
def test_a_tier_that_stores_and_loses_any_records_is_followed(make: Callable[[], EvictionPolicy], seed: int) -> None:
    chance, policy, keys, now = random.Random(seed), make(), set[Key](), 0.0
    for _ in range(300):
        now += chance.expovariate(0.1)
        match chance.randrange(4):
            case 0:
                policy.used(visit(drawn_chain(chance), now, stored=0))
            case 1:
                one = chance.choice(drawn_chain(chance))
                policy.stored([one], now)
                keys.add(one)
            case 2 if keys:
                one = chance.choice(sorted(keys))
                policy.discarded(one)
                keys.discard(one)
            case 3:
                gone = victim(policy, always, now)
                assert (gone is None) == (not keys)
                keys.discard(gone or b"")
        policy.check(keys)


def test_a_record_that_was_held_when_asked_for_is_offered_after_it_was_returned(policy: EvictionPolicy) -> None:
    policy.used(visit(chain(1, 2), 0.0))
    assert victim(policy, lambda _: False, 1.0) is None
    assert victim(policy, always, 1.0) is None
    policy.returned(chain(1, 2))
    assert [victim(policy, always, 3.0) for _ in range(3)] == [*reversed(chain(1, 2)), None]


def test_what_nobody_knows_is_worth_least(policy: EvictionPolicy) -> None:
    policy.used(visit(chain(1), 0.0))
    assert policy.worths([b"\x09"], 1.0)[0] < policy.worths([b"\x01"], 1.0)[0]


@pytest.mark.parametrize("make", LEARNING.values(), ids=LEARNING)
def test_what_was_learnt_is_kept_over_a_restart(make: Callable[[], EvictionPolicy]) -> None:
    chance, now, policy = random.Random(3), 0.0, make()
    for _ in range(200):
        now += 1.0
        policy.used(visit(drawn_chain(chance), now))
    learner, again = policy.learner, make().learner
    assert learner is not None
    assert again is not None
    learner.learn(now)
    tables = learner.learnt()
    assert tables["used"].any()
    again.restore(tables)
    assert {name: table.tolist() for name, table in again.learnt().items()} == {
        name: table.tolist() for name, table in tables.items()
    }


@pytest.mark.parametrize("make", LEARNING.values(), ids=LEARNING)
def test_tables_of_another_shape_are_refused(make: Callable[[], EvictionPolicy]) -> None:
    learner = make().learner
    assert learner is not None
    before = learner.learnt()
    with pytest.raises(ValueError, match="table"):
        learner.restore({"used": np.ones((2, 2))})
    assert learner.learnt().keys() == before.keys()


def test_who_asks_for_many_gets_those_that_asking_one_by_one_brings(
    request: pytest.FixtureRequest, policy: EvictionPolicy
) -> None:
    chance, now, again = random.Random(5), 0.0, POLICIES[request.node.callspec.params["policy"]]()
    gone = 0
    for _ in range(100):
        now += 1.0
        keys, held = drawn_chain(chance), {chance.choice(drawn_chain(chance))}
        many = chance.randrange(4)
        for one in (policy, again):
            one.used(visit(keys, now))
        together = policy.victims(many, lambda key, held=held: key not in held, now)
        singly = [again.victims(1, lambda key, held=held: key not in held, now) for _ in range(many)]
        assert together == [key for one in singly for key in one]
        gone += len(together)
    assert gone > 50
