"""The policy learns who returns, and keeps them; its victims are the least valuable; what it knows is bounded."""

from __future__ import annotations

import random

import pytest

from kveik.cache.eviction import hazard
from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.policy import Key
from tests.cache.eviction.making import always, chain, drawn_chain, victim, visit
from tests.seeds import over_seeds


def policy(samples: int = 64) -> HazardPolicy:
    return HazardPolicy(512, random.Random(0), samples)


@over_seeds(10)
def test_the_victim_is_the_end_of_the_leaf_worth_least_and_of_equals_the_oldest(seed: int) -> None:
    """With more samples than leaves, against a search through everything that is stored."""
    chance, one, now = random.Random(seed), policy(1000), 0.0
    stored, touched = set[Key](), dict[Key, float]()
    for _ in range(200):
        now += chance.expovariate(0.05)
        keys = drawn_chain(chance)
        one.used(visit(keys, now, out=chance.randrange(400)))
        stored.update(keys)
        touched.update(dict.fromkeys(keys, now))
        if chance.random() < 0.3:
            one.learn(now)
        now += chance.expovariate(0.05)
        # The first victim after a use; those after it may come from the same segment.
        leaves = [key for key in stored if not any(other[: len(key)] == key for other in stored if other != key)]
        worth = {key: (one.worths([key], now)[0], touched[key]) for key in leaves}
        gone = victim(one, always, now)
        assert gone is not None
        assert worth[gone] == min(worth.values())
        stored.remove(gone)
        for _ in range(chance.randrange(5)):
            stored.discard(victim(one, always, now) or b"")


def test_victims_come_from_one_segment_until_the_next_use() -> None:
    one = policy()
    one.used(visit(chain(1, 1, 1), 0.0))
    one.used(visit(chain(2, 2), 1.0))
    assert [victim(one, always, 5.0) for _ in range(2)] == [*reversed(chain(1, 1, 1)[1:])]
    one.used(visit(chain(1), 6.0))
    assert victim(one, always, 7.0) == chain(2, 2)[1]


def test_sessions_that_go_on_are_kept_and_those_that_come_once_are_not() -> None:
    """Ten sessions return every 60 s; in between come 40 others, once each. There is room for 20 blocks."""
    one, now, hits, asked = policy(), 0.0, 0, 0
    stored: set[Key] = set()
    for turn in range(1, 40):
        for session in range(10):
            now += 1.0
            keys = chain(1, session, *([0] * min(turn, 3)))
            found = sum(key in stored for key in keys)
            hits, asked = hits + found * (turn > 20), asked + len(keys) * (turn > 20)
            use(one, keys, now, stored)
            for other in range(4):
                now += 1.25
                use(one, chain(2, turn, session, other), now, stored)
        if one.wants_lesson:
            one.learn(now)
    assert hits / asked > 0.3


def use(one: HazardPolicy, keys: list[Key], now: float, stored: set[Key]) -> None:
    one.used(visit(keys, now))
    stored.update(keys)
    while len(stored) > 20:
        stored.remove(victim(one, always, now) or b"")


def test_a_use_beyond_the_store_s_horizon_is_seen() -> None:
    one = policy()
    one.used(visit(chain(1, 2), 0.0))
    while victim(one, always, 1.0):
        pass
    one.used(visit(chain(1, 2), 50.0))
    assert one.learnt()["used"].sum() == pytest.approx(2 / 32)


def test_a_session_that_goes_on_grows_and_one_that_differs_is_split_off() -> None:
    one = policy()
    one.used(visit(chain(1), 0.0))
    one.used(visit(chain(1, 2), 10.0))
    assert one._tree.count == 1
    one.used(visit(chain(1, 3), 20.0))
    assert one._tree.count == 3
    one.check(set(chain(1, 2)) | set(chain(1, 3)))


def test_an_event_is_counted_for_the_session_that_it_was_until_then() -> None:
    one = policy()
    one.used(visit(chain(1, 2), 0.0, out=100))
    one.used(visit(chain(1, 3), 10.0))
    used = one.learnt()["used"]
    session = hazard.reuse.session_kind(0, 2 * 512, 100)
    assert used[session, hazard.bucket(10.0)] == pytest.approx(1 / 32)
    assert used.sum() == pytest.approx(1 / 32)


def test_age_counts_from_the_end_of_one_request_to_the_beginning_of_the_next() -> None:
    one = policy()
    one.used(visit(chain(1), 100.0))
    one.used(hazard.Visit(chain(1), 1, 10, came=103.0, went=900.0))
    assert one.learnt()["used"][:, hazard.bucket(3.0)].sum() == pytest.approx(1 / 32)


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazard, "SEGMENTS_KNOWN", 50)
    monkeypatch.setattr(hazard, "KEYS_KNOWN", 200)
    one, chance = policy(), random.Random(1)
    for number in range(2000):
        keys = chain(number % 256, number // 256, *(0 for _ in range(chance.randrange(1, 30))))
        one.used(visit(keys, float(number)))
        while one.stored_count > 10:
            victim(one, always, float(number))
        assert one._tree.count <= 50 + 2
        assert len(one._tree.owner) <= 16 * (10 + 32) + 32
    assert one.learnt()["unused"].sum() > 0


def test_lessons_are_wanted_after_so_many_requests_as_there_is_to_learn_from() -> None:
    one = policy()
    for number in range(64):
        assert not one.wants_lesson
        one.used(visit(chain(number), float(number)))
    assert one.wants_lesson
    one.learn(64.0)
    assert not one.wants_lesson
