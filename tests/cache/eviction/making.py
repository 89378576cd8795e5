"""Chains of keys as sessions make them: some begin alike, some go on, some come once."""

from __future__ import annotations

import random

from kveik.cache.eviction.policy import EvictionPolicy, Key, MayGo, Visit


def key(*path: int) -> Key:
    """A readable key that stands for everything before it."""
    return bytes(path)


def chain(*path: int) -> list[Key]:
    """Keys of all beginnings of a path."""
    return [key(*path[:end]) for end in range(1, len(path) + 1)]


def visit(keys: list[Key], now: float, *, out: int = 100, stored: int | None = None) -> Visit:
    return Visit(keys, len(keys) if stored is None else stored, out, now, now)


def drawn_chain(chance: random.Random) -> list[Key]:
    """Of 1 to 8 blocks with three contents each, so that beginnings are often shared."""
    return chain(*(chance.randrange(3) for _ in range(chance.randrange(1, 9))))


def always(_key: Key) -> bool:
    return True


def victim(policy: EvictionPolicy, may_go: MayGo, now: float) -> Key | None:
    """The record that it gives up next, if any."""
    return next(iter(policy.victims(1, may_go, now)), None)
