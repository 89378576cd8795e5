"""Records on a disk, in a folder that one engine has for itself; what is there outlives the process.

A batch of records is written to free slots, then named in the index; only then can they be found. A record
is checked in full whenever it is read, so slots and index need not agree after a crash: a slot that does not hold what the
index says is a miss. Reading goes by the books in memory, made from the index at start.

When something fails, the store says so in `trouble` and refuses new records for a while, which doubles up to five minutes; then
it tries again. A folder that can only be read is read. A disk that is full is a smaller bound: `room_bytes` says which.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kveik.clock import Clock
from kveik.errors import DoesNotFit, Unreachable
from kveik.offload.exclusive import Alone
from kveik.offload.stores.disk_check import DISK_FULL, FULL, in_words
from kveik.offload.stores.disk_folder import FolderPlan, OpenFolder
from kveik.offload.stores.disk_formats import described
from kveik.offload.stores.disk_index import IndexBroken, index_bytes
from kveik.offload.stores.disk_owed import Owed
from kveik.offload.stores.disk_owner import INDEX, check_owner
from kveik.offload.stores.disk_room import DiskRoom
from kveik.offload.stores.record import HEADER_BYTES, Miss, RecordFormat, RecordKey, Refusal
from kveik.offload.stores.slots import PAGE_BYTES, Place, slot_bytes
from kveik.offload.stores.store import Direct, Extent, Use
from kveik.words import counted

log = logging.getLogger(__name__)

SYNC_SECONDS = 1.0
"""Between two times that slots and index are written out; what a machine that loses power forgets besides is a miss."""

PAUSE_SECONDS, PAUSE_SECONDS_MOST = 1.0, 300.0


def disk_extent(formats: Sequence[RecordFormat], capacity_bytes: int) -> Extent:
    """Of a `DiskStore`, wherever it is. Raises DoesNotFit."""
    plan = _plan(Path(), formats, capacity_bytes)
    return Extent(capacity_bytes, plan.slots_bytes, plan.sizes)


class DiskStore:
    """A `Store` in a folder."""

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
        """`formats`: per group; `index_bytes`: that an index may have at least, though the bound be small.

        Raises DoesNotFit, or Unreachable where another engine or other files have the folder; what else is wrong is `trouble`.
        """
        self.capacity_bytes = capacity_bytes
        self.formats: Sequence[RecordFormat] = tuple(formats)
        self.trouble: str | None = None
        self._clock = clock
        plan = _plan(folder, formats, capacity_bytes)
        self._plan = replace(plan, read_only=read_only, index_bytes=max(plan.index_bytes, index_bytes))
        check_owner(folder, len(plan.sizes))
        self._folder: OpenFolder | None = None
        self._reading = threading.Lock()
        """Held while files are read, and while they are closed."""
        self._alone = Alone("the disk store's books")
        """Around all that changes books and index: two threads would write into one another's slots."""

        self._buffers: list[bytearray] = []
        self._owed = Owed()
        self._left_records: int | None = None
        """In the books when the folder was left; None: it has not been entered yet."""

        self._pause, self._again, self._synced = PAUSE_SECONDS, clock.now(), clock.now()
        self._room = DiskRoom(plan.slots_bytes, sum(plan.sizes))
        self._bytes_used = 0
        with self._changing():
            self._enter(first=True)

    @property
    def room_bytes(self) -> int:
        """Less while the disk is full: what is forgotten makes room for what comes."""
        return self._room.bytes

    @property
    def bytes_used(self) -> int:
        """As of the last change: whoever asks must not wait for a disk that does not answer."""
        return self._bytes_used

    @property
    def useless(self) -> bool:
        """Whether nothing there can be read; `trouble` says why."""
        return self._folder is None

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
        known = self._tell(folder, written)
        for key, place in written:
            if known:
                folder.slots.show(key, place)
            else:
                folder.slots.put_back(place)
        if not known:
            # The index may name them all the same.
            self._owed.add(key for key, _ in written)
        return [place if isinstance(place, Refusal) else None if known else Refusal.FAILED for place in places]

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
            # Also those that the books do not have: an index that was damaged may name them again.
            self._owed.add(keys)
            if (folder := self._folder) is not None:
                for key in keys:
                    # Gone from the books at once. Until the index knows, it names a slot that may hold another: a miss.
                    folder.slots.forget(key)
            if (folder := self._ready()) is not None:
                self._tell(folder, [])

    def contents(self) -> Iterator[tuple[RecordKey, int]]:
        return iter([] if self._folder is None else self._folder.slots.items())

    def give_back(self) -> None:
        with self._changing():
            if (folder := self._ready()) is not None:
                with self._watched():
                    folder.give_back(self._plan)
                    self._owed.settle()
                    self._went_well(folder)

    def clear(self) -> None:
        with self._changing():
            self._owed.add_everything(self.records if self._folder is not None else self._left_records)
            if self._folder is not None:
                self._folder.slots.clear()
            if (folder := self._ready()) is not None:
                self._tell(folder, [])

    def close(self) -> None:
        with self._alone:
            if self._owed and not self._plan.read_only:
                self._settle_at_last()
            self._leave()

    def _settle_at_last(self) -> None:
        """Whatever the trouble, what was to be forgotten is tried once more; what comes back is told."""
        self._again = self._clock.now()
        if not (self._plan.folder / INDEX).exists() and self._plan.folder.is_dir():
            # So nothing comes back.
            return
        if self._plan.folder.is_dir() and (folder := self._ready()) is not None:
            self._tell(folder, [])
        if self._owed:
            records = self._owed.records
            log.warning(
                "%s records of %s were to be forgotten and may be there still, because it cannot be written (%s): the next "
                "start would find them. `kveik cache clear` removes them.",
                "All" if records is None else f"{records:,}",
                self._plan.folder,
                self.trouble or "it is gone",
            )

    def check(self) -> None:
        """The laws of its books."""
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
            # It had to go for the new one. Where that is written, the index hears of it, and of nothing owed.
            self._owed.add([key])
        if place is None:
            return Refusal.FULL
        try:
            folder.files.write(place.group, place.slot, record)
        except OSError as error:
            folder.slots.put_back(place)
            if error.errno in FULL:
                self._narrow(folder)
                return Refusal.FULL
            self._suffer(in_words(error))
            return Refusal.FAILED
        return place

    def _tell(self, folder: OpenFolder, written: Sequence[tuple[RecordKey, Place]]) -> bool:
        """Bring the index up to date; whether it is."""
        if not written and not self._owed:
            return True
        with self._watched():
            try:
                folder.tell(self._plan, written, self._owed, tight=self._room.is_narrow)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._narrow(folder)
                folder.tell(self._plan, written, self._owed, tight=True)
            if self._clock.now() >= self._synced + SYNC_SECONDS:
                folder.sync()
                self._synced = self._clock.now()
            self._went_well(folder)
            return True
        return False

    def _went_well(self, folder: OpenFolder) -> None:
        """The index was written."""
        self.trouble = DISK_FULL if self._is_full(folder) else None
        self._pause, self._again = PAUSE_SECONDS, self._clock.now()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Around every change of books and files, by one thread at a time."""
        with self._alone:
            yield
            self._bytes_used = self._plan.bytes_on_disk()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """What fails inside becomes trouble and goes no further. A folder whose index has failed is left."""
        try:
            yield
        except OSError as error:
            self._suffer(in_words(error))
        except MemoryError:
            self._suffer("there is not enough memory for the index")
            self._leave()
        except IndexBroken as error:
            self._suffer(str(error))
            self._leave()

    def _suffer(self, what: str) -> None:
        self.trouble = what
        self._again = self._clock.now() + self._pause
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MOST)

    def _ready(self) -> OpenFolder | None:
        """The folder where it may be written. It is entered anew after a pause for trouble, and at once when files are gone."""
        if self._clock.now() < self._again:
            return None
        if self._folder is not None and (self._folder.files.removed or not self._folder.writable):
            self._leave()
        if self._folder is None:
            self._enter(first=False)
        if self._folder is not None and self._room.may_ask(self._clock.now()):
            self._widen(self._folder)
        return self._folder if self._folder is not None and self._folder.writable else None

    def _narrow(self, folder: OpenFolder) -> None:
        """The disk is full: what it has is the bound, less what the index needs, until it has more."""
        folder.slots.give_back()
        self._room.narrow(folder.slots.bytes - folder.spare_bytes, self._clock.now())
        folder.slots.room_bytes = self._room.bytes
        self.trouble = DISK_FULL

    def _widen(self, folder: OpenFolder) -> None:
        """As far as the file system says that there is something free; where it is wrong, the next record will tell."""
        try:
            found = os.statvfs(self._plan.folder)
        except OSError:
            return
        self._room.widen(folder.slots.bytes + found.f_bavail * found.f_frsize - folder.spare_bytes, self._clock.now())
        folder.slots.room_bytes = self._room.bytes
        if not self._is_full(folder):
            self.trouble = None

    def _is_full(self, folder: OpenFolder) -> bool:
        return self._room.is_narrow and folder.slots.bytes + sum(self._plan.sizes) > self._room.bytes

    def _enter(self, *, first: bool) -> None:
        self.trouble = None
        with self._watched():
            try:
                self._folder = OpenFolder(self._plan, self._owed)
            except Unreachable as error:
                if first:
                    raise
                self._suffer(error.message)
        if self._folder is not None:
            self._folder.slots.room_bytes = self._room.bytes
            if not self._folder.writable:
                self._suffer("the folder can only be read")

    def _leave(self) -> None:
        with self._reading:
            if self._folder is not None:
                self._left_records = len(self._folder.slots)
                self._folder.close()
            self._folder = None


def _plan(folder: Path, formats: Sequence[RecordFormat], capacity_bytes: int) -> FolderPlan:
    """Raises DoesNotFit where not one block has room."""
    sizes = tuple(slot_bytes(one.record_bytes) for one in formats)
    if _room(capacity_bytes, sizes) < sum(sizes):
        raise DoesNotFit(
            f"--kv-disk-bytes {capacity_bytes} is too little for one block of {counted(sum(sizes), 'byte')} and "
            "the index of the folder; "
            f"at least {_least(sizes)} would work."
        )
    index = index_bytes(capacity_bytes // min(sizes))
    return FolderPlan(folder, sizes, capacity_bytes, _room(capacity_bytes, sizes), index, described(formats))


def _room(capacity_bytes: int, sizes: Sequence[int]) -> int:
    """For slots: what is left beside a page for the lock, and two indices, for one may be kept aside or written anew."""
    return capacity_bytes - 2 * index_bytes(capacity_bytes // min(sizes)) - PAGE_BYTES


def _least(sizes: Sequence[int]) -> int:
    """Bytes that suffice for one block. An index grows by less than half a slot per slot, so this ends."""
    least = 0
    while (missing := sum(sizes) - _room(least, sizes)) > 0:
        least += missing
    return least


def _read_direct(folder: OpenFolder, place: Place, number: int, direct: Direct, header: memoryview) -> bool:
    """Read a payload to where it is wanted, if that is possible without waiting for the disk; whether it was."""
    target = direct.begin(number)
    if target is None:
        return False
    if len(header) + len(target) != place.bytes or not folder.files.read_now(place.group, place.slot, header, target):
        direct.withdraw(number)
        return False
    direct.end(number, header)
    return True
