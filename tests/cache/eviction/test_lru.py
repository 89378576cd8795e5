"""Least recently used first, and of a chain the end first."""

from __future__ import annotations

from kveik.cache.eviction.lru import LruPolicy
from tests.cache.eviction.making import always, chain, victim, visit


def test_the_chain_unused_for_longest_goes_first_from_its_end() -> None:
    policy = LruPolicy()
    older, newer = chain(1, 1, 1), chain(2, 2)
    policy.used(visit(older, 1.0))
    policy.used(visit(newer, 2.0))
    assert [victim(policy, always, 3.0) for _ in range(5)] == [*reversed(older), *reversed(newer)]


def test_use_saves_what_was_used_and_not_what_follows_it() -> None:
    policy = LruPolicy()
    policy.used(visit(chain(1, 1, 1), 1.0))
    policy.used(visit(chain(2), 2.0))
    policy.used(visit(chain(1), 3.0))
    assert [victim(policy, always, 4.0) for _ in range(4)] == [*reversed(chain(1, 1, 1)[1:]), *chain(2), *chain(1)]
