"""Listing, verifying and clearing the folder of a stopped server. Every refusal names the folder and the cause."""

from __future__ import annotations

import binascii
import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kveik.clock import Clock
from kveik.errors import Unreachable
from kveik.observe.events import TierState
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_files import INDEX, LOCK, FolderInUse, FolderLock, allocated_bytes, in_words, slots_file
from kveik.offload.stores.disk_folder import check_kind, described
from kveik.offload.stores.disk_index import AnotherLayout, DiskIndex, IndexBroken
from kveik.offload.stores.record import DIGEST_BYTES, Encoding, RecordFormat
from kveik.offload.stores.slots import slot_bytes

INDEX_BYTES_MOST = 1 << 30
"""Bytes read of an index whose bound is not known: sixteen million changes."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """Records and bytes that a folder was cleared of."""

    records: int | None
    """None: the index could not be read, so they could not be counted."""

    bytes: int
    """Bytes that the file system has back."""


def is_empty(folder: Path) -> bool:
    """True for a store's folder that holds nothing but its lock. Raises Unreachable where there is no such folder."""
    return not _files(folder)


def store_at(folder: Path, clock: Clock, *, read_only: bool = False) -> DiskStore:
    """The store in a folder as an engine left it, with the formats that it wrote: to list or verify it.

    `read_only`: nothing in the folder is changed. Raises Unreachable where there is no store, where it is damaged or of
    another version, where an engine has it, or where it cannot be read, or not changed although it should be.
    """
    files = _files(folder)
    with _unless_in_use(folder):
        formats = _formats_in(folder)
        for group in range(len(formats)):
            if not (folder / slots_file(group)).exists():
                # A store that opens it to write would make the file, and find nothing in it.
                raise Unreachable(f"The folder {folder} cannot be read: the file {slots_file(group)} is missing.")
        size = sum(file.stat().st_size for file in files if file.name != INDEX and file.is_file())
        bytes_most = 2 * (size + sum(slot_bytes(one.record_bytes) for one in formats)) + (1 << 30)
        store = DiskStore(folder, formats, bytes_most, clock, read_only=read_only, index_bytes=INDEX_BYTES_MOST)
    state, reason = store.availability
    if state is TierState.UNAVAILABLE or (reason and not read_only):
        store.close()
        raise Unreachable(f"The folder {folder} cannot be {'read' if read_only else 'changed'}: {reason}.")
    return store


def clear_folder(folder: Path, clock: Clock) -> Cleared:
    """Remove everything from a store's folder but its lock, in whatever state it is.

    Raises Unreachable where there is no such folder, where it is in use, or where its files cannot be removed.
    """
    files = _files(folder)
    if not files:
        return Cleared(0, 0)
    records = _records(folder, clock)
    try:
        with _unless_in_use(folder), contextlib.closing(FolderLock(folder / LOCK)):
            size = sum(allocated_bytes(file) for file in files)
            for file in files:
                shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink(missing_ok=True)
    except OSError as error:
        raise Unreachable(f"The folder {folder} cannot be cleared: {in_words(error)}.") from error
    return Cleared(records, size)


def _files(folder: Path) -> list[Path]:
    """Files of a store but its lock; the index first, because nothing is found without it."""
    try:
        check_kind(folder)
        if not folder.is_dir():
            raise Unreachable(f"There is no folder {folder}: no server has kept cached blocks there.")
        # A folder that can be listed but not entered raises here.
        (folder / INDEX).exists()
        return sorted((file for file in folder.iterdir() if file.name != LOCK), key=lambda file: file.name != INDEX)
    except OSError as error:
        raise Unreachable(f"The folder {folder} cannot be read: {in_words(error)}.") from error


def _records(folder: Path, clock: Clock) -> int | None:
    try:
        with contextlib.closing(store_at(folder, clock, read_only=True)) as store:
            return store.records
    except Unreachable:
        # An engine that has the folder keeps the lock too; a folder that cannot be read can be cleared all the same.
        return None


@contextlib.contextmanager
def _unless_in_use(folder: Path) -> Iterator[None]:
    try:
        yield
    except FolderInUse as error:
        raise Unreachable(
            f"The folder {folder} is in use by another kveik (process {error.process}), which must be stopped first. A running "
            "server lists its contents at /cache/stats, and forgets them on POST /cache/reset."
        ) from error


def _formats_in(folder: Path) -> list[RecordFormat]:
    """The formats that a folder was written with, per group. Raises Unreachable, or FolderInUse."""
    file = folder / INDEX
    if not file.is_symlink() and not file.exists():
        raise Unreachable(
            f"The folder {folder} has no index, so none of its records can be found. `kveik cache clear` empties it, and so "
            "does a server that starts there."
        )
    try:
        with (
            contextlib.closing(FolderLock(folder / LOCK, read_only=True)),
            contextlib.closing(DiskIndex(file, INDEX_BYTES_MOST, read_only=True)) as index,
        ):
            if index.too_long:
                raise IndexBroken("the index is longer than one can be")
            if index.description is None:
                raise Unreachable(f"The folder {folder} was made by a server, and holds no cached blocks yet.")
            return _formats(index.description)
    except AnotherLayout as error:
        raise Unreachable(
            f"The folder {folder} was written by another version of kveik, and only that one can list or verify it. "
            "`kveik cache clear` empties it, and so does a server of this version that starts there."
        ) from error
    except OSError as error:
        raise Unreachable(f"The folder {folder} cannot be read: {in_words(error)}.") from error
    except (IndexBroken, ValueError) as error:
        raise Unreachable(
            f"The index of {folder} is damaged, so none of its records can be found. `kveik cache clear` empties the folder; a "
            "server that starts there keeps the index as index.damaged and begins anew."
        ) from error


def _formats(description: bytes) -> list[RecordFormat]:
    """Formats of an index's description. Raises ValueError where no store has written it."""
    try:
        groups = json.loads(description)["groups"]
        formats = [_format(number, **one) for number, one in enumerate(groups)]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a description") from error
    if not formats or described(formats) != description:
        raise ValueError("not as it is written")
    return formats


def _format(number: int, *, fingerprint: str, tokens: int, encoding: int, bytes: int) -> RecordFormat:
    digest = binascii.unhexlify(fingerprint)
    if len(digest) != DIGEST_BYTES or not 0 < bytes < 1 << 32:
        raise ValueError("not a format")
    return RecordFormat(digest, number, tokens, Encoding(encoding), bytes)
