"""Store of records in the memory of this machine, in slots of fixed size.

Nothing is allocated while serving, nothing fragments. Each group has address space for the whole bound; memory comes when a
slot is first written, and goes when another group needs it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence

from kveik.clock import Clock
from kveik.machine.address_space import address_space
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores.encode import copy
from kveik.offload.stores.record import Miss, RecordFormat, RecordKey, Refusal
from kveik.offload.stores.slots import Slots, slot_bytes
from kveik.offload.stores.store import Direct, Extent, Use

_ADVICE = "ask for less with --kv-ram-bytes or --hybrid-kv-cache-fraction"


def ram_extent(formats: Sequence[RecordFormat], capacity_bytes: int) -> Extent:
    """Sizes of a `RamStore`."""
    return Extent(capacity_bytes, capacity_bytes, tuple(slot_bytes(one.record_bytes) for one in formats))


class RamStore:
    """A `Store` in memory. Lives as long as its process."""

    name = "ram"
    availability = AVAILABLE

    def __init__(self, formats: Sequence[RecordFormat], capacity_bytes: int, clock: Clock) -> None:
        """`formats`: per group. Raises DoesNotFit where the system does not give the address space."""
        self.capacity_bytes = capacity_bytes
        self.formats: Sequence[RecordFormat] = tuple(formats)
        self._clock = clock
        sizes = [slot_bytes(one.record_bytes) for one in formats]
        self._slots = Slots(sizes, capacity_bytes, self._make_holes)
        self._regions = [
            address_space(capacity_bytes // size * size, "the tier in RAM", _ADVICE, counted=False) for size in sizes
        ]
        self._memory = [memoryview(region) for region in self._regions]

    @property
    def usable_bytes(self) -> int:
        return self.capacity_bytes

    @property
    def bytes_used(self) -> int:
        return self._slots.bytes

    @property
    def records(self) -> int:
        return len(self._slots)

    def cost_bytes(self, group: int) -> int:
        return self._slots.size(group)

    def put_many(self, records: Sequence[tuple[RecordKey, memoryview]]) -> list[Refusal | None]:
        return [self._put(key, record) for key, record in records]

    def get_many(self, keys: Sequence[RecordKey], use: Use, deadline: float, direct: Direct | None = None) -> list[Miss | None]:
        return [self._get(number, key, use, deadline) for number, key in enumerate(keys)]

    def probe_many(self, keys: Sequence[RecordKey], deadline: float) -> list[bool]:
        return [self._slots.has(key) for key in keys]

    def delete_many(self, keys: Sequence[RecordKey]) -> None:
        for key in keys:
            self._slots.remove(key)

    def contents(self) -> Iterator[tuple[RecordKey, int]]:
        return iter(self._slots.items())

    def release_space(self) -> None:
        self._slots.release_space()

    def clear(self) -> None:
        self._slots.clear()

    def close(self) -> None:
        for memory, region in zip(self._memory, self._regions, strict=True):
            # Where somebody still holds a view, the memory goes with it.
            with contextlib.suppress(BufferError):
                memory.release()
                region.close()

    def check(self) -> None:
        """The laws of its books."""
        self._slots.check()

    def _put(self, key: RecordKey, record: memoryview) -> Refusal | None:
        if not self._slots.fits(key.group, len(record)):
            return Refusal.FAILED
        place = self._slots.take(key, len(record))
        if place is None:
            return Refusal.FULL
        copy(record, self._view(place.group, place.slot, place.bytes))
        self._slots.show(key, place)
        return None

    def _get(self, number: int, key: RecordKey, use: Use, deadline: float) -> Miss | None:
        if self._clock.now() > deadline:
            return Miss.LATE
        place = self._slots.pin(key)
        if place is None:
            return Miss.ABSENT
        try:
            use(number, self._view(place.group, place.slot, place.bytes))
        finally:
            self._slots.unpin(place)
        return None

    def _view(self, group: int, slot: int, size: int) -> memoryview:
        start = slot * self._slots.size(group)
        return self._memory[group][start : start + size]

    def _make_holes(self, group: int, first: int, count: int) -> bool:
        size = self._slots.size(group)
        self._regions[group].madvise(mmap.MADV_DONTNEED, first * size, count * size)
        return True
