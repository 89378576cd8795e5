"""Hints of how long to keep what a request used, as a bound on any policy: below it the other policy decides as ever.

    below usual   goes before everything else, the lowest level first, and of a level what was used longest ago
    usual         the other policy decides; so it is when no request hints, and again when a hint has run out
    above usual   goes only when nothing else may, the lowest level first, and of a level what runs out soonest; at most `share`
                  of the records, so that hints can never take the cache from everybody else

Whoever hints about a record hints about all before it in its chain. A record above usual has the highest level of the hints in
force, and of those the latest end; so a chain's beginning never has less than what follows it, and never goes before it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kveik.cache.eviction.policy import USUAL, EvictionPolicy, Key, Learner, MayGo, Rank, Retention, Visit


class Low:
    """Records below usual; of one level, the end of the chain used longest ago first."""

    def __init__(self) -> None:
        self.level: dict[Key, int] = {}
        self._orders: dict[int, OrderedDict[Key, None]] = {}

    def put(self, key: Key, level: int) -> None:
        """At the end of its level, or of the higher one that it has."""
        level = max(level, self.level.get(key, 0))
        self.drop(key)
        self.level[key] = level
        self._orders.setdefault(level, OrderedDict())[key] = None

    def drop(self, key: Key) -> None:
        level = self.level.pop(key, None)
        if level is not None:
            order = self._orders[level]
            del order[key]
            if not order:
                del self._orders[level]

    def first(self, may_go: MayGo) -> Key | None:
        """The first that may go. Those that may not are looked at last from now on."""
        for level in sorted(self._orders):
            order = self._orders[level]
            for _ in range(len(order)):
                key = next(iter(order))
                if may_go(key):
                    return key
                order.move_to_end(key)
        return None


class High:
    """Records above usual, and when their hints run out."""

    def __init__(self) -> None:
        self.hints: dict[Key, list[tuple[float, int]]] = {}
        """(end, level) of each record's hints that count: ends ascend and levels descend."""

        self._depth: dict[Key, int] = {}
        self._ends: list[tuple[float, int, Key]] = []
        self._order: list[tuple[int, float, int, Key]] = []

    def add(self, key: Key, depth: int, end: float, level: int) -> None:
        """One more hint. `depth`: the record's place in its chain."""
        hints = self.hints.setdefault(key, [])
        if any(other >= end and high >= level for other, high in hints):
            return
        hints[:] = sorted([(end, level), *((other, high) for other, high in hints if other > end or high > level)])
        self._depth[key] = depth
        self._push(key)

    def _push(self, key: Key) -> None:
        (end, level), depth = self.hints[key][0], self._depth[key]
        heapq.heappush(self._ends, (end, depth, key))
        heapq.heappush(self._order, (level, end, -depth, key))

    def drop(self, key: Key) -> None:
        if self.hints.pop(key, None) is not None:
            del self._depth[key]

    def run_out(self, now: float) -> list[Key]:
        """Records that no hint holds any more, chains' beginnings first."""
        gone, ends = [], self._ends
        while ends and ends[0][0] <= now:
            end, depth, key = heapq.heappop(ends)
            hints = self.hints.get(key)
            if hints is None or hints[0][0] != end:
                continue
            del hints[0]
            if hints:
                self._push(key)
            else:
                self.drop(key)
                gone.append((depth, key))
        if len(ends) + len(self._order) > 64 + 8 * len(self.hints):
            # Most entries belong to hints that are gone.
            self._ends, self._order = [], []
            for key in self.hints:
                self._push(key)
        return [key for _, key in sorted(gone)]

    def first(self, may_go: MayGo) -> Key | None:
        """The first that may go."""
        passed, found = [], None
        while self._order and found is None:
            entry = heapq.heappop(self._order)
            level, end, _, key = entry
            hints = self.hints.get(key)
            if hints is None or hints[0] != (end, level):
                continue
            passed.append(entry)
            if may_go(key):
                found = key
        for entry in passed:
            heapq.heappush(self._order, entry)
        return found

    def check(self) -> None:
        """Every record can be found by its end and by its level."""
        assert self.hints.keys() == self._depth.keys()
        ends, order = {(end, key) for end, _, key in self._ends}, {(level, end, key) for level, end, _, key in self._order}
        for key, hints in self.hints.items():
            assert hints == sorted(hints), "ends do not ascend"
            assert [level for _, level in hints] == sorted((level for _, level in hints), reverse=True), "levels do not descend"
            assert (hints[0][0], key) in ends, "a hint never runs out"
            assert (hints[0][1], hints[0][0], key) in order, "a record is never given up"


