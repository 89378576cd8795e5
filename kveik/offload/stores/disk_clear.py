"""Empties a folder of what disk stores have left there, of any version and in whatever state, and of nothing else."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from kveik.clock import Clock
from kveik.errors import Unreachable
from kveik.offload.stores.disk_check import in_words
from kveik.offload.stores.disk_files import FolderLock
from kveik.offload.stores.disk_left import check_left, files_left, groups_in, store_at, unless_in_use
from kveik.offload.stores.disk_owner import LOCK, check_link, is_ours


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a folder was emptied of."""

    records: int | None
    """None: only a version that can read the index could say."""

    bytes: int
    """That the file system has back."""

    others: tuple[str, ...] = ()
    """Files of somebody else, which stay, and links to what a store cannot have written."""


def clear_folder(folder: Path, clock: Clock) -> Cleared:
    """Nothing is left of a store but its lock; where a link stands for one of its files, nothing of either.

    Raises Unreachable where there is no such folder, where it is in use or somebody else's, or where its files cannot be
    removed.
    """
    check_left(folder)
    check_link(folder / LOCK)
    groups = groups_in(folder)
    if not (files := files_left(folder, groups)):
        return Cleared(0, 0, _others(folder, groups))
    records = _records(folder, clock)
    try:
        with unless_in_use(folder), contextlib.closing(FolderLock(folder / LOCK)):
            taken = sum(file.stat().st_blocks * 512 for file in files)
            for file in files:
                _remove(file)
    except OSError as error:
        raise Unreachable(f"The folder {folder} cannot be cleared: {in_words(error)}.") from error
    return Cleared(records, taken, _others(folder, groups))


def _remove(file: Path) -> None:
    if file.is_symlink():
        # Without the link nobody would know that keys and values lie where it leads.
        os.truncate(file, 0)
    file.unlink(missing_ok=True)


def _others(folder: Path, groups: int) -> tuple[str, ...]:
    return tuple(sorted(file.name for file in folder.iterdir() if file.name != LOCK and not is_ours(file, groups)))


def _records(folder: Path, clock: Clock) -> int | None:
    try:
        with contextlib.closing(store_at(folder, clock, read_only=True)) as store:
            return store.records
    except Unreachable:
        # Whoever has the folder keeps us from the lock as well; what cannot be read need not be.
        return None
