"""Folder of a disk store: its plan, the check before a model is loaded, and everything that is open in it.

kveik-kv/            a folder in the one that --kv-disk names; everything inside belongs to the store
  lock               held by the engine, with its process id
  index              the slot of every record
  index.new          an index that is being written anew
  index.damaged      the last index that could not be read
  records-N          slots of layer group N
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kveik.errors import BadValue, DoesNotFit, Unreachable
from kveik.machine.address_space import amount
from kveik.offload.stores.disk_files import (
    DAMAGED,
    FULL,
    INDEX,
    LOCK,
    FolderLock,
    SlotFiles,
    allocated_bytes,
    in_words,
    open_plain,
    slots_file,
)
from kveik.offload.stores.disk_index import (
    BYTES_PER_RECORD,
    ENTRY_BYTES,
    AnotherLayout,
    DiskIndex,
    IndexBroken,
    PendingDeletions,
    beside,
    index_bytes,
)
from kveik.offload.stores.record import RecordFormat, RecordKey
from kveik.offload.stores.slots import PAGE_BYTES, Place, Slots, slot_bytes
from kveik.words import counted

log = logging.getLogger(__name__)

KV_FOLDER = "kveik-kv"
"""Name of a store's folder in the one that --kv-disk names."""

SPARE_BYTES = 1 << 14
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_TEMPORARY = (*FULL, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.ENFILE, errno.EMFILE)
"""Errors of a folder that may be over tomorrow; any other is for the operator to put right."""


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """Contents and bounds of a folder."""

    folder: Path
    sizes: tuple[int, ...]
    """Bytes of a slot, per group."""

    capacity_bytes: int
    """The bound on all of it, as it was set."""

    slots_bytes: int
    """The bound on all slots together."""

    index_bytes: int
    """The bound on the index."""

    description: bytes
    """Formats of the records. A folder with another description is emptied: its bound is for one model at a time."""

    read_only: bool = False
    """Nothing in the folder may change, although it could."""

    @property
    def damaged_bytes(self) -> int:
        """The bound on a damaged index that is kept; as much is left for one that is being written anew."""
        return self.index_bytes // 2

    def bytes_on_disk(self) -> int:
        """Bytes that all files take, with those that the file system needs to find their pieces."""
        names = (INDEX, beside(Path(INDEX)).name, DAMAGED, LOCK, *(slots_file(group) for group in range(len(self.sizes))))
        return sum(allocated_bytes(self.folder / name) for name in names)


