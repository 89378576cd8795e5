"""Whose a folder is: what was not written by a disk store is not touched by one."""

from __future__ import annotations

import errno
import itertools
import os
import re
from pathlib import Path

from kveik.errors import Unreachable
from kveik.offload.stores.disk_files import beginning, is_lock, odd_kind, open_plain, slots_file
from kveik.offload.stores.disk_index import is_former, is_index
from kveik.offload.stores.record import MAGIC

INDEX, LOCK = "index", "lock"
_OURS = re.compile(r"lock|index|index\.new|index\.damaged|records-[0-9]+")
_FORMER_LOCK = re.compile(rb"[0-9]+\n")
"""As it was before it was signed; anybody's may look so."""

_MADE_BY_SYSTEMS = {"lost+found"}


def check_owner(folder: Path, groups: int = 1) -> None:
    """Raises Unreachable where the folder is somebody else's, or where no plain file stands in a file's place.

    `groups`: of which there are slots.
    """
    if name := foreign_file(folder):
        raise Unreachable(
            f"The folder {folder} holds files that no kveik server has written ({name}, for one), so none will use it; "
            "--kv-disk wants a new or empty folder, or one that it has used before."
        )
    for name in (INDEX, f"{INDEX}.new", f"{INDEX}.damaged", LOCK, *(slots_file(group) for group in range(groups))):
        file = folder / name
        if kind := _odd_kind(file):
            raise Unreachable(
                f"{file.name} in the folder {folder} is {kind}, where a kveik server has a plain file; move it away."
            )
        if file.name not in (INDEX, f"{INDEX}.new", f"{INDEX}.damaged"):
            check_link(file)


def check_link(file: Path) -> None:
    """Raises Unreachable where a store's file is a link to somebody else's, which would be written over."""
    try:
        foreign = file.is_symlink() and file.is_file() and not _holds_ours(file)
    except OSError:
        # Where the folder cannot be entered, nothing is written either.
        return
    if foreign:
        raise Unreachable(
            f"{file.name} in the folder {file.parent} is a link to a file that no kveik server has written; move it away."
        )


def foreign_file(folder: Path) -> str | None:
    """The name of a file in a folder that holds files and no store; None: it is empty, ours, or cannot be read.

    Ours is what has one file that only a store writes: an index, a signed lock, or slots that begin with a record; and what has
    nothing but empty files of our names, because a store on a full disk may have come no further.
    """
    files = _files(folder)
    try:
        named = {file for file in files if _OURS.fullmatch(file.name) and _odd_kind(file) is None}
        if any(_is_proof(file) for file in named):
            return None
        foreign = [file.name for file in files if file not in named or not _is_nothing(file)]
    except OSError:
        return None
    return foreign[0] if foreign else None


def is_ours(file: Path, groups: int) -> bool:
    """Whether a file in a store's folder is the store's, which has so many groups, or was one's of whatever version.

    In a store's folder its names are proof enough, but not behind a link, which may lead anywhere; and a number that it has no
    group for may be anybody's: there, only a plain file that has records, or nothing.
    """
    if not _OURS.fullmatch(file.name) or file.is_dir():
        return False
    if file.name.startswith("records-") and file.name not in map(slots_file, range(groups)):
        return not file.is_symlink() and _holds_ours(file)
    return not file.is_symlink() or _holds_ours(file)


def groups_seen(folder: Path) -> int:
    """Of which there are slots, where no index can say of how many; one at least."""
    return next(group for group in itertools.count() if not _holds_ours(folder / slots_file(group))) or 1


def _holds_ours(file: Path) -> bool:
    """Whether it is a plain file, or a link to one, with nothing in it that a store has not written."""
    try:
        return file.is_file() and (_is_proof(file) or _is_nothing(file))
    except OSError:
        return False


def _files(folder: Path) -> list[Path]:
    """None where the folder cannot be read."""
    try:
        return sorted(file for file in folder.iterdir() if file.name not in _MADE_BY_SYSTEMS)
    except OSError:
        return []


def _odd_kind(file: Path) -> str | None:
    try:
        return odd_kind(file)
    except OSError as error:
        # Where the folder cannot be entered, nothing is known of it.
        return "a link that leads in circles" if error.errno == errno.ELOOP and file.is_symlink() else None


def _is_proof(file: Path) -> bool:
    """Whether only a store writes a file like this. Raises OSError."""
    if file.name == LOCK:
        return is_lock(beginning(file, 32))
    if file.name.startswith("records-"):
        return _first_data(file, len(MAGIC)) == MAGIC
    if is_index(file):
        return True
    lock = beginning(file.with_name(LOCK), 32)
    return file.name == INDEX and is_former(file) and (is_lock(lock) or _FORMER_LOCK.fullmatch(lock) is not None)


def _is_nothing(file: Path) -> bool:
    """Whether a file of our names has nothing that could be lost. Raises OSError."""
    if file.name == LOCK and _FORMER_LOCK.fullmatch(beginning(file, 32)):
        return True
    return not (_first_data(file, 1) if file.name.startswith("records-") else beginning(file, 1))


def _first_data(file: Path, size: int) -> bytes:
    """Bytes behind the holes at a file's beginning, which are whole slots. Raises OSError."""
    fd = open_plain(file, os.O_RDONLY)
    try:
        try:
            start = os.lseek(fd, 0, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return b""
            # The file system cannot say.
            start = 0
        return os.pread(fd, size, start)
    finally:
        os.close(fd)
