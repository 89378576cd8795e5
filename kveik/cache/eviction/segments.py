"""Chains of keys as a compressed prefix tree: a run of keys that were always used together is one segment with one history.

    root ── [k0 k1 k2] ─┬─ [k3 k4 k5 k6]
              shared    └─ [k7 k8]

Keys stay known for a while after their records were given up (a segment with no record left is a *ghost*), so that use beyond
the store's own horizon is seen. What is known is closed under prefixes: only whole segments without children are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kveik.cache.eviction.policy import Key, MayGo

_NO_CHILDREN: dict[Segment, None] = {}
"""Shared by all segments that never had any, which are most."""


class Segment:
    """A run of keys, its place in the tree, and the history of its use.

    keys    k3 k4 k5 k6 k7       start = 3
    marks    1  1  0  1  0       count = 3, top = 4; in a pool there is no gap, unless a record was discarded
    """

    __slots__ = (
        "children",
        "count",
        "keys",
        "kind",
        "live_children",
        "marks",
        "parent",
        "place",
        "shared",
        "start",
        "top",
        "touched",
        "uses",
    )

    def __init__(self, parent: Segment | None, keys: list[Key], start: int, touched: float) -> None:
        self.parent = parent
        self.keys = keys
        self.start = start
        """Keys before it in its chains."""

        self.marks = bytearray(len(keys))
        """Per key, whether its record is stored."""

        self.count = 0
        """Stored records."""

        self.top = 0
        """Place behind the last stored record."""

        self.children = _NO_CHILDREN
        self.live_children = 0
        """Children in which something is stored."""

        self.place = -1
        """Where it is in the policy's list of leaves; -1: it is not there."""

        self.touched = touched
        """When its latest use ended, seconds."""

        self.uses = 0
        """How often it was used again."""

        self.kind = 0
        self.shared = False
        """Whether sessions have differed behind it."""

    def adopt(self, child: Segment) -> None:
        """One child more, whose parent this becomes elsewhere."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[child] = None

    def fill(self, places: int) -> None:
        """The first `places` records are stored."""
        if self.count == self.top:
            # No gaps: what is stored is a beginning.
            if places > self.top:
                self.marks[self.top : places] = b"\1" * (places - self.top)
                self.top = self.count = places
            return
        self.marks[:places] = b"\1" * places
        self.top = max(self.top, places)
        self.count = self.marks.count(1)

    def place_of(self, key: Key) -> int:
        """Where the key is. Records come and go at the ends of what is stored, where it is O(1); elsewhere O(keys)."""
        keys, low = self.keys, self.marks.find(1)
        for place in (low - 1 if low >= 0 else len(keys) - 1, self.top - 1, self.top):
            if 0 <= place < len(keys) and keys[place] == key:
                return place
        return keys.index(key)

    def put(self, keys: Sequence[Key]) -> None:
        """Their records are stored, perhaps for a second time."""
        own, marks, place = self.keys, self.marks, 0
        for key in keys:
            # A chain is given up from its end, so the next key mostly stands before this one.
            place = place - 1 if place and own[place - 1] == key else self.place_of(key)
            if not marks[place]:
                marks[place] = 1
                self.count += 1
                self.top = max(self.top, place + 1)

    def ends(self, most: int, may_go: MayGo) -> list[Key]:
        """The last stored records, the very last first: up to the one that may not go, or to a gap."""
        top, whole = self.top, self.count == self.top
        ends = self.keys[max(0, top - most) if whole else top - 1 : top]
        ends.reverse()
        for place, key in enumerate(ends):
            if not may_go(key):
                return ends[:place]
        return ends

    def shorten(self, records: int) -> int:
        """So many of the last stored records, without a gap, are not stored any more. How many are left."""
        place = self.top - records
        self.marks[place : self.top] = bytes(records)
        self.count = left = self.count - records
        self.top = place if left == place else self.marks.rfind(1) + 1
        return left

    def cut(self, place: int) -> bool:
        """The record at `place` is not stored any more. False: it was not."""
        if not self.marks[place]:
            return False
        self.marks[place] = 0
        self.count -= 1
        if place == self.top - 1:
            self.top = self.marks.rfind(1) + 1
        return True


class SegmentTree:
    """All segments, found by the keys in them."""

    def __init__(self) -> None:
        self.root = Segment(None, [], 0, 0.0)
        self.owner: dict[Key, Segment] = {}
        """Key -> the segment it is in."""

        self.count = 0
        """Segments, the root not counted."""

    def known(self, keys: Sequence[Key]) -> int:
        """How many leading keys are known. Time O(log keys), because what is known is closed under prefixes."""
        owner = self.owner
        if not keys or keys[0] not in owner:
            return 0
        low, high = 1, len(keys)
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle - 1] in owner:
                low = middle
            else:
                high = middle - 1
        return low

    def path(self, last: Segment) -> list[Segment]:
        """From the first segment of a chain to `last`."""
        path = []
        while last.parent is not None:
            path.append(last)
            last = last.parent
        path.reverse()
        return path

    def grow(self, segment: Segment, keys: Sequence[Key]) -> None:
        """More keys at the end of a segment without children."""
        segment.keys.extend(keys)
        segment.marks.extend(bytes(len(keys)))
        self.owner.update(dict.fromkeys(keys, segment))

    def add(self, parent: Segment, keys: Sequence[Key], touched: float) -> Segment:
        """A new child."""
        child = Segment(parent, list(keys), parent.start + len(parent.keys), touched)
        parent.adopt(child)
        self.owner.update(dict.fromkeys(keys, child))
        self.count += 1
        return child

    def split(self, lower: Segment, at: int) -> Segment:
        """Cut the first `at` keys off into a segment of their own, which becomes the parent and has the same history."""
        parent = lower.parent
        assert parent is not None
        assert 0 < at < len(lower.keys)
        upper = Segment(parent, lower.keys[:at], lower.start, lower.touched)
        upper.uses, upper.kind, upper.shared = lower.uses, lower.kind, lower.shared
        alive = lower.count > 0
        upper.marks, lower.marks = lower.marks[:at], lower.marks[at:]
        lower.keys = lower.keys[at:]
        lower.start += at
        for part in (upper, lower):
            part.count, part.top = part.marks.count(1), part.marks.rfind(1) + 1
        del parent.children[lower]
        parent.children[upper] = None
        parent.live_children += (upper.count > 0) - alive
        upper.adopt(lower)
        upper.live_children = int(lower.count > 0)
        lower.parent = upper
        self.owner.update(dict.fromkeys(upper.keys, upper))
        self.count += 1
        return upper

    def remove(self, segment: Segment) -> Segment:
        """Forget a segment without children in which nothing is stored. Its parent."""
        parent = segment.parent
        assert parent is not None
        assert not segment.children
        assert segment.count == 0
        del parent.children[segment]
        for key in segment.keys:
            del self.owner[key]
        self.count -= 1
        return parent

    def segments(self) -> Iterator[Segment]:
        """All but the root."""
        waiting = list(self.root.children)
        while waiting:
            segment = waiting.pop()
            waiting.extend(segment.children)
            yield segment

    def check(self) -> None:
        """Every key is in one segment; counts agree with what they count: O(keys)."""
        known = count = 0
        for segment in self.segments():
            parent = segment.parent
            assert parent is not None
            assert segment.keys, "a segment without keys is kept"
            assert all(self.owner[key] is segment for key in segment.keys), "a key leads elsewhere"
            assert segment.start == parent.start + len(parent.keys), "a segment does not begin where its parent ends"
            assert segment.count == segment.marks.count(1), "stored records are miscounted"
            assert segment.top == segment.marks.rfind(1) + 1, "the last stored record is elsewhere"
            assert len(segment.marks) == len(segment.keys)
            alive = sum(child.count > 0 for child in segment.children)
            assert segment.live_children == alive, "children in which something is stored are miscounted"
            known, count = known + len(segment.keys), count + 1
        assert known == len(self.owner), "a key is in two segments or in none"
        assert count == self.count, "segments are miscounted"
