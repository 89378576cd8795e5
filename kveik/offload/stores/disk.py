"""Store of records on a disk, in a folder of its own that outlives the process.

A batch of records is written to free slots, then named in the index; only then can they be found. A record is checked in full
whenever it is read, so slots and index need not agree after a crash: a slot that holds something else is a miss. Reading goes
by the slots in memory, which are made from the index at start.

After a failure, `availability` has the reason, and new records are refused for a pause that doubles up to five minutes; then
the store tries again. A folder that can only be read is read. A disk that is full is a smaller bound: `usable_bytes`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from kveik.clock import Clock
from kveik.errors import Unreachable
from kveik.observe.events import TierState
from kveik.offload.availability import AVAILABLE, Availability
from kveik.offload.stores.disk_files import DISK_FULL, FULL, INDEX, OneThread, in_words
from kveik.offload.stores.disk_folder import OpenFolder, plan_folder
from kveik.offload.stores.disk_index import IndexBroken, PendingDeletions
from kveik.offload.stores.record import HEADER_BYTES, Miss, RecordFormat, RecordKey, Refusal
from kveik.offload.stores.slots import Place
from kveik.offload.stores.store import Direct, Extent, Use

log = logging.getLogger(__name__)

SYNC_SECONDS = 1.0
"""Interval at which slots and index are synced; records written since are misses after a loss of power."""

PAUSE_SECONDS, PAUSE_SECONDS_MOST = 1.0, 300.0


def disk_extent(formats: Sequence[RecordFormat], capacity_bytes: int) -> Extent:
    """Sizes of a `DiskStore`, wherever it is. Raises DoesNotFit."""
    plan = plan_folder(Path(), formats, capacity_bytes)
    return Extent(capacity_bytes, plan.slots_bytes, plan.sizes)


class DiskBound:
    """Bytes that slots may take: the bound that was set, or the space that a full disk had, until it has more. Pure."""

    def __init__(self, most: int, least: int) -> None:
        """`most`: the bound that was set; `least`: for one record of every group."""
        self.bytes = self._most = most
        self._least = least
        self._pause = PAUSE_SECONDS
        self._narrowed = self._again = float("-inf")
        self._believed = False
        """The file system has said that there is more, and no write has shown otherwise yet."""

    @property
    def is_narrow(self) -> bool:
        """Whether it is less than was set."""
        return self.bytes < self._most

    def may_ask(self, now: float) -> bool:
        """Whether it is time to ask what is free."""
        return self.is_narrow and now >= self._again

    def narrow(self, found: int, now: float) -> None:
        """The disk was full, and this is what it had."""
        if now - self._narrowed > 4 * self._pause:
            self._pause = PAUSE_SECONDS
        elif self._believed:
            self._pause = min(2 * self._pause, PAUSE_SECONDS_MOST)
        self._believed, self._narrowed, self._again = False, now, now + self._pause
        self.bytes = max(min(self.bytes, found), self._least)

    def widen(self, said: int, now: float) -> None:
        """The file system says that there is this much."""
        found = min(max(said, self.bytes), self._most)
        self._believed |= found > self.bytes
        self.bytes, self._again = found, now + self._pause


class DiskStore:
    """A `Store` in a folder of its own."""

    name = "disk"

    def __init__(
        self,
        folder: Path,
        formats: Sequence[RecordFormat],
        capacity_bytes: int,
        clock: Clock,
        *,
        read_only: bool = False,
        index_bytes: int = 0,
    ) -> None:
        """`formats`: per group; `index_bytes`: least bound on the index, for a bound that is small.

        Raises DoesNotFit, or Unreachable where another engine has the folder; anything else that is wrong is in `availability`.
        """
        self.capacity_bytes = capacity_bytes
        self.folder = folder
        self.formats: Sequence[RecordFormat] = tuple(formats)
        self._reason: str | None = None
        self._clock = clock
        plan = plan_folder(folder, formats, capacity_bytes, read_only=read_only, index_bytes_least=index_bytes)
        self._plan = plan
        self._folder: OpenFolder | None = None
        self._reading = threading.Lock()
        """Held while files are read, and while they are closed."""
        self._alone = OneThread()
        """Around every change of slots and index: two threads would write into one another's slots."""

        self._buffers: list[bytearray] = []
        self.pending = PendingDeletions()
        """Deletions that the index has not recorded."""

        self._left_records: int | None = None
        """Records when the folder was left; None: it has not been entered yet."""

        self._pause, self._again, self._synced = PAUSE_SECONDS, clock.now(), clock.now()
        self._bound = DiskBound(plan.slots_bytes, sum(plan.sizes))
        self._bytes_used = 0
        with self._changing():
            self._enter(first=True)

    @property
    def usable_bytes(self) -> int:
        """Less while the disk is full: deletions make space for new records."""
        return self._bound.bytes

    @property
    def bytes_used(self) -> int:
        """Bytes after the last change: a caller must not wait for a disk that does not answer."""
        return self._bytes_used

    @property
    def availability(self) -> Availability:
        """Unavailable where nothing in the folder can be read."""
        if (reason := self._reason) is None:
            return AVAILABLE
        return Availability(TierState.UNAVAILABLE if self._folder is None else TierState.DEGRADED, reason)

    @property
    def records(self) -> int:
        return 0 if self._folder is None else len(self._folder.slots)

    def cost_bytes(self, group: int) -> int:
        return self._plan.sizes[group]

    def put_many(self, records: Sequence[tuple[RecordKey, memoryview]]) -> list[Refusal | None]:
        with self._changing():
            return self._put_many(records)

    def _put_many(self, records: Sequence[tuple[RecordKey, memoryview]]) -> list[Refusal | None]:
        folder = self._ready()
        if folder is None:
            return [Refusal.REFUSED] * len(records)
        places = [self._write(folder, key, record) for key, record in records]
        written = [(key, place) for (key, _), place in zip(records, places, strict=True) if isinstance(place, Place)]
        recorded = self._record(folder, written)
        for key, place in written:
            if recorded:
                folder.slots.show(key, place)
            else:
                folder.slots.put_back(place)
        if not recorded:
            # The index may name them all the same.
            self.pending.add(key for key, _ in written)
        return [place if isinstance(place, Refusal) else None if recorded else Refusal.FAILED for place in places]

    def get_many(self, keys: Sequence[RecordKey], use: Use, deadline: float, direct: Direct | None = None) -> list[Miss | None]:
        buffer = self._buffers.pop() if self._buffers else bytearray(max(self._plan.sizes))
        misses: list[Miss | None] = []
        for number, key in enumerate(keys):
            late = self._clock.now() > deadline
            misses.append(Miss.LATE if late else self._get(number, key, use, direct, memoryview(buffer)))
        self._buffers.append(buffer)
        return misses

    def probe_many(self, keys: Sequence[RecordKey], deadline: float) -> list[bool]:
        folder = self._folder
        return [folder is not None and folder.slots.has(key) for key in keys]

    def delete_many(self, keys: Sequence[RecordKey]) -> None:
        with self._changing():
            # Also those that are not there: an index that was damaged may name them again.
            self.pending.add(keys)
            if (folder := self._folder) is not None:
                for key in keys:
                    # Until the index has recorded it, it names a slot that may hold another record: a miss.
                    folder.slots.remove(key)
            if (folder := self._ready()) is not None:
                self._record(folder, [])

    def contents(self) -> Iterator[tuple[RecordKey, int]]:
        return iter([] if self._folder is None else self._folder.slots.items())

    def release_space(self) -> None:
        with self._changing():
            if (folder := self._ready()) is not None:
                with self._watched():
                    folder.release_space(self._plan)
                    self.pending.settle()
                    self._went_well(folder)

    def clear(self) -> None:
        with self._changing():
            self.pending.add_everything(self.records if self._folder is not None else self._left_records)
            if self._folder is not None:
                self._folder.slots.clear()
            if (folder := self._ready()) is not None:
                self._record(folder, [])

    def close(self) -> None:
        with self._alone:
            if self.pending and not self._plan.read_only:
                self._settle_at_last()
            self._leave()

    def _settle_at_last(self) -> None:
        """Try pending deletions once more, whatever is wrong; those that may come back are logged."""
        self._again = self._clock.now()
        if not (self.folder / INDEX).exists() and self.folder.is_dir():
            # Without an index nothing comes back.
            return
        if self.folder.is_dir() and (folder := self._ready()) is not None:
            self._record(folder, [])
        if self.pending:
            records = self.pending.records
            log.warning(
                "%s records of %s were to be forgotten and may be there still, because it cannot be written (%s): the next "
                "start would find them. `kveik cache clear` removes them.",
                "All" if records is None else f"{records:,}",
                self.folder,
                self._reason or "it is gone",
            )

    def check(self) -> None:
        """The laws of its slots."""
        if self._folder is not None:
            self._folder.slots.check()

    def _get(self, number: int, key: RecordKey, use: Use, direct: Direct | None, buffer: memoryview) -> Miss | None:
        folder = self._folder
        place = None if folder is None else folder.slots.pin(key)
        if folder is None or place is None:
            return Miss.ABSENT
        try:
            with self._reading:
                if folder is not self._folder:
                    return Miss.ABSENT
                if direct is not None and _read_direct(folder, place, number, direct, buffer[:HEADER_BYTES]):
                    return None
                count = folder.files.read(place.group, place.slot, buffer[: place.bytes])
        except OSError:
            return Miss.FAILED
        else:
            use(number, buffer[:count])
        finally:
            folder.slots.unpin(place)
        return None

    def _write(self, folder: OpenFolder, key: RecordKey, record: memoryview) -> Place | Refusal:
        if self._folder is not folder or not folder.slots.fits(key.group, len(record)):
            return Refusal.FAILED
        before = folder.slots.has(key)
        place = folder.slots.take(key, len(record))
        if before and not folder.slots.has(key):
            # It had to go for the new one, which may yet fail.
            self.pending.add([key])
        if place is None:
            return Refusal.FULL
        try:
            folder.files.write(place.group, place.slot, record)
        except OSError as error:
            folder.slots.put_back(place)
            if error.errno in FULL:
                self._narrow(folder)
                return Refusal.FULL
            self._fail(in_words(error))
            return Refusal.FAILED
        return place

    def _record(self, folder: OpenFolder, written: Sequence[tuple[RecordKey, Place]]) -> bool:
        """Bring the index up to date; False: it could not be written."""
        if not written and not self.pending:
            return True
        with self._watched():
            try:
                folder.record(self._plan, written, self.pending, tight=self._bound.is_narrow)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._narrow(folder)
                folder.record(self._plan, written, self.pending, tight=True)
            if self._clock.now() >= self._synced + SYNC_SECONDS:
                folder.sync()
                self._synced = self._clock.now()
            self._went_well(folder)
            return True
        return False

    def _went_well(self, folder: OpenFolder) -> None:
        """The index was written."""
        self._reason = DISK_FULL if self._is_full(folder) else None
        self._pause, self._again = PAUSE_SECONDS, self._clock.now()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Around every change of slots and files, by one thread at a time."""
        with self._alone:
            yield
            self._bytes_used = self._plan.bytes_on_disk()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """A failure inside is the reason of `availability` and goes no further. A folder whose index fails is left."""
        try:
            yield
        except OSError as error:
            self._fail(in_words(error))
        except MemoryError:
            self._fail("there is not enough memory for the index")
            self._leave()
        except IndexBroken as error:
            self._fail(str(error))
            self._leave()

    def _fail(self, what: str) -> None:
        self._reason = what
        self._again = self._clock.now() + self._pause
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MOST)

    def _ready(self) -> OpenFolder | None:
        """The folder if it may be written. It is entered anew after a pause for a failure, and at once when files are gone."""
        if self._clock.now() < self._again:
            return None
        if self._folder is not None and (self._folder.files.removed or not self._folder.writable):
            self._leave()
        if self._folder is None:
            self._enter(first=False)
        if self._folder is not None and self._bound.may_ask(self._clock.now()):
            self._widen(self._folder)
        return self._folder if self._folder is not None and self._folder.writable else None

    def _narrow(self, folder: OpenFolder) -> None:
        """The disk is full: the space that it has, less the index's, is the bound until it has more."""
        folder.slots.release_space()
        self._bound.narrow(folder.slots.bytes - folder.spare_bytes, self._clock.now())
        folder.slots.usable_bytes = self._bound.bytes
        self._reason = DISK_FULL

    def _widen(self, folder: OpenFolder) -> None:
        """Widen the bound to the space that the file system names; where it is wrong, the next write fails."""
        try:
            found = os.statvfs(self.folder)
        except OSError:
            return
        self._bound.widen(folder.slots.bytes + found.f_bavail * found.f_frsize - folder.spare_bytes, self._clock.now())
        folder.slots.usable_bytes = self._bound.bytes
        if not self._is_full(folder):
            self._reason = None

    def _is_full(self, folder: OpenFolder) -> bool:
        return self._bound.is_narrow and folder.slots.bytes + sum(self._plan.sizes) > self._bound.bytes

    def _enter(self, *, first: bool) -> None:
        self._reason = None
        with self._watched():
            try:
                self._folder = OpenFolder(self._plan, self.pending)
            except Unreachable as error:
                if first:
                    raise
                self._fail(error.message)
        if self._folder is not None:
            self._folder.slots.usable_bytes = self._bound.bytes
            if not self._folder.writable:
                self._fail("the folder can only be read")

    def _leave(self) -> None:
        with self._reading:
            if self._folder is not None:
                self._left_records = len(self._folder.slots)
                self._folder.close()
            self._folder = None


def _read_direct(folder: OpenFolder, place: Place, number: int, direct: Direct, header: memoryview) -> bool:
    """Read a payload straight to its block if that takes no waiting for the disk; False: it does."""
    target = direct.begin(number)
    if target is None:
        return False
    if len(header) + len(target) != place.bytes or not folder.files.read_now(place.group, place.slot, header, target):
        direct.withdraw(number)
        return False
    direct.end(number, header)
    return True
