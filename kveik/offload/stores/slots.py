"""Slots of each group, and the record in each, within one bound in bytes for all groups.

    slots of a group, all of one size:   0 1 2 3 4 5 6 │ end
                                         R f R h R r f
    R  holds a record           r  removed, but still read; then free
    f  free, memory kept        h  a hole: free, its memory released

A new record takes a free slot of its group, the lowest first; else a hole or a slot at the end, when the bound allows; else
free slots of other groups become holes, and their memory is used. So nothing fragments: a slot is of use to any group.
One lock guards everything; nothing slow is done under it but releasing one slot's memory.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kveik.offload.stores.record import RecordKey

PAGE_BYTES = 4096
"""Slots are whole pages, so that the memory of each can be released."""


@dataclass(slots=True)
class Place:
    """Place of one record."""

    group: int
    slot: int
    bytes: int
    """Size of the record; the slot may be larger."""

    readers: int = 0
    removed: bool = False


@dataclass(slots=True)
class _Shelf:
    slot_bytes: int
    free: list[int] = field(default_factory=list)
    holes: list[int] = field(default_factory=list)
    end: int = 0

    @property
    def allocated(self) -> int:
        return self.end - len(self.holes)


def slot_bytes(record_bytes: int) -> int:
    """A record's size in whole pages."""
    return -(-record_bytes // PAGE_BYTES) * PAGE_BYTES


class Slots:
    """Slots of a store, and the records in them."""

    def __init__(self, sizes: Sequence[int], capacity_bytes: int, make_holes: Callable[[int, int, int], bool]) -> None:
        """`sizes`: bytes of a slot, per group. `make_holes(group, first, count)`: False where the system cannot."""
        assert all(size % PAGE_BYTES == 0 for size in sizes), "slots are whole pages"
        self.capacity_bytes = capacity_bytes
        self.usable_bytes = capacity_bytes
        """Bound while the system has no more to give; records beyond it stay until they are deleted."""

        self._make_holes = make_holes
        self._shelves = [_Shelf(size) for size in sizes]
        self._places: dict[RecordKey, Place] = {}
        self._lock = threading.Lock()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def bytes(self) -> int:
        """Bytes of all slots but holes."""
        return self._bytes

    def size(self, group: int) -> int:
        """Bytes of a group's slots."""
        return self._shelves[group].slot_bytes

    def end(self, group: int) -> int:
        """One more than the group's last slot ever used."""
        return self._shelves[group].end

    def fits(self, group: int, record_bytes: int) -> bool:
        """True where a record of this size fits a slot of this group."""
        return group < len(self._shelves) and record_bytes <= self._shelves[group].slot_bytes

    def take(self, key: RecordKey, record_bytes: int) -> Place | None:
        """A slot to write a record into, not visible yet; None: the bound is reached."""
        with self._lock:
            slot = self._take(key.group)
            if slot is None and key in self._places:
                # The record that it replaces makes space for it.
                self._remove(key)
                slot = self._take(key.group)
        return None if slot is None else Place(key.group, slot, record_bytes)

    def show(self, key: RecordKey, place: Place) -> None:
        """The record is written: from now on it is found, in place of any other of its key."""
        with self._lock:
            self._remove(key)
            self._places[key] = place

    def restore(self, places: Sequence[tuple[RecordKey, Place]]) -> list[RecordKey]:
        """Records that were there before, at start, the oldest first; those that do not fit the bound any more.

        The newest stay. The slots between them become holes, whatever was in them.
        """
        kept, dropped = list[tuple[RecordKey, Place]](), list[RecordKey]()
        for key, place in reversed(places):
            size = self._shelves[place.group].slot_bytes
            if self._bytes + size > self.capacity_bytes:
                dropped.append(key)
            else:
                self._bytes += size
                kept.append((key, place))
        self._places.update(reversed(kept))
        for group, shelf in enumerate(self._shelves):
            taken = {place.slot for _, place in kept if place.group == group}
            shelf.end = max(taken, default=-1) + 1
            shelf.free = sorted(set(range(shelf.end)) - taken)
            self._bytes += len(shelf.free) * shelf.slot_bytes
        self.release_space()
        return dropped + self._shorten()

    def put_back(self, place: Place) -> None:
        """A slot that was taken and could not be filled."""
        with self._lock:
            self._free(place)

    def pin(self, key: RecordKey) -> Place | None:
        """Place of a record; its slot stays as it is until `unpin`."""
        with self._lock:
            place = self._places.get(key)
            if place is not None:
                place.readers += 1
            return place

    def unpin(self, place: Place) -> None:
        """A reader is done."""
        with self._lock:
            place.readers -= 1
            if place.removed and not place.readers:
                self._free(place)

    def remove(self, key: RecordKey) -> bool:
        """Delete a record; False: it was not there."""
        with self._lock:
            return self._remove(key)

    def has(self, key: RecordKey) -> bool:
        return key in self._places

    def items(self) -> list[tuple[RecordKey, int]]:
        """All records, and what each takes of the bound."""
        with self._lock:
            return [(key, self._shelves[place.group].slot_bytes) for key, place in self._places.items()]

    def places(self) -> list[tuple[RecordKey, Place]]:
        """All records, and where each lies."""
        with self._lock:
            return list(self._places.items())

    def clear(self) -> None:
        """Remove everything, and release all memory that is not being read."""
        with self._lock:
            for key in list(self._places):
                self._remove(key)
        self.release_space()

    def release_space(self) -> None:
        """Make all that is free holes. Readers go on meanwhile; slots are neither free nor holes while their memory goes."""
        for group, shelf in enumerate(self._shelves):
            with self._lock:
                free, shelf.free = sorted(shelf.free), []
            # From the end, so that a file can be cut there rather than hollowed out.
            for first, count in reversed(list(_runs(free))):
                gone = self._make_holes(group, first, count)
                with self._lock:
                    for slot in range(first, first + count):
                        heapq.heappush(shelf.holes if gone else shelf.free, slot)
                    self._bytes -= count * shelf.slot_bytes if gone else 0

    def check(self) -> None:
        """Every slot holds a record, is free or is a hole; the bytes are those of all but the holes."""
        with self._lock:
            assert self._bytes == sum(shelf.allocated * shelf.slot_bytes for shelf in self._shelves)
            assert self._bytes <= self.capacity_bytes
            for group, shelf in enumerate(self._shelves):
                held = [place.slot for place in self._places.values() if place.group == group]
                slots = [*held, *shelf.free, *shelf.holes]
                assert len(slots) == len(set(slots))
                assert all(0 <= slot < shelf.end for slot in slots)

    def _take(self, group: int) -> int | None:
        shelf = self._shelves[group]
        if self._bytes > self.usable_bytes:
            self._free_bytes(0)
        if shelf.free:
            return heapq.heappop(shelf.free)
        if not self._free_bytes(shelf.slot_bytes):
            return None
        self._bytes += shelf.slot_bytes
        if shelf.holes:
            return heapq.heappop(shelf.holes)
        shelf.end += 1
        return shelf.end - 1

    def _free_bytes(self, wanted: int) -> bool:
        """Make holes until so many bytes fit. False: they do not."""
        for group in range(len(self._shelves)):
            while self._bytes + wanted > self.usable_bytes and self._make_hole(group):
                pass
        return self._bytes + wanted <= self.usable_bytes

    def _make_hole(self, group: int) -> bool:
        shelf = self._shelves[group]
        if not shelf.free or not self._make_holes(group, shelf.free[0], 1):
            return False
        heapq.heappush(shelf.holes, heapq.heappop(shelf.free))
        self._bytes -= shelf.slot_bytes
        return True

    def _shorten(self) -> list[RecordKey]:
        """Where the system cannot give back what lies between records, those at an end go, until the bound holds."""
        there = {(place.group, place.slot): key for key, place in self._places.items()}
        dropped = list[RecordKey]()
        for shelf in self._shelves:
            shelf.free.sort()
            shelf.holes.sort()
        while self._bytes > self.capacity_bytes:
            group, shelf = max(enumerate(self._shelves), key=lambda one: len(one[1].free) * one[1].slot_bytes)
            key = there[group, shelf.end - 1]
            del self._places[key]
            dropped.append(key)
            self._bytes -= shelf.slot_bytes
            shelf.end -= 1
            self._cut(shelf)
        return dropped

    def _cut(self, shelf: _Shelf) -> None:
        """End a shelf behind its last record; what is free and what is a hole is in order."""
        while shelf.end - 1 in [slots[-1] for slots in (shelf.free, shelf.holes) if slots]:
            shelf.end -= 1
            if shelf.free and shelf.free[-1] == shelf.end:
                shelf.free.pop()
                self._bytes -= shelf.slot_bytes
            else:
                shelf.holes.pop()

    def _remove(self, key: RecordKey) -> bool:
        place = self._places.pop(key, None)
        if place is None:
            return False
        place.removed = True
        if not place.readers:
            self._free(place)
        return True

    def _free(self, place: Place) -> None:
        heapq.heappush(self._shelves[place.group].free, place.slot)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of adjacent slots, in order: (first, count)."""
    start = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            yield slots[start], place - start
            start = place
