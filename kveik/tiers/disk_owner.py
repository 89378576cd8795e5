"""Whose a folder is: what was not written by a disk store is not touched by one."""

from __future__ import annotations

import re
from pathlib import Path

from kveik.errors import Unreachable
from kveik.tiers.disk_index import is_index

INDEX, LOCK = "index", "lock"
_OURS = re.compile(r"lock|index|index\.new|index\.damaged|records-[0-9]+")
_PROCESS = re.compile(rb"[0-9]+\n")
_MADE_BY_SYSTEMS = {"lost+found"}


def check_owner(folder: Path) -> None:
    """Raises Unreachable where the folder is somebody else's."""
    if name := foreign_file(folder):
        raise Unreachable(
            f"The folder {folder} holds files that no kveik server has written ({name}, for one), so none will use it; "
            "--kv-disk wants a new or empty folder, or one that it has used before."
        )


def foreign_file(folder: Path) -> str | None:
    """The name of a file in a folder that holds files and no store; None: it is empty, ours, or cannot be read.

    Ours is what has our index, or a lock with a process id; and what has nothing but empty files of our names, because a store
    on a full disk may have come no further.
    """
    try:
        names = sorted({file.name for file in folder.iterdir()} - _MADE_BY_SYSTEMS)
        if is_index(folder / INDEX) or _PROCESS.fullmatch(_beginning(folder / LOCK)):
            return None
        foreign = [name for name in names if not _OURS.fullmatch(name) or _beginning(folder / name)]
    except OSError:
        return None
    return foreign[0] if foreign else None


def is_ours(file: Path) -> bool:
    """Whether a file in a store's folder has a name that stores give, of whatever version."""
    return _OURS.fullmatch(file.name) is not None and not file.is_dir()


def _beginning(file: Path) -> bytes:
    if not file.exists():
        return b""
    with file.open("rb") as opened:
        return opened.read(32)
