"""Journal of a disk store: the slot of every record, written by one thread, read whole at start.

    head          magic with the layout's number, length and checksum of the description, the description; whole entries
    entry, 64     checksum, put or delete, group, bytes of the record, slot, key
    entry …       the last one that is sound holds

It is written and read as the slots are, never mapped, so that nothing that happens to the file can end the process. Every entry
carries its checksum: one that is half-written or damaged is passed over, and as a record names itself and has a checksum,
an entry that is missing is a miss at worst. A journal that has grown to its bound is written anew, with what holds only, beside
the old one, and takes its place at once. More than its bound is not read: of a longer one, the latest part.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path

from kveik.offload.stores.disk_files import open_plain
from kveik.offload.stores.record import DIGEST_BYTES, RecordKey
from kveik.offload.stores.slots import PAGE_BYTES, Place

LAYOUT = 1
"""Version of the folder's layout; records of another one are dropped."""

LEAST_BYTES = 64 * PAGE_BYTES
BYTES_PER_RECORD = 256
"""Space for four entries: a journal is written anew after three changes per record."""

_PIECE_BYTES = 16_384 * 64
"""Most that is read at once; whole entries."""

_NAME = b"kveik index "
_HEAD = struct.Struct("<16sII")
_ENTRY = struct.Struct(f"<IBxHIQ{DIGEST_BYTES}s12x")
ENTRY_BYTES = _ENTRY.size
_PUT, _DELETE = 1, 2


PENDING_MOST = 65_536
"""Keys that are remembered one by one, some 13 MB. Beyond, everything is pending that the index names and no slot holds."""


class IndexBroken(Exception):
    """The index cannot be used any more. Never leaves the store."""


class AnotherLayout(IndexBroken):
    """It is an index, and another version wrote it."""

    def __init__(self) -> None:
        super().__init__("the folder was written by another version")