def plan_folder(
    folder: Path,
    formats: Sequence[RecordFormat],
    capacity_bytes: int,
    *,
    read_only: bool = False,
    index_bytes_least: int = 0,
) -> FolderPlan:
    """The plan for records of these formats. Raises DoesNotFit where the bound holds not one block."""
    sizes = tuple(slot_bytes(one.record_bytes) for one in formats)
    slots = _slots_bytes(capacity_bytes, sizes)
    if slots < sum(sizes):
        raise DoesNotFit(
            f"--kv-disk-bytes {capacity_bytes} is too little for one block of {counted(sum(sizes), 'byte')} and "
            f"the index of the folder; at least {_least(sizes)} would work."
        )
    index = max(index_bytes(capacity_bytes // min(sizes)), index_bytes_least)
    return FolderPlan(folder, sizes, capacity_bytes, slots, index, described(formats), read_only)


def described(formats: Sequence[RecordFormat]) -> bytes:
    """The formats as JSON, as the index has them; equal only for equal formats."""
    groups = [
        {"fingerprint": one.fingerprint.hex(), "tokens": one.tokens, "encoding": one.encoding, "bytes": one.payload_bytes}
        for one in formats
    ]
    return json.dumps({"groups": groups}).encode()


def _slots_bytes(capacity_bytes: int, sizes: Sequence[int]) -> int:
    """Bytes left for slots beside a page for the lock and two indices: one may be kept aside or written anew."""
    return capacity_bytes - 2 * index_bytes(capacity_bytes // min(sizes)) - PAGE_BYTES


def _least(sizes: Sequence[int]) -> int:
    """Bytes that suffice for one block. An index grows by less than half a slot per slot, so this ends."""
    least = 0
    while (missing := sum(sizes) - _slots_bytes(least, sizes)) > 0:
        least += missing
    return least


def check_folder(folder: Path, *, only_look: bool = False) -> None:
    """Raises BadValue where a folder can never serve as it was named, Unreachable where another engine has it.

    A disk that is full or fails is no such reason, nor are records that can only be read. `only_look`: nothing is made or
    locked, and a folder that another engine has passes.
    """
    try:
        writable = _could_be_written(folder) if only_look else can_be_written(folder)
        if not writable and not os.access(folder / INDEX, os.R_OK):
            raise PermissionError(errno.EACCES, "there is no permission to write there, and nothing to read")
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if file.name in (INDEX, DAMAGED, LOCK) or file.name.startswith(slots_file(0).removesuffix("0")):
                os.close(open_plain(file, os.O_RDWR if writable else os.O_RDONLY))
        if not only_look:
            FolderLock(folder / LOCK, read_only=True).close()
    except Unreachable as error:
        raise Unreachable(f"--kv-disk: the folder {folder} is not free. {error.message}") from error
    except OSError as error:
        if error.errno not in _TEMPORARY:
            verb = "used" if os.path.lexists(folder) else "made"
            raise BadValue(f"--kv-disk: the folder {folder} cannot be {verb}: {in_words(error)}.", param="kv_disk") from error


def check_kind(folder: Path) -> None:
    """Raises OSError where a link or a file stands in the place of a store's folder."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        kind = "a link" if folder.is_symlink() else "a file"
        raise NotADirectoryError(errno.ENOTDIR, f"it is {kind}, not a folder")


def can_be_written(folder: Path) -> bool:
    """Makes the folder; False where files cannot be made there. Raises OSError where there can be no such folder."""
    check_kind(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in _READ_ONLY and folder.is_dir():
            return False
        raise
    return os.access(folder, os.W_OK | os.X_OK)


def _could_be_written(folder: Path) -> bool:
    """The same, as far as it can be told without making the folder."""
    check_kind(folder)
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists() or one.is_symlink())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return os.access(there, os.W_OK | os.X_OK)


class OpenFolder:
    """Lock, index, slot files and the slots made from them, opened and closed together."""

    def __init__(self, plan: FolderPlan, pending: PendingDeletions) -> None:
        """Read-only where the folder cannot be written. Raises Unreachable where another engine has it, OSError or
        IndexBroken where it cannot be used at all.

        Records whose deletion is `pending` are not found in it, and are settled if the index could be written.
        """
        with contextlib.ExitStack() as opened:
            self.writable = not plan.read_only and can_be_written(plan.folder)
            self._lock = FolderLock(plan.folder / LOCK, read_only=not self.writable)
            opened.callback(self._lock.close)
            self.index = self._readable_index(plan)
            opened.callback(self.index.close)
            self.files = SlotFiles(plan.folder, plan.sizes, read_only=not self.writable)
            opened.callback(self.files.close)
            self.slots = Slots(plan.sizes, plan.slots_bytes, self._make_hole)
            self._restore(plan, pending)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    @property
    def tight_bytes(self) -> int:
        """Bound of the index while the disk is full: four entries per record that is there."""
        return len(self.slots) * BYTES_PER_RECORD + SPARE_BYTES

    @property
    def spare_bytes(self) -> int:
        """Bytes that a full disk should have left: the index grows to its bound, and is written anew beside itself."""
        return 2 * self.tight_bytes

    def release_space(self, plan: FolderPlan) -> None:
        """Take no more than the records need. Raises what the index raises."""
        self.slots.release_space()
        self.index.begin(plan.description, self.slots.places())

    def record(
        self, plan: FolderPlan, put: Sequence[tuple[RecordKey, Place]], pending: PendingDeletions, *, tight: bool = False
    ) -> None:
        """Bring the index up to date, before the slots show what is `put`. Raises what the index raises.

        `tight`: the disk is full.
        """
        most = min(plan.index_bytes, self.tight_bytes) if tight else plan.index_bytes
        if pending.everything or self.index.bytes_after(len(put) + len(pending.keys)) > most:
            # The slots hold nothing of what was deleted.
            self.index.begin(plan.description, self.slots.places())
            pending.settle()
        self.index.change(put, pending.keys)
        pending.settle()

    def sync(self) -> None:
        """To the disk. Raises OSError."""
        self.files.sync()
        self.index.sync()

    def _make_hole(self, group: int, first: int, count: int) -> bool:
        return self.writable and self.files.make_hole(group, first, count)

    def _readable_index(self, plan: FolderPlan) -> DiskIndex:
        file = plan.folder / INDEX
        if not self.writable:
            return DiskIndex(file, plan.index_bytes, read_only=True)
        _tidy(plan)
        try:
            return DiskIndex(file, plan.index_bytes)
        except AnotherLayout:
            log.warning("%s holds records that another version has written; they are dropped.", plan.folder)
            file.unlink()
        except IndexBroken as error:
            # A file of any size may have been put there; larger than the room for it, it is of no use to anybody.
            keep = allocated_bytes(file) <= plan.damaged_bytes
            kept = f"kept as {DAMAGED}" if keep else "too large to keep within the bound, so removed"
            log.warning("The index of %s is damaged, %s; its records are dropped (%s).", plan.folder, kept, error)
            if keep:
                file.replace(plan.folder / DAMAGED)
            else:
                file.unlink()
        return DiskIndex(file, plan.index_bytes)

    def _restore(self, plan: FolderPlan, pending: PendingDeletions) -> None:
        """Make the slots from the index; space that it does not name goes back to the file system."""
        self._describe(plan)
        named = self.index.places()
        pending.narrow(named)
        wanted = [(key, place) for key, place in self._possible(named) if not pending.covers(key)]
        if dropped := self.slots.restore(wanted):
            size = sum(place.bytes for _, place in wanted)
            log.warning(
                "%s holds %s records (%s), of which --kv-disk-bytes %d has room for %s; the others are %s.",
                plan.folder,
                f"{len(wanted):,}",
                amount(size),
                plan.capacity_bytes,
                f"{len(self.slots):,}",
                "dropped" if self.writable else "left alone",
            )
        if not self.writable:
            return
        if dropped or pending or 2 * len(self.slots) * ENTRY_BYTES < self.index.bytes_after(0):
            # On a full disk it stays as it is: anything else that it names is a miss, or its deletion is still pending.
            with contextlib.suppress(OSError):
                self.index.begin(plan.description, self.slots.places())
                pending.settle()
        for group in range(len(plan.sizes)):
            self.files.cut(group, self.slots.end(group))

    def _describe(self, plan: FolderPlan) -> None:
        """Give the index this store's description."""
        if self.index.description == plan.description:
            return
        if not self.writable:
            raise IndexBroken("the folder can only be read, and holds records of another model")
        if self.index.description is not None and (others := self.index.places()):
            log.warning(
                "%s holds %s records (%s) of another model or setting, which are dropped: they serve only where the model, "
                "--dtype, --kv-cache-dtype and --block-size are what they were written with.",
                plan.folder,
                f"{len(others):,}",
                amount(sum(place.bytes for place in others.values())),
            )
        self.index.begin(plan.description)

    def _possible(self, named: dict[RecordKey, Place]) -> list[tuple[RecordKey, Place]]:
        """Records that can be where the index names them, the oldest first: in slots that exist, one record per slot."""
        found: dict[tuple[int, int], tuple[RecordKey, Place]] = {}
        for key, place in named.items():
            if self.slots.fits(place.group, place.bytes) and place.slot < self.files.slots(place.group):
                found.pop((place.group, place.slot), None)
                found[place.group, place.slot] = (key, place)
        return list(found.values())


def _tidy(plan: FolderPlan) -> None:
    """Remove leftovers: an index half written, a damaged one kept under a larger bound, slots of groups that are gone."""
    beside(plan.folder / INDEX).unlink(missing_ok=True)
    if allocated_bytes(plan.folder / DAMAGED) > plan.damaged_bytes:
        (plan.folder / DAMAGED).unlink()
    kept = {slots_file(group) for group in range(len(plan.sizes))}
    for file in plan.folder.glob("records-*"):
        if file.name not in kept:
            file.unlink()
