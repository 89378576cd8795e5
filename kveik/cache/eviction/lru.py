"""Least recently used first, a chain's end before its beginning. Full blocks only: partial ones go before all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kveik.cache.eviction.policy import USUAL, Key, MayGo, Rank, Visit


class LruPolicy:
    """Every operation is O(1) per key. A pool with this order needs no policy object: its own list has it (`pool.LruOrder`)."""

    learner = None

    def __init__(self) -> None:
        self._touched: OrderedDict[Key, float] = OrderedDict()
        """Keys that may go, the next one first -> the time of their latest use."""

        self._aside: dict[Key, float] = {}
        """Stored too, but held when they were asked for."""

    @property
    def stored_count(self) -> int:
        return len(self._touched) + len(self._aside)

    def holds(self, key: Key) -> bool:
        return key in self._touched or key in self._aside

    def used(self, visit: Visit) -> None:
        keys, now, touched, aside = visit.keys, visit.went, self._touched, self._aside
        if aside:
            for key in keys:
                if aside.pop(key, None) is not None:
                    touched[key] = now
        # The end is touched first, so that it goes first.
        for place in range(len(keys) - 1, -1, -1):
            key = keys[place]
            if place < visit.stored or key in touched:
                touched[key] = now
                touched.move_to_end(key)

    def returned(self, keys: Sequence[Key]) -> None:
        # All of them anew, as a pool does with blocks that are given back: so a beginning stays behind what follows it.
        for key in reversed(keys):
            if key in self._aside:
                self._touched[key] = self._aside.pop(key)
            elif key in self._touched:
                self._touched.move_to_end(key)

    def stored(self, keys: Sequence[Key], now: float) -> None:
        for key in keys:
            if key not in self._aside:
                self._touched.setdefault(key, now)

    def discarded(self, key: Key) -> None:
        self._touched.pop(key, None)
        self._aside.pop(key, None)

    def victims(self, count: int, may_go: MayGo, now: float) -> list[Key]:
        gone: list[Key] = []
        while self._touched and len(gone) < count:
            key, touched = self._touched.popitem(last=False)
            if may_go(key):
                gone.append(key)
            else:
                self._aside[key] = touched
        return gone

    def least(self, may_go: MayGo, now: float) -> Rank | None:
        while self._touched:
            key, touched = next(iter(self._touched.items()))
            if may_go(key):
                return USUAL, touched - now
            self._aside[key] = self._touched.pop(key)
        return None

    def worths(self, keys: Sequence[Key], now: float) -> list[float]:
        """Minus their ages in seconds."""
        unknown = float("-inf")
        return [self._touched.get(key, self._aside.get(key, unknown)) - now for key in keys]

    def check(self, keys: Iterable[Key]) -> None:
        assert self._touched.keys().isdisjoint(self._aside), "a key may go and is set aside"
        assert self._touched.keys() | self._aside.keys() == set(keys), "the policy's keys are not the store's"