class PriorityPolicy:
    """Another policy, bounded by hints. Without any it costs one test per call."""

    def __init__(self, policy: EvictionPolicy, records: int, share: float = 0.5) -> None:
        """`records`: that the store holds at most."""
        self.policy = policy
        self._most = int(share * records)
        self._low, self._high = Low(), High()

    @property
    def learner(self) -> Learner | None:
        return self.policy.learner

    @property
    def stored_count(self) -> int:
        return self.policy.stored_count

    @property
    def retained(self) -> int:
        """Records above usual now."""
        return len(self._high.hints)

    def holds(self, key: Key) -> bool:
        return self.policy.holds(key)

    def used(self, visit: Visit) -> None:
        """The other policy learns from it; then the hint counts, if there is one."""
        hint, keys = visit.retention, visit.keys[: visit.stored]
        if hint is None or hint.priority == USUAL:
            self.policy.used(visit)
            if self._low.level:
                for key in visit.keys:
                    self._low.drop(key)
        elif hint.priority < USUAL:
            # What others have used at the usual level stays there.
            mine = [key for key in keys if key in self._low.level or not self.policy.holds(key)]
            self.policy.used(visit)
            for key in reversed(mine):
                self._low.put(key, hint.priority)
        else:
            self.policy.used(visit)
            self._retain(keys, hint, visit.went + hint.seconds)

    def _retain(self, keys: Sequence[Key], hint: Retention, end: float) -> None:
        """Where there is not room for all, a beginning is kept."""
        high = self._high
        room = self._most - len(high.hints)
        for depth, key in enumerate(keys):
            self._low.drop(key)
            if key not in high.hints:
                if room <= 0:
                    continue
                room -= 1
            high.add(key, depth, end, hint.priority)

    def returned(self, keys: Sequence[Key]) -> None:
        self.policy.returned(keys)

    def stored(self, keys: Sequence[Key], now: float) -> None:
        self.policy.stored(keys, now)

    def discarded(self, key: Key) -> None:
        self._low.drop(key)
        self._high.drop(key)
        self.policy.discarded(key)

    def victims(self, count: int, may_go: MayGo, now: float) -> list[Key]:
        """What hints put below usual, then what the other policy says, then what hints keep."""
        high = self._high.hints
        if high and (run_out := self._high.run_out(now)):
            self.policy.returned(run_out)
        if not self._low.level and not high:
            return self.policy.victims(count, may_go, now)
        gone = self._hinted(count, self._low.first, may_go)
        gone += self.policy.victims(count - len(gone), lambda one: one not in high and may_go(one), now)
        return gone + self._hinted(count - len(gone), self._high.first, may_go)

    def _hinted(self, count: int, first: Callable[[MayGo], Key | None], may_go: MayGo) -> list[Key]:
        gone: list[Key] = []
        while len(gone) < count and (key := first(may_go)) is not None:
            self.discarded(key)
            gone.append(key)
        return gone

    def least(self, may_go: MayGo, now: float) -> Rank | None:
        high = self._high.hints
        if high and (run_out := self._high.run_out(now)):
            self.policy.returned(run_out)
        if not self._low.level and not high:
            return self.policy.least(may_go, now)
        key = self._low.first(may_go)
        if key is not None:
            return self._low.level[key], 0.0
        rank = self.policy.least(lambda one: one not in high and may_go(one), now)
        if rank is not None:
            return rank
        key = self._high.first(may_go)
        return None if key is None else (high[key][0][1], high[key][0][0])

    def worths(self, keys: Sequence[Key], now: float) -> list[float]:
        return self.policy.worths(keys, now)

    def check(self, keys: Iterable[Key]) -> None:
        stored, low, high = set(keys), self._low.level.keys(), self._high.hints.keys()
        self.policy.check(stored)
        self._high.check()
        assert low.isdisjoint(high), "a record is above and below usual"
        assert stored >= low | high, "a record is hinted about that is not stored"
        assert len(high) <= self._most, "hints hold more than their share"
