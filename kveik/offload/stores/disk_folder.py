"""A disk store's folder while it is open: lock, index, files, and the books made from them.

lock             held by the engine, with its process id
index            which record lies in which slot
index.new        one that is being written anew
index.damaged    the last index that could not be read
records-N        slots of layer group N
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kveik.machine.address_space import amount
from kveik.offload.stores.disk_check import can_be_written
from kveik.offload.stores.disk_files import FolderLock, SlotFiles, slots_file
from kveik.offload.stores.disk_index import BYTES_PER_RECORD, ENTRY_BYTES, AnotherLayout, DiskIndex, IndexBroken, beside
from kveik.offload.stores.disk_owed import Owed
from kveik.offload.stores.disk_owner import INDEX, LOCK, foreign_file, is_ours
from kveik.offload.stores.record import RecordKey
from kveik.offload.stores.slots import Place, Slots

log = logging.getLogger(__name__)

SPARE_BYTES = 1 << 14
_DAMAGED = "index.damaged"


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """What a folder is to hold."""

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
    """What the records are of. A folder with another description is emptied: its bound is for one model at a time."""

    read_only: bool = False
    """Whether nothing there may change, though it could."""

    @property
    def damaged_bytes(self) -> int:
        """The bound on a damaged index that is kept; as much is left for one that is being written anew."""
        return self.index_bytes // 2

    def bytes_on_disk(self) -> int:
        """What all files really take, with what the file system needs to find their pieces."""
        names = (INDEX, beside(Path(INDEX)).name, _DAMAGED, LOCK, *(slots_file(group) for group in range(len(self.sizes))))
        return sum(_blocks_bytes(self.folder / name) for name in names)


class OpenFolder:
    """Everything that is opened and closed together."""

    def __init__(self, plan: FolderPlan, owed: Owed) -> None:
        """Read-only where the folder cannot be written. Raises Unreachable where another engine has it, OSError or
        IndexBroken where it cannot be used at all.

        What is `owed` is not found in it any more, and is settled as far as the index could be written.
        """
        with contextlib.ExitStack() as opened:
            self.writable = not plan.read_only and can_be_written(plan.folder)
            if self.writable and foreign_file(plan.folder):
                raise IndexBroken("the folder holds files of others")
            self._lock = FolderLock(plan.folder / LOCK, read_only=not self.writable)
            opened.callback(self._lock.close)
            self.index = self._readable_index(plan)
            opened.callback(self.index.close)
            self.files = SlotFiles(plan.folder, plan.sizes, read_only=not self.writable)
            opened.callback(self.files.close)
            self.slots = Slots(plan.sizes, plan.slots_bytes, self._make_hole)
            self._restore(plan, owed)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    @property
    def tight_bytes(self) -> int:
        """The bound on the index while the disk is full: room for four entries per record, as ever, but for no more records."""
        return len(self.slots) * BYTES_PER_RECORD + SPARE_BYTES

    @property
    def spare_bytes(self) -> int:
        """What a full disk should have left: the index grows to its bound, and is written anew beside itself."""
        return 2 * self.tight_bytes

    def give_back(self, plan: FolderPlan) -> None:
        """Take no more than the records need. Raises what the index raises."""
        self.slots.give_back()
        self.index.begin(plan.description, self.slots.places())

    def tell(self, plan: FolderPlan, put: Sequence[tuple[RecordKey, Place]], owed: Owed, *, tight: bool = False) -> None:
        """Bring the index up to date, before the books show what is `put`. Raises what the index raises.

        `tight`: the disk is full.
        """
        most = min(plan.index_bytes, self.tight_bytes) if tight else plan.index_bytes
        if owed.everything or self.index.bytes_after(len(put) + len(owed.keys)) > most:
            # The books have no more of what was deleted.
            self.index.begin(plan.description, self.slots.places())
            owed.settle()
        self.index.change(put, owed.keys)
        owed.settle()

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
            keep = _blocks_bytes(file) <= plan.damaged_bytes
            kept = f"kept as {_DAMAGED}" if keep else "too large to keep within the bound, so removed"
            log.warning("The index of %s is damaged, %s; its records are dropped (%s).", plan.folder, kept, error)
            if keep:
                file.replace(plan.folder / _DAMAGED)
            else:
                file.unlink()
        return DiskIndex(file, plan.index_bytes)

    def _restore(self, plan: FolderPlan, owed: Owed) -> None:
        """Books from the index; what they do not name is given back to the file system."""
        self._describe(plan)
        named = self.index.places()
        owed.narrow(named)
        wanted = [(key, place) for key, place in self._possible(named) if not owed.covers(key)]
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
        if dropped or owed or 2 * len(self.slots) * ENTRY_BYTES < self.index.bytes_after(0):
            # On a full disk it stays as it is: what it names besides are misses, or owed still.
            with contextlib.suppress(OSError):
                self.index.begin(plan.description, self.slots.places())
                owed.settle()
        for group in range(len(plan.sizes)):
            self.files.cut(group, self.slots.end(group))

    def _describe(self, plan: FolderPlan) -> None:
        """Make the index one of what this store holds."""
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
        """What can be as it is named, the oldest first: in slots that exist, each named once, by the latest record."""
        found: dict[tuple[int, int], tuple[RecordKey, Place]] = {}
        for key, place in named.items():
            if self.slots.fits(place.group, place.bytes) and place.slot < self.files.slots(place.group):
                found.pop((place.group, place.slot), None)
                found[place.group, place.slot] = (key, place)
        return list(found.values())


def _tidy(plan: FolderPlan) -> None:
    """Remove what is left of before: an index half written, one kept under a larger bound, slots of groups now gone."""
    beside(plan.folder / INDEX).unlink(missing_ok=True)
    if _blocks_bytes(plan.folder / _DAMAGED) > plan.damaged_bytes:
        (plan.folder / _DAMAGED).unlink()
    groups = len(plan.sizes)
    ours = {slots_file(group) for group in range(groups)}
    for file in plan.folder.glob("records-*"):
        if file.name not in ours and is_ours(file, groups):
            file.unlink()


def _blocks_bytes(file: Path) -> int:
    """What a file takes on a disk, be it another one that a link leads to; 0 where it is not there."""
    try:
        return file.stat().st_blocks * 512
    except OSError:
        return 0