def index_bytes(records: int) -> int:
    """The most that an index of so many records takes, in whole pages."""
    return max(LEAST_BYTES, -(-records * BYTES_PER_RECORD // PAGE_BYTES) * PAGE_BYTES)


class PendingDeletions:
    """Deletions that the index has not recorded yet, because it could not be written. They survive until it can."""

    def __init__(self) -> None:
        self.keys: set[RecordKey] = set()
        self.everything = False
        """Everything that the index names and no slot holds."""

        self._records: int | None = 0
        """Upper bound of their number, where it is everything; None: unknown."""

    def __bool__(self) -> bool:
        return self.everything or bool(self.keys)

    @property
    def records(self) -> int | None:
        """Upper bound of their number; None: unknown."""
        return self._records if self.everything else len(self.keys)

    def add(self, keys: Iterable[RecordKey]) -> None:
        """Mark these as deleted."""
        if not self.everything:
            self.keys.update(keys)
            if len(self.keys) > PENDING_MOST:
                self.add_everything(len(self.keys))

    def add_everything(self, records: int | None) -> None:
        """Mark everything as deleted, at most so many records."""
        self.everything, self._records = True, records
        self.keys.clear()

    def covers(self, key: RecordKey) -> bool:
        return self.everything or key in self.keys

    def narrow(self, named: Collection[RecordKey]) -> None:
        """Keep only what the index names: nothing else can come back."""
        if self.everything:
            self._records = len(named)
            self.everything = bool(named)
        else:
            self.keys.intersection_update(named)

    def settle(self) -> None:
        """Forget all: the index has recorded them."""
        self.keys.clear()
        self.everything = False


class DiskIndex:
    """An open index."""

    def __init__(self, file: Path, bytes_most: int, *, read_only: bool = False) -> None:
        """Makes an empty one where there is none. Raises OSError, or IndexBroken where it does not begin as an index.

        `bytes_most`: to be read of its entries.
        """
        self._file = file
        self._fd = open_plain(file, os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT)
        try:
            self._description = self._head()
            self._start = 0 if self._description is None else _whole(_HEAD.size + len(self._description))
            size = os.fstat(self._fd).st_size
            # A file that somebody has only made longer has nothing there; it is not asked of others, lest it be told wrongly.
            self._end = max(_data_end(self._fd, size) if size > self._start + bytes_most else size, self._start)
            # What is not a whole entry is one that was torn, and the next takes its place.
            self._end -= self._end % ENTRY_BYTES
            self._first = max(self._start, self._end - bytes_most // ENTRY_BYTES * ENTRY_BYTES)
            if not read_only and size != self._end:
                os.ftruncate(self._fd, self._end)
        except (OSError, IndexBroken):
            self.close()
            raise

    @property
    def description(self) -> bytes | None:
        """Formats of the slots, as they were written down; None: nothing yet."""
        return self._description

    @property
    def too_long(self) -> bool:
        """True where entries are not read."""
        return self._first > self._start

    def places(self) -> dict[RecordKey, Place]:
        """Records and their places, the oldest first. Raises OSError."""
        found, at = dict[RecordKey, Place](), self._first
        while at < self._end and (piece := _read(self._fd, at, min(self._end - at, _PIECE_BYTES))):
            _take_in(piece, found)
            at += len(piece)
        return found

    def bytes_after(self, changes: int) -> int:
        """Its size with so many changes more."""
        return self._end + changes * ENTRY_BYTES

    def change(self, put: Iterable[tuple[RecordKey, Place]], delete: Iterable[RecordKey]) -> None:
        """All of it is in the file when it returns. Raises OSError or IndexBroken."""
        self._look()
        entries = [_entry(_DELETE, key, Place(key.group, 0, 0)) for key in delete]
        entries += [_entry(_PUT, key, place) for key, place in put]
        try:
            _write(self._fd, b"".join(entries), self._end)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._end += len(entries) * ENTRY_BYTES

    def begin(self, description: bytes, places: Iterable[tuple[RecordKey, Place]] = ()) -> None:
        """Write it anew, with this description and these records only. Raises OSError, and is then unchanged."""
        head = _HEAD.pack(_magic(), len(description), zlib.crc32(description)) + description
        content = head.ljust(_whole(len(head)), b"\0") + b"".join(_entry(_PUT, key, place) for key, place in places)
        new = beside(self._file)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write(fd, content, 0)
            os.fdatasync(fd)
            new.replace(self._file)
        except OSError:
            os.close(fd)
            new.unlink(missing_ok=True)
            raise
        self.close()
        self._fd, self._description = fd, description
        self._start = self._first = _whole(len(head))
        self._end = len(content)

    def sync(self) -> None:
        """To the disk. Raises OSError."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _head(self) -> bytes | None:
        head = os.pread(self._fd, _HEAD.size, 0)
        if not head:
            return None
        if not head.startswith(_magic()):
            raise AnotherLayout if head.startswith(_NAME) else IndexBroken("the index is damaged")
        description = b""
        if len(head) == _HEAD.size:
            _, length, checksum = _HEAD.unpack(head)
            description = os.pread(self._fd, min(length, LEAST_BYTES), _HEAD.size)
        if not description or zlib.crc32(description) != checksum:
            raise IndexBroken("the index's description is damaged")
        return description

    def _look(self) -> None:
        """Raises IndexBroken where the next start would not find new entries in this file, behind the old ones."""
        try:
            found = self._file.stat()
        except OSError as error:
            raise IndexBroken("the index was removed") from error
        if not os.path.samestat(found, os.fstat(self._fd)):
            raise IndexBroken("the index was replaced")
        if found.st_size < self._end:
            raise IndexBroken("the index was cut short")


def beside(file: Path) -> Path:
    """Path at which an index is written anew."""
    return file.with_name(f"{file.name}.new")


def _magic() -> bytes:
    return (_NAME + b"%d\n" % LAYOUT).ljust(16, b"\0")


def _whole(size: int) -> int:
    """A size in whole entries."""
    return -(-size // ENTRY_BYTES) * ENTRY_BYTES


def _entry(kind: int, key: RecordKey, place: Place) -> bytes:
    entry = _ENTRY.pack(0, kind, key.group, place.bytes, place.slot, key.block)
    return zlib.crc32(entry[4:]).to_bytes(4, "little") + entry[4:]


def _take_in(content: bytes, found: dict[RecordKey, Place]) -> None:
    """Apply these entries to the places found before them."""
    whole = memoryview(content)[: len(content) // ENTRY_BYTES * ENTRY_BYTES]
    for number, (checksum, kind, group, size, slot, block) in enumerate(_ENTRY.iter_unpack(whole)):
        if checksum != zlib.crc32(whole[number * ENTRY_BYTES + 4 : (number + 1) * ENTRY_BYTES]):
            continue
        key = RecordKey(group, block)
        found.pop(key, None)
        if kind == _PUT:
            found[key] = Place(group, slot, size)


def _data_end(fd: int, size: int) -> int:
    """Where a file's last data ends; its size, where the file system cannot say."""
    end = 0
    try:
        while end < size:
            end = os.lseek(fd, os.lseek(fd, end, os.SEEK_DATA), os.SEEK_HOLE)
    except OSError as error:
        return end if error.errno == errno.ENXIO else size
    return end


def _read(fd: int, start: int, size: int) -> bytes:
    """Fewer bytes where the file ends."""
    pieces, done = list[bytes](), 0
    while done < size and (piece := os.pread(fd, size - done, start + done)):
        pieces.append(piece)
        done += len(piece)
    return b"".join(pieces)


def _write(fd: int, content: bytes, start: int) -> None:
    """All of it, or OSError."""
    rest = memoryview(content)
    while rest:
        count = os.pwrite(fd, rest, start)
        rest, start = rest[count:], start + count
