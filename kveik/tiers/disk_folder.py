"""A disk store's folder while it is open: lock, index, files, and the books made from them.

lock             held by the engine, with its process id
index            which record lies in which slot
index.new        one that is being written anew
index.damaged    the last index that could not be read
records-N        slots of layer group N
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import json
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from kveik.errors import BadValue, Unreachable
from kveik.tiers.disk_files import FolderLock, SlotFiles, slots_file
from kveik.tiers.disk_index import ENTRY_BYTES, AnotherLayout, DiskIndex, IndexBroken, beside
from kveik.tiers.disk_owner import check_owner, foreign_file, is_ours
from kveik.tiers.record import DIGEST_BYTES, Encoding, RecordFormat, RecordKey
from kveik.tiers.slots import Place, Slots

log = logging.getLogger(__name__)

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.ENFILE, errno.EMFILE)
"""What may be wrong with a folder today and right tomorrow; all else is for whoever named it to put right."""

_INDEX, _DAMAGED, _LOCK = "index", "index.damaged", "lock"


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """What a folder is to hold."""

    folder: Path
    sizes: tuple[int, ...]
    """Bytes of a slot, per group."""

    slots_bytes: int
    """The bound on all slots together."""

    index_bytes: int
    """The bound on the index."""

    description: bytes
    """What the records are of. A folder with another description is emptied: its bound is for one model at a time."""

    read_only: bool = False
    """Whether nothing there may change, though it could."""

    @property
    def damaged_bytes(self) -> int:
        """The bound on a damaged index that is kept; as much is left for one that is being written anew."""
        return self.index_bytes // 2

    def bytes_on_disk(self) -> int:
        """What all files really take, with what the file system needs to find their pieces."""
        names = (_INDEX, beside(Path(_INDEX)).name, _DAMAGED, _LOCK, *(slots_file(group) for group in range(len(self.sizes))))
        return sum(_blocks_bytes(self.folder / name) for name in names)


class OpenFolder:
    """Everything that is opened and closed together."""

    def __init__(self, plan: FolderPlan) -> None:
        """Read-only where the folder cannot be written. Raises Unreachable where another engine has it, OSError or
        IndexBroken where it cannot be used at all.
        """
        with contextlib.ExitStack() as opened:
            self.writable = not plan.read_only and _can_be_written(plan.folder)
            if self.writable and foreign_file(plan.folder):
                raise IndexBroken("the folder holds files of others")
            self._lock = FolderLock(plan.folder / _LOCK, read_only=not self.writable)
            opened.callback(self._lock.close)
            self.index = self._readable_index(plan)
            opened.callback(self.index.close)
            self.files = SlotFiles(plan.folder, plan.sizes, read_only=not self.writable)
            opened.callback(self.files.close)
            self.slots = Slots(plan.sizes, plan.slots_bytes, self._make_hole)
            self._restore(plan)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def clear(self, plan: FolderPlan) -> None:
        """Forget all records. Raises what the index raises."""
        self.slots.clear()
        self.index.begin(plan.description)

    def give_back(self, plan: FolderPlan) -> None:
        """Take no more than the records need. Raises what the index raises."""
        self.slots.give_back()
        self.index.begin(plan.description, self.slots.places())

    def tell(self, plan: FolderPlan, put: Sequence[tuple[RecordKey, Place]], delete: Collection[RecordKey]) -> None:
        """Bring the index up to date, before the books show what is `put`. Raises what the index raises."""
        if self.index.bytes_after(len(put) + len(delete)) > plan.index_bytes:
            # The books have no more of what was deleted.
            self.index.begin(plan.description, self.slots.places())
            delete = ()
        self.index.change(put, delete)

    def sync(self) -> None:
        """To the disk. Raises OSError."""
        self.files.sync()
        self.index.sync()

    def _make_hole(self, group: int, first: int, count: int) -> bool:
        return self.writable and self.files.make_hole(group, first, count)

    def _readable_index(self, plan: FolderPlan) -> DiskIndex:
        file = plan.folder / _INDEX
        if not self.writable:
            return DiskIndex(file, read_only=True)
        _tidy(plan)
        try:
            return DiskIndex(file)
        except AnotherLayout:
            log.warning("%s holds records that another version has written; they are dropped.", plan.folder)
            file.unlink()
        except IndexBroken as error:
            # A file of any size may have been put there; larger than the room for it, it is of no use to anybody.
            keep = _blocks_bytes(file) <= plan.damaged_bytes
            kept = f"kept as {_DAMAGED}" if keep else "too large to keep within the bound, so removed"
            log.warning("The index of %s is damaged, %s; its records are dropped (%s).", plan.folder, kept, error)
            if keep:
                file.replace(plan.folder / _DAMAGED)
            else:
                file.unlink()
        return DiskIndex(file)

    def _restore(self, plan: FolderPlan) -> None:
        """Books from the index; what they do not name is given back to the file system."""
        if self.index.description != plan.description:
            if not self.writable:
                raise IndexBroken("the folder can only be read, and holds records of another model")
            if self.index.description is not None:
                log.warning("%s holds records of another model or setting; they are dropped.", plan.folder)
            self.index.begin(plan.description)
        useless = [key for key, place in self._places() if not self.slots.restore(key, place)]
        if self.writable:
            if useless or 2 * len(self.slots) * ENTRY_BYTES < self.index.bytes_after(0):
                # On a full disk it stays as it is: what it names besides are misses.
                with contextlib.suppress(OSError):
                    self.index.begin(plan.description, self.slots.places())
            for group in range(len(plan.sizes)):
                self.files.cut(group, self.slots.end(group))
        self.slots.restored()

    def _places(self) -> list[tuple[RecordKey, Place]]:
        """What the index says, as far as it can be so: slots that exist, each named once, by the latest record."""
        found: dict[tuple[int, int], tuple[RecordKey, Place]] = {}
        for key, place in self.index.places().items():
            if self.slots.fits(place.group, place.bytes) and place.slot < self.files.slots(place.group):
                found[place.group, place.slot] = (key, place)
        return list(found.values())


def described(formats: Sequence[RecordFormat]) -> bytes:
    """What the slots of a folder hold, as the index has it; equal only for equal formats."""
    groups = [
        {"fingerprint": one.fingerprint.hex(), "tokens": one.tokens, "encoding": one.encoding, "bytes": one.payload_bytes}
        for one in formats
    ]
    return json.dumps({"groups": groups}).encode()


def _formats(description: bytes) -> list[RecordFormat]:
    """Raises ValueError where no store has written this."""
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


def formats_in(folder: Path) -> list[RecordFormat] | None:
    """The formats that a folder was written with, per group; None: it holds nothing. Raises Unreachable if it is damaged."""
    file = folder / _INDEX
    if not file.exists():
        return None
    lock = FolderLock(folder / _LOCK, read_only=True)
    try:
        with contextlib.closing(DiskIndex(file, read_only=True)) as index:
            description = index.description
        return None if description is None else _formats(description)
    except AnotherLayout as error:
        raise Unreachable(
            f"The folder {folder} was written by another version of kveik, and only that one can list or verify it. "
            "`kveik cache clear` empties it, and so does a server of this version that starts there."
        ) from error
    except OSError as error:
        raise Unreachable(f"The index of {folder} cannot be read: {in_words(error)}.") from error
    except (IndexBroken, ValueError) as error:
        raise Unreachable(
            f"The index of {folder} is damaged, so none of its records can be found. `kveik cache clear` empties the folder; a "
            f"server that starts there keeps the index as {_DAMAGED} and begins anew."
        ) from error
    finally:
        lock.close()


def check_folder(folder: Path, *, only_look: bool = False) -> None:
    """Raises BadValue where a folder can never serve as it was named, Unreachable where another engine has it.

    A disk that is full or fails is no such reason, nor that records which are there can only be read. `only_look`: nothing is
    made or locked, so that what another engine has passes.
    """
    check_owner(folder)
    try:
        if _could_be_written(folder) if only_look else _can_be_written(folder):
            _check_files(folder)
        elif not os.access(folder / _INDEX, os.R_OK):
            raise PermissionError(errno.EACCES, "there is no right to write there, and nothing to read")
        if not only_look:
            FolderLock(folder / _LOCK, read_only=True).close()
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
    for file in (folder / _INDEX, folder / _LOCK, *folder.glob(slots_file(0).replace("0", "*"))):
        if file.exists() and not os.access(file, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, f"there is no right to read and write the file {file.name} in it")


def in_words(error: OSError) -> str:
    """What went wrong, without the path."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    return error.strerror or type(error).__name__


def _tidy(plan: FolderPlan) -> None:
    """Remove what is left of before: an index half written, one kept under a larger bound, slots of groups now gone."""
    beside(plan.folder / _INDEX).unlink(missing_ok=True)
    if _blocks_bytes(plan.folder / _DAMAGED) > plan.damaged_bytes:
        (plan.folder / _DAMAGED).unlink()
    ours = {slots_file(group) for group in range(len(plan.sizes))}
    for file in plan.folder.glob("records-*"):
        if file.name not in ours and is_ours(file):
            file.unlink()


def _can_be_written(folder: Path) -> bool:
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


def _blocks_bytes(file: Path) -> int:
    """What a file takes on the disk, 0 where it is not there."""
    try:
        return file.stat().st_blocks * 512
    except OSError:
        return 0
