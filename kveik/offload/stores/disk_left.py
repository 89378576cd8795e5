"""The folder of a stopped server, for who looks into it by hand: whether a store is there at all, and its records.

Every refusal names the folder and the cause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kveik.clock import Clock
from kveik.errors import Unreachable
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_check import in_words
from kveik.offload.stores.disk_files import FolderInUse, slots_file
from kveik.offload.stores.disk_formats import LOOKED_AT_BYTES, formats_in
from kveik.offload.stores.disk_owner import INDEX, LOCK, foreign_file, groups_seen, is_ours
from kveik.offload.stores.slots import slot_bytes


def check_left(folder: Path) -> None:
    """Raises Unreachable where no store can be at this path: nothing, a file, what cannot be read, and files of others."""
    try:
        if not folder.is_dir():
            raise Unreachable(f"{folder} is a file, not a folder." if folder.exists() else f"There is no folder {folder}.")
        next(folder.iterdir(), None)
        # Who may list a folder need not be allowed to enter it; then this raises.
        (folder / INDEX).exists()
    except OSError as error:
        raise Unreachable(f"The folder {folder} cannot be read: {in_words(error)}.") from error
    if name := foreign_file(folder):
        raise Unreachable(
            f"The folder {folder} holds files that no kveik server has written ({name}, for one), and no cached blocks; "
            "nothing was changed."
        )


def is_cleared(folder: Path) -> bool:
    """Whether a store was there, and nothing is left of it but its lock."""
    return (folder / LOCK).exists() and not files_left(folder, groups_in(folder))


def groups_in(folder: Path) -> int:
    """Of the store in it, as its index says or, where that cannot be read, its files."""
    try:
        formats = formats_in(folder)
    except Unreachable:
        formats = None
    return groups_seen(folder) if formats is None else len(formats)


def files_left(folder: Path, groups: int) -> list[Path]:
    """A store's, but for its lock; the index first, for without it nothing is found in the others."""
    found = [file for file in folder.iterdir() if is_ours(file, groups) and file.name != LOCK]
    return sorted(found, key=lambda file: file.name != INDEX)


def store_at(folder: Path, clock: Clock, *, read_only: bool = False) -> DiskStore:
    """The store in a folder as an engine left it, with the formats that it wrote: to list or verify it.

    `read_only`: whatever is found there, nothing of it is changed. Raises Unreachable where there is none, where it is damaged,
    of another version, where an engine has it, or where it cannot be read, or not changed though it is to be.
    """
    check_left(folder)
    with unless_in_use(folder):
        formats = formats_in(folder)
        if formats is None:
            raise Unreachable(_why_none(folder))
        gone = [slots_file(group) for group in range(len(formats)) if not (folder / slots_file(group)).exists()]
        if gone:
            # Who opens it to write would make them, and find nothing.
            raise Unreachable(f"The folder {folder} cannot be read: the file {gone[0]} is missing.")
        files = sum(file.stat().st_size for file in files_left(folder, len(formats)) if file.name != INDEX)
        bytes_most = 2 * (files + sum(slot_bytes(one.record_bytes) for one in formats)) + (1 << 30)
        store = DiskStore(folder, formats, bytes_most, clock, read_only=read_only, index_bytes=LOOKED_AT_BYTES)
    if store.useless or (store.trouble and not read_only):
        store.close()
        raise Unreachable(f"The folder {folder} cannot be {'read' if read_only else 'changed'}: {store.trouble}.")
    return store


@contextlib.contextmanager
def unless_in_use(folder: Path) -> Iterator[None]:
    """Who starts a server beside another is told to give it a folder of its own; who looks into one is told what to do here."""
    try:
        yield
    except FolderInUse as error:
        raise Unreachable(
            f"The folder {folder} is in use by another kveik (process {error.process}), which must be stopped first. A server "
            "that runs tells at /cache/stats what it holds, and forgets it on POST /cache/reset."
        ) from error


def _why_none(folder: Path) -> str:
    if not any(folder.iterdir()):
        return f"The folder {folder} is empty; no server has kept cached blocks there."
    if (folder / INDEX).exists() or is_cleared(folder):
        return f"The folder {folder} was made by a server, and holds no cached blocks yet."
    return (
        f"The folder {folder} has no index, so none of the records in it can be found. `kveik cache clear` empties it, and so "
        "does a server that starts there."
    )
