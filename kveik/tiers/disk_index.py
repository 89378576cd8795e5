"""Which record lies in which slot of the files beside it: a small LMDB store, written by one thread, read whole at start.

    "description"            → what the slots mean: another description, and nothing here can be used
    group (2 bytes), key     → slot (8 bytes), bytes of the record (4 bytes)

LMDB copies pages before it changes them, and a transaction shows all at once, so a process that dies at any moment leaves an
index that opens. LMDB maps its file and trusts what is in it; a page that points astray, or that is no longer in the file,
would end the process. So an index is checked page by page before it is opened (in a second for half a million records), and the
file's length before every transaction. The records themselves are never mapped.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import lmdb
from lmdb.verify import verify

from kveik.tiers.record import DIGEST_BYTES, RecordKey
from kveik.tiers.slots import PAGE_BYTES, Place

LEAST_BYTES = 64 * PAGE_BYTES
BYTES_PER_RECORD = 256
"""Room for an entry of 56 bytes, in pages half empty, with the pages that a transaction copies."""

_DESCRIPTION = b"description"
_KEY = struct.Struct(f">H{DIGEST_BYTES}s")
_PLACE = struct.Struct("<QI")


class IndexBroken(Exception):
    """The index cannot be used any more. Never leaves the store."""


def index_bytes(records: int) -> int:
    """The most that an index of so many records takes, in whole pages."""
    return max(LEAST_BYTES, -(-records * BYTES_PER_RECORD // PAGE_BYTES) * PAGE_BYTES)


def check_index(file: Path) -> None:
    """Read every page, without LMDB. Raises IndexBroken where LMDB would trust what is wrong, and might end the process."""
    try:
        problems = verify(str(file), subdir=False)  # type: ignore[no-untyped-call]  # lmdb has types for its other modules only
    except Exception as error:
        # Made for files from anywhere; should it stumble over one all the same, that file is not sound.
        raise IndexBroken(f"the index cannot be read ({type(error).__name__})") from error
    if problems:
        raise IndexBroken(f"the index is damaged: {problems[0]}")


class DiskIndex:
    """An open index."""

    def __init__(self, file: Path, bytes_most: int, *, read_only: bool = False) -> None:
        """Raises lmdb.Error or OSError where the file cannot be opened or made."""
        self._file = file
        # The folder's lock keeps others out, and one thread writes: LMDB need not lock anything.
        self._env = lmdb.open(
            str(file), map_size=bytes_most, subdir=False, lock=False, readonly=read_only, create=not read_only, mode=0o644
        )
        self._page_bytes = self._env.stat()["psize"]
        self._inode = file.stat().st_ino
        self._length = self._mapped_bytes
        try:
            self._look()
        except IndexBroken:
            self._env.close()
            raise

    def description(self) -> bytes | None:
        """What the slots mean, as it was written down; None: nothing yet."""
        self._look()
        with self._env.begin() as transaction:
            return transaction.get(_DESCRIPTION)

    def places(self) -> Iterator[tuple[RecordKey, Place]]:
        """All entries that have the right sizes."""
        self._look()
        with self._env.begin() as transaction:
            for key, value in transaction.cursor():
                if len(key) == _KEY.size and len(value) == _PLACE.size:
                    group, block = _KEY.unpack(key)
                    yield RecordKey(group, block), Place(group, *_PLACE.unpack(value))

    def change(self, put: Iterable[tuple[RecordKey, Place]], delete: Iterable[RecordKey]) -> None:
        """All of this or nothing, on the disk when it returns. Raises lmdb.Error or IndexBroken."""
        self._look()
        with self._env.begin(write=True) as transaction:
            for key in delete:
                transaction.delete(_KEY.pack(*key))
            for key, place in put:
                transaction.put(_KEY.pack(*key), _PLACE.pack(place.slot, place.bytes))
        self._lengthen()

    def begin(self, description: bytes) -> None:
        """Empty, and of this description."""
        self._look()
        with self._env.begin(write=True) as transaction:
            transaction.drop(self._env.open_db(txn=transaction), delete=False)
            transaction.put(_DESCRIPTION, description)
        self._lengthen()

    def close(self) -> None:
        self._env.close()

    def _look(self) -> None:
        """The mapping must not reach beyond the file, and the file must be the one that was opened."""
        try:
            found = self._file.stat()
        except OSError as error:
            raise IndexBroken("the index was removed") from error
        if found.st_ino != self._inode:
            raise IndexBroken("the index was replaced")
        if found.st_size < self._length:
            raise IndexBroken("the index was cut short")

    def _lengthen(self) -> None:
        """LMDB does not write pages that it has taken and given back: the file gets the length that it may be mapped to."""
        self._length = self._mapped_bytes
        if self._file.stat().st_size < self._length:
            os.truncate(self._file, self._length)

    @property
    def _mapped_bytes(self) -> int:
        # Asked from the mapping itself, so only right after it was used.
        return int(self._env.info()["last_pgno"] + 1) * self._page_bytes
