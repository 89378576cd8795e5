"""What a store below another one takes of that one's victims, and what it gives up for them. Knows keys only.

A record is offered when the store above gives it up. It is taken where there is room, and otherwise only if it is worth clearly
more than what this store has been giving up lately: most records are used once, and writing them costs endurance and time.
"""

from __future__ import annotations

import math

from kveik.cache.eviction.policy import EvictionPolicy, Key, MayGo

FACTOR = 1.5
"""How much more than the mean of recent victims an offered record must be worth. 1: at least as much; 2: for worn drives."""

REMEMBERED = 256
"""Victims over which the mean runs."""


class WriteFilter:
    """Whether an offered record is worth writing."""

    def __init__(self, factor: float = FACTOR) -> None:
        self.factor = factor
        self._mean = 0.0
        self._seen = 0

    def passes(self, worth: float) -> bool:
        return worth >= self.factor * self._mean

    def gave_up(self, worth: float) -> None:
        """What the store gave up was worth so much. What nobody knows the worth of says nothing."""
        if not math.isfinite(worth):
            return
        self._seen = min(self._seen + 1, REMEMBERED)
        self._mean += (worth - self._mean) / self._seen


class StoreBelow:
    """Which records a bounded store holds, with a policy of its own; it keeps what the store above has found in it again."""

    def __init__(self, records: int, policy: EvictionPolicy, write_filter: WriteFilter | None = None) -> None:
        """`records`: that it holds at most. Without a filter everything that is offered is written."""
        self.records = records
        self.policy = policy
        self.writes = 0
        self._filter = write_filter

    def holds(self, key: Key) -> bool:
        return self.policy.holds(key)

    def offer(self, key: Key, may_go: MayGo, now: float) -> bool:
        """The store above gives this record up: whether it is to be written. What has to go for it is gone then."""
        policy = self.policy
        if policy.holds(key):
            return False
        full = policy.stored_count >= self.records
        if full and not self._has_room_for(key, may_go, now):
            return False
        policy.stored(key, now)
        self.writes += 1
        return True

    def _has_room_for(self, key: Key, may_go: MayGo, now: float) -> bool:
        policy = self.policy
        if self._filter is not None and not self._filter.passes(policy.worth(key, now)):
            return False
        victim = policy.victim(may_go, now)
        if victim is None:
            return False
        if self._filter is not None:
            self._filter.gave_up(policy.worth(victim, now))
        return True

    def check(self) -> None:
        """Law 9: it has a bound. Raises AssertionError."""
        assert self.policy.stored_count <= self.records, "a store below holds more than it may"
