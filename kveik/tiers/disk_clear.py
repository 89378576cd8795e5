"""Empties a folder of what disk stores have left there, of any version and in whatever state, and of nothing else."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from kveik.clock import Clock
from kveik.errors import Unreachable
from kveik.tiers.disk import store_at
from kveik.tiers.disk_files import FolderLock
from kveik.tiers.disk_folder import in_words
from kveik.tiers.disk_owner import INDEX, LOCK, foreign_file, is_ours


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a folder was emptied of."""

    records: int | None
    """None: only a version that can read the index could say."""

    bytes: int
    """That the file system has back."""

    others: tuple[str, ...] = ()
    """Files of somebody else, which stay."""


def clear_folder(folder: Path, clock: Clock) -> Cleared:
    """Nothing is left of a store but its lock. Raises Unreachable where there is no such folder, where it is in use or somebody
    else's, or where its files cannot be removed.
    """
    if not folder.is_dir():
        raise Unreachable(f"There is no folder {folder}.")
    if name := foreign_file(folder):
        raise Unreachable(
            f"The folder {folder} holds files that no kveik server has written ({name}, for one), and no cached blocks; "
            "nothing was removed."
        )
    if not (files := _files(folder)):
        return Cleared(0, 0, _others(folder))
    records = _records(folder, clock)
    try:
        with contextlib.closing(FolderLock(folder / LOCK)):
            taken = sum(file.stat().st_blocks * 512 for file in files)
            for file in files:
                file.unlink(missing_ok=True)
    except OSError as error:
        raise Unreachable(f"The folder {folder} cannot be cleared: {in_words(error)}.") from error
    return Cleared(records, taken, _others(folder))


def is_cleared(folder: Path) -> bool:
    """Whether a store was there, and nothing is left of it but its lock."""
    return (folder / LOCK).exists() and foreign_file(folder) is None and not _files(folder)


def _files(folder: Path) -> list[Path]:
    """A store's, but for its lock; the index first, for without it nothing is found in the others."""
    try:
        found = [file for file in folder.iterdir() if is_ours(file) and file.name != LOCK]
    except OSError as error:
        raise Unreachable(f"The folder {folder} cannot be read: {in_words(error)}.") from error
    return sorted(found, key=lambda file: file.name != INDEX)


def _others(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(file.name for file in folder.iterdir() if not is_ours(file)))


def _records(folder: Path, clock: Clock) -> int | None:
    try:
        with contextlib.closing(store_at(folder, clock, read_only=True)) as store:
            return store.records
    except Unreachable:
        # Whoever has the folder keeps us from the lock as well; what cannot be read need not be.
        return None
