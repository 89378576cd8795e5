"""Whether a folder can serve as it was named, asked before a model is loaded for it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kveik.errors import BadValue, Unreachable
from kveik.offload.stores.disk_files import FolderLock, slots_file
from kveik.offload.stores.disk_owner import INDEX, LOCK, check_owner

DISK_FULL = "the disk is full"
FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
TROUBLE = (*FULL, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.ENFILE, errno.EMFILE)
"""What may be wrong with a folder today and right tomorrow; all else is for whoever named it to put right."""


def check_folder(folder: Path, *, only_look: bool = False) -> None:
    """Raises BadValue where a folder can never serve as it was named, Unreachable where another engine has it.

    A disk that is full or fails is no such reason, nor that records which are there can only be read. `only_look`: nothing is
    made or locked, so that what another engine has passes.
    """
    check_owner(folder)
    try:
        if _could_be_written(folder) if only_look else can_be_written(folder):
            _check_files(folder)
        elif not os.access(folder / INDEX, os.R_OK):
            raise PermissionError(errno.EACCES, "there is no right to write there, and nothing to read")
        if not only_look:
            FolderLock(folder / LOCK, read_only=True).close()
    except Unreachable as error:
        raise Unreachable(f"--kv-disk {folder}: {error.message}") from error
    except OSError as error:
        if error.errno not in TROUBLE:
            raise BadValue(f"--kv-disk {folder} {_why_not(folder, error)}.", param="kv_disk") from error


def _why_not(folder: Path, error: OSError) -> str:
    if os.path.isfile(folder):  # noqa: PTH113  # pathlib's raises where the folder around it cannot be entered
        return "is a file, not a folder"
    return f"cannot be {'used' if os.path.isdir(folder) else 'made'}: {in_words(error)}"  # noqa: PTH112  # for the same reason


def _check_files(folder: Path) -> None:
    for file in (folder / INDEX, folder / LOCK, *folder.glob(slots_file(0).replace("0", "*"))):
        if file.exists() and not os.access(file, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, f"there is no right to read and write the file {file.name} in it")


def in_words(error: OSError) -> str:
    """What went wrong, without the path."""
    if error.errno in FULL:
        return DISK_FULL
    return error.strerror or type(error).__name__


def can_be_written(folder: Path) -> bool:
    """Whether files can be made there; makes the folder. Raises OSError where it is no folder that can be had."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in READ_ONLY and folder.is_dir():
            return False
        raise
    return os.access(folder, os.W_OK | os.X_OK)


def _could_be_written(folder: Path) -> bool:
    """The same, as far as it can be seen without making it."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists() or one.is_symlink())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return os.access(there, os.W_OK | os.X_OK)
