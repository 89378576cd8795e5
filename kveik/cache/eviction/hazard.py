"""Eviction by expected reuse: what is least likely to be used soon goes first, as learnt from what was used again, and when.

Reuse is a session going on, or a beginning that many share. So the unit is the segment (`segments.py`); its kind says how often
its session went on, how much of the latest request was new and how long the answer was; and its age counts from the end of its
latest use (`reuse.py`). The victim is the end of the least valuable of `samples` leaves drawn at random.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kveik.cache.eviction import reuse
from kveik.cache.eviction.leaves import Leaves
from kveik.cache.eviction.policy import USUAL, Chance, Key, Learnt, MayGo, Rank, Visit
from kveik.cache.eviction.reuse import AGES, KINDS, bucket
from kveik.cache.eviction.segments import Segment, SegmentTree

FULL_WEIGHT_TOKENS = 32 * 512
"""A segment of so many tokens, or more, counts as one spell; a shorter one in proportion."""

SEGMENTS_KNOWN = 4096
"""Segments known at least, stored or not, before the oldest ghosts are forgotten."""

KEYS_KNOWN = 65_536
"""Keys known at least; beyond them, and 16 for each that was stored at most, ghosts are forgotten too."""

FORGOTTEN_AT_ONCE = 4
LESSON_REQUESTS = 64


class HazardPolicy:
    """A use costs O(log keys + new keys + segments of the chain), a victim O(samples) or, within one segment, O(1).

    A stored segment is in one place of three: it is a leaf (nothing after it is stored), or set aside (a leaf whose end was
    held when it was drawn), or something after it is stored.
    """

    def __init__(self, block_size: int, chance: Chance, samples: int = 64) -> None:
        self._block_size = block_size
        self._tree = SegmentTree()
        self._leaves = Leaves(chance, samples)
        self._aside: dict[Segment, None] = {}
        self._ghosts: OrderedDict[Segment, None] = OrderedDict()
        """Segments without children in which nothing is stored, the longest so first."""

        self._strays: OrderedDict[Key, None] = OrderedDict()
        """Records of chains that are not known any more. They go before all others."""

        self._strays_aside: dict[Key, None] = {}

        self._victim: Segment | None = None
        """Where the latest victim came from; it goes on losing its end until the next use."""

        self._now = 0.0
        self._full = max(1, FULL_WEIGHT_TOKENS // block_size)
        self._count = self._most = 0
        self._requests = 0
        self._used = [[0.0] * AGES for _ in range(KINDS)]
        self._unused = [[0.0] * AGES for _ in range(KINDS)]
        self._index = np.zeros((KINDS, AGES))
        self._flat_index: list[float] = []
        self._adopt_index(self._index)

    def _adopt_index(self, index: NDArray[np.float64]) -> None:
        """From now on records are worth this; the list is for those of which the worth is asked one by one."""
        self._index = index
        self._flat_index = index.ravel().tolist()

    @property
    def learner(self) -> HazardPolicy:
        return self

    @property
    def stored_count(self) -> int:
        return self._count + len(self._strays) + len(self._strays_aside)

    def holds(self, key: Key) -> bool:
        segment = self._tree.owner.get(key)
        if segment is None:
            return key in self._strays or key in self._strays_aside
        return bool(segment.marks[segment.place_of(key)])

    # What happens to the store.

    def used(self, visit: Visit) -> None:
        """Every segment of the chain was used again, at its age; what is new is appended, or branches off."""
        self._now = visit.went
        known = self._tree.known(visit.keys)
        path = self._path(visit.keys, known)
        for segment in path:
            age = visit.came - segment.touched
            self._used[segment.kind][bucket(age) if age > 0 else 0] += self._weight(segment)
            segment.touched = visit.went
            segment.uses += 1
            if segment.shared:
                segment.kind = reuse.shared_kind(segment.uses)
            if segment.place >= 0:
                self._leaves.changed(segment)
        self._extend(path, visit.keys, known, visit.went)
        if path and not path[-1].shared:
            new = (len(visit.keys) - known) * self._block_size
            path[-1].kind = reuse.session_kind(path[-1].uses, new, visit.tokens_out)
            if path[-1].place >= 0:
                self._leaves.changed(path[-1])
        self._fill(path, visit.stored)
        self._requests += 1
        self._forget()

    def returned(self, keys: Sequence[Key]) -> None:
        for key in keys:
            segment = self._tree.owner.get(key)
            if segment is not None:
                self._place(segment)
            elif key in self._strays_aside:
                del self._strays_aside[key]
                self._strays[key] = None

    def stored(self, keys: Sequence[Key], now: float) -> None:
        self._now = now
        for segment, group in groupby(keys, self._tree.owner.get):
            if segment is not None:
                self._put(segment, list(group))
                self._place(segment)
                continue
            for key in group:
                self._strays_aside.pop(key, None)
                self._strays[key] = None

    def _put(self, segment: Segment, keys: Sequence[Key]) -> None:
        before = segment.count
        segment.put(keys)
        if segment.count > before:
            self._counted(segment, before)

    def discarded(self, key: Key) -> None:
        segment = self._tree.owner.get(key)
        if segment is not None:
            self._cut(segment, segment.place_of(key))
            # Set aside for its last record's sake, it has another last one now.
            self._place(segment)
        self._strays.pop(key, None)
        self._strays_aside.pop(key, None)

    def victims(self, count: int, may_go: MayGo, now: float) -> list[Key]:
        self._now = now
        gone: list[Key] = []
        while len(gone) < count and (key := self._stray(may_go)) is not None:
            del self._strays[key]
            gone.append(key)
        while len(gone) < count and (segment := self._choose(may_go, now)) is not None:
            ends = segment.ends(count - len(gone), may_go)
            gone += ends
            self._count -= len(ends)
            if segment.shorten(len(ends)) == 0:
                self._emptied(segment)
        return gone

    def least(self, may_go: MayGo, now: float) -> Rank | None:
        if self._stray(may_go) is not None:
            return USUAL, float("-inf")
        segment = self._choose(may_go, now)
        if segment is None:
            return None
        return USUAL, self._flat_index[segment.kind * AGES + bucket(max(0.0, now - segment.touched))]

    def _stray(self, may_go: MayGo) -> Key | None:
        while self._strays:
            key = next(iter(self._strays))
            if may_go(key):
                return key
            del self._strays[key]
            self._strays_aside[key] = None
        return None

    def _choose(self, may_go: MayGo, now: float) -> Segment | None:
        """The segment that loses its end next."""
        while True:
            segment = self._victim or self._leaves.least(self._index.ravel(), now)
            if segment is None or may_go(segment.keys[segment.top - 1]):
                self._victim = segment
                return segment
            self._victim = None
            self._unplace(segment)
            self._aside[segment] = None

    def worths(self, keys: Sequence[Key], now: float) -> list[float]:
        """Uses per second of keeping each: its segment's index."""
        index, worths = self._flat_index, list[float]()
        # What is asked about together is mostly of one chain.
        for segment, group in groupby(keys, self._tree.owner.get):
            worth = float("-inf")
            if segment is not None:
                worth = index[segment.kind * AGES + bucket(max(0.0, now - segment.touched))]
            worths += [worth] * len(list(group))
        return worths

    # Parts of a use.

    def _path(self, keys: Sequence[Key], known: int) -> list[Segment]:
        """The segments that the first `known` keys are, from the first on; one that reaches further is split."""
        self._victim = None
        if known == 0:
            return []
        last = self._tree.owner[keys[known - 1]]
        at = known - last.start
        if at < len(last.keys):
            last = self._split(last, at)
        return self._tree.path(last)

    def _split(self, lower: Segment, at: int) -> Segment:
        """The upper part has the kind of the session that it was until its next use; then it is a shared one."""
        alive = lower.count > 0
        upper = self._tree.split(lower, at)
        upper.shared = True
        if alive and not lower.count:
            self._unplace(lower)
            self._add_ghost(lower)
        return upper

    def _extend(self, path: list[Segment], keys: Sequence[Key], known: int, now: float) -> None:
        """What is new goes on the last segment of the path, where its session goes on, else it is a new child."""
        if known == len(keys):
            return
        last = path[-1] if path else self._tree.root
        if path and not last.children:
            self._tree.grow(last, keys[known:])
        else:
            self._ghosts.pop(last, None)
            last = self._tree.add(last, keys[known:], now)
            path.append(last)
        if self._strays or self._strays_aside:
            self._adopt_strays(last, keys[known:])

    def _adopt_strays(self, segment: Segment, keys: Sequence[Key]) -> None:
        """Their chain is known now."""
        for key in keys:
            if key in self._strays or key in self._strays_aside:
                self._strays.pop(key, None)
                self._strays_aside.pop(key, None)
                self._put(segment, (key,))

    def _fill(self, path: list[Segment], stored: int) -> None:
        for segment in path:
            places = min(stored - segment.start, len(segment.keys))
            if places > segment.count:
                before = segment.count
                segment.fill(places)
                self._counted(segment, before)
        for segment in path:
            if not segment.count and not segment.children and segment not in self._ghosts:
                self._add_ghost(segment)
            self._place(segment)

    def _counted(self, segment: Segment, before: int) -> None:
        """More of it is stored than before."""
        self._count += segment.count - before
        self._most = max(self._most, self._count)
        parent = segment.parent
        if before == 0 and parent is not None:
            parent.live_children += 1
            self._unplace(parent)
            self._ghosts.pop(segment, None)

    def _cut(self, segment: Segment, place: int) -> None:
        if not segment.cut(place):
            return
        self._count -= 1
        if segment.count == 0:
            self._emptied(segment)

    def _emptied(self, segment: Segment) -> None:
        if self._victim is segment:
            self._victim = None
        self._unplace(segment)
        self._add_ghost(segment)
        parent = segment.parent
        assert parent is not None
        parent.live_children -= 1
        self._place(parent)

    def _weight(self, segment: Segment) -> float:
        length = len(segment.keys)
        return 1.0 if length >= self._full else length / self._full

    # Leaves.

    def _place(self, segment: Segment) -> None:
        """Among the leaves, if it is one."""
        if segment.place < 0 and segment.count and not segment.live_children:
            self._aside.pop(segment, None)
            self._leaves.add(segment)

    def _unplace(self, segment: Segment) -> None:
        if segment.place >= 0:
            self._leaves.remove(segment)
        else:
            self._aside.pop(segment, None)

    # Ghosts.

    def _add_ghost(self, segment: Segment) -> None:
        if not segment.children:
            self._ghosts[segment] = None

    def _forget(self) -> None:
        """Some of the oldest ghosts where there are too many segments; as many as it takes where there are too many keys."""
        tree, ghosts = self._tree, self._ghosts
        segments_bound = max(SEGMENTS_KNOWN, 4 * (tree.count - len(ghosts)))
        for _ in range(FORGOTTEN_AT_ONCE):
            if ghosts and tree.count > segments_bound:
                self._forget_oldest()
        keys_bound = max(KEYS_KNOWN, 16 * self._most)
        while ghosts and len(tree.owner) > keys_bound:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Its spell has ended unused."""
        ghost, _ = self._ghosts.popitem(last=False)
        self._unused[ghost.kind][bucket(self._now - ghost.touched)] += self._weight(ghost)
        parent = self._tree.remove(ghost)
        if parent is not self._tree.root and not parent.count:
            self._add_ghost(parent)

    # Learning.

    @property
    def wants_lesson(self) -> bool:
        return self._requests >= max(LESSON_REQUESTS, self._tree.count // 16)

    def learn(self, now: float) -> None:
        """Rates from what was used again, what was forgotten, and what goes on aging."""
        used, time = self.spells(now)
        self._adopt_index(reuse.index(reuse.fit(used, time)))
        for table in (self._used, self._unused):
            table[:] = (np.array(table) * reuse.FADING).tolist()
        self._requests = 0

    def spells(self, now: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What was used again, and the weight times seconds in which it could have been; both [KINDS, AGES]."""
        used = np.array(self._used)
        return used, reuse.exposure(used, np.array(self._unused) + self._aging(now))

    def _aging(self, now: float) -> NDArray[np.float64]:
        """Weights of the spells that have not ended, as if they ended now; [KINDS, AGES]."""
        full = self._full
        spells = [(one.kind * AGES + bucket(now - one.touched), min(len(one.keys), full)) for one in self._tree.segments()]
        if not spells:
            return np.zeros((KINDS, AGES))
        cells, weights = np.array(spells).T
        counts = np.bincount(cells, weights / full, KINDS * AGES).astype(np.float64)
        return counts.reshape(KINDS, AGES)

    def learnt(self) -> Learnt:
        return {"used": np.array(self._used), "unused": np.array(self._unused), "index": self._index.copy()}

    def restore(self, learnt: Learnt) -> None:
        tables = {}
        for name in ("used", "unused", "index"):
            table = np.asarray(learnt.get(name, ()), dtype=np.float64)
            if table.shape != (KINDS, AGES) or not np.isfinite(table).all() or (table < 0).any():
                raise ValueError(
                    f"The table '{name}' must be {KINDS} x {AGES} numbers of at least 0; it has shape {table.shape}."
                )
            tables[name] = table.copy()
        self._used, self._unused = tables["used"].tolist(), tables["unused"].tolist()
        self._adopt_index(tables["index"])

    # Laws.

    def check(self, keys: Iterable[Key]) -> None:
        self._tree.check()
        stored, count = set(self._strays) | set(self._strays_aside), 0
        assert self._strays.keys().isdisjoint(self._strays_aside), "a stray may go and is set aside"
        assert stored.isdisjoint(self._tree.owner), "a stray's chain is known"
        for segment in self._tree.segments():
            count += segment.count
            stored.update(key for key, mark in zip(segment.keys, segment.marks, strict=True) if mark)
            places = (segment.place >= 0) + (segment in self._aside)
            assert places == (segment.count > 0 and not segment.live_children), "a segment is not where it should be"
            assert (segment in self._ghosts) == (not segment.count and not segment.children), "a ghost is missing or alive"
        assert stored == set(keys), "the policy's keys are not the store's"
        assert count == self._count, "stored records are miscounted"
        self._leaves.check()
