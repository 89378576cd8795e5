"""Nobody loses what is reserved for him to another, what is borrowed goes first, and a maximum is one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy, Key, Owner, Retention, Visit
from kveik.cache.eviction.priority import PriorityPolicy
from kveik.cache.eviction.tenants import Grant, TenantPolicy
from tests.cache.eviction.making import always, chain, drawn_chain
from tests.seeds import over_seeds

GRANTS = {b"a": Grant(6), b"b": Grant(4, 8), b"c": Grant(0, 5)}
TENANTS = (b"a", b"b", b"c", b"d", b"")
ROOM = 24

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LruPolicy,
    "hazard": lambda: HazardPolicy(512, random.Random(0), samples=4),
    "hints": lambda: PriorityPolicy(LruPolicy(), ROOM),
}


class Shared:
    """A store that several tenants fill, and what each has in it."""

    def __init__(self, policy: TenantPolicy, chance: random.Random) -> None:
        self.policy, self.chance, self.now = policy, chance, 0.0
        self.owner: dict[Key, Owner] = {}
        self.held: set[Key] = set()

    def amount(self, owner: Owner) -> int:
        """Tenants without a grant are one."""
        return sum(self.known(one) == self.known(owner) for one in self.owner.values())

    def known(self, owner: Owner) -> Owner:
        return owner if owner is None or owner in GRANTS else b""

    def may_go(self, key: Key) -> bool:
        return key not in self.held

    def visit(self, tenant: bytes) -> None:
        """A chain of which the first block may be everybody's; its other keys are this tenant's alone."""
        self.now += 1.0
        name, public = b"t" + tenant, self.chance.randrange(2)
        keys = [*([b"p"] if public else []), *(name + key for key in drawn_chain(self.chance))]
        for place, key in enumerate(keys):
            if key not in self.owner:
                self.make_room(tenant)
                self.owner[key] = None if place < public else tenant
        stored = next((place for place, key in enumerate(keys) if key not in self.owner), len(keys))
        hint = Retention(self.chance.randrange(101), 5.0) if self.chance.random() < 0.3 else None
        self.policy.used(Visit(keys, stored, 10, self.now, self.now, hint, tenant, public))
        for key in keys[stored:]:
            self.owner.pop(key, None)
            self.policy.discarded(key)
        while self.policy.beyond(tenant):
            gone = self.policy.victim_of(tenant, self.may_go, self.now)
            if gone is None:
                break
            assert self.owner.pop(gone) == tenant

    def make_room(self, tenant: bytes) -> None:
        """Judge who had to give something up. What is not known to the policy yet never goes."""
        if len(self.owner) < ROOM:
            return
        borrowing = {
            self.known(owner)
            for key, owner in self.owner.items()
            if owner is not None and self.policy.holds(key) and self.granted_amount(owner) > self.reserved(owner)
        }
        victims = self.policy.victims_for(tenant, 1, self.may_go, self.now)
        if not victims:
            return
        [(gone, _)] = victims
        owner = self.owner.pop(gone)
        if owner is not None and self.known(owner) != self.known(tenant):
            assert self.known(owner) in borrowing, "somebody lost what is reserved for him"
        if owner is None or self.known(owner) not in borrowing:
            left = {self.known(self.owner[key]) for key in self.owner if self.policy.holds(key) and self.may_go(key)}
            assert not left & borrowing or self.held, "what was borrowed stayed, and other things went"

    def granted_amount(self, owner: Owner) -> int:
        return sum(self.known(one) == self.known(owner) and self.policy.holds(key) for key, one in self.owner.items())

    def reserved(self, owner: Owner) -> int:
        return GRANTS[owner].reserved if owner is not None and owner in GRANTS else 0


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@over_seeds(10)
def test_reservations_and_maxima_hold_whoever_comes(make: Callable[[], EvictionPolicy], seed: int) -> None:
    chance = random.Random(seed)
    policy = TenantPolicy(GRANTS, make)
    store = Shared(policy, chance)
    for _ in range(250):
        store.visit(chance.choice(TENANTS))
        if chance.random() < 0.3:
            policy.returned(sorted(store.held))
            store.held = {key for key in store.owner if chance.random() < 0.1}
        if policy.learner is not None and policy.learner.wants_lesson:
            policy.learner.learn(store.now)
        policy.check(key for key in store.owner)
        for tenant, grant in GRANTS.items():
            held = sum(owner == tenant and key in store.held for key, owner in store.owner.items())
            assert grant.maximum is None or store.amount(tenant) <= grant.maximum + held


def shared_store(*visits: tuple[bytes, int]) -> TenantPolicy:
    """Each tenant has used one chain of so many blocks, in this order."""
    policy = TenantPolicy(GRANTS, LruPolicy)
    for now, (tenant, blocks) in enumerate(visits):
        keys = [tenant + key for key in chain(*range(blocks))]
        policy.used(Visit(keys, blocks, 10, float(now), float(now), None, tenant))
    return policy


def victims(policy: TenantPolicy, asking: bytes, count: int) -> list[bytes | None]:
    gone = policy.victims_for(asking, count, always, 100.0)
    return [*(key[:1] for key, _ in gone), *[None] * (count - len(gone))]


def test_what_is_borrowed_goes_first_and_then_his_own_who_asks() -> None:
    policy = shared_store((b"a", 8), (b"b", 4))
    # The oldest is borrowed by a; then a and b have what is reserved for them, and whoever asks for more pays himself.
    assert victims(policy, b"b", 3) == [b"a", b"a", b"b"]
    assert victims(policy, b"a", 1) == [b"a"]
    assert victims(policy, b"d", 1) == [None]


def test_among_those_who_borrow_the_least_valuable_goes() -> None:
    policy = shared_store((b"d", 2), (b"c", 2), (b"a", 7))
    assert victims(policy, b"a", 6) == [b"d", b"d", b"c", b"c", b"a", b"a"]


def test_what_is_everybodys_goes_after_what_is_borrowed() -> None:
    policy = TenantPolicy(GRANTS, LruPolicy)
    policy.used(Visit([b"p", b"d1"], 2, 10, 0.0, 0.0, None, b"d", 1))
    assert policy.victims_for(b"a", 3, always, 1.0) == [(b"d1", b""), (b"p", None)]


def test_what_is_reserved_and_idle_is_withheld_from_others_alone() -> None:
    policy = shared_store((b"a", 8), (b"b", 3))
    idle = [0, 0, 0, 8, 3, 0]
    assert policy.withheld(b"d", idle) == 6 + 3
    assert policy.withheld(b"a", idle) == 3
    # Seven of a's are held: what is idle is not more than what a may be asked for.
    assert policy.withheld(b"d", [0, 0, 0, 1, 3, 0]) == 3
    assert policy.withheld(b"d", None) == 9
    assert policy.reserved == 10


def test_where_a_store_has_half_the_room_every_grant_is_half_of_what_it_was() -> None:
    store = shared_store((b"a", 6), (b"b", 6), (b"c", 2))
    assert victims(store, b"x", 1) == [b"b"]
    store.share = 0.5
    assert store.reserved == 5
    assert [store.beyond(owner) for owner in (b"a", b"b", b"c")] == [False, True, False]
    assert store.beyond(b"c", 1)
    # a has three more than half of what was reserved for it, b three, c two: each borrows.
    assert victims(store, b"x", 99).count(b"a") == 3


def test_records_of_an_earlier_life_belong_to_whoever_uses_them() -> None:
    policy = TenantPolicy(GRANTS, LruPolicy, weighed=True)
    for key in (b"1", b"2"):
        policy.stored([key], 0.0)
        policy.weigh(key, 3)
    assert policy.owner_of(b"1") == b""
    policy.used(Visit([b"1"], 0, 10, 1.0, 1.0, None, b"a"))
    assert policy.owner_of(b"1") == b"a"
    assert (policy.amount(policy.party(b"a")), policy.amount(policy.party(b""))) == (3, 3)
    assert victims(policy, b"b", 2) == [b"2", None]
    policy.check([b"1"])


def test_all_learn_from_what_was_learnt_before() -> None:
    source = HazardPolicy(512, random.Random(0))
    source.used(Visit(chain(1, 2), 2, 10, 0.0, 0.0))
    policy = TenantPolicy(GRANTS, lambda: HazardPolicy(512, random.Random(0)))
    learner, other = policy.learner, policy.party(b"a").policy.learner
    assert learner is not None
    assert other is not None
    learner.restore(source.learnt())
    assert learner.learnt().keys() == source.learnt().keys()
    assert all((other.learnt()[name] == table).all() for name, table in source.learnt().items())
