"""Files of a disk store: slots of each layer group, and the locks that keep other engines and threads out.

Slots are read and written with pread and pwrite, never mapped: a file that is cut short, a disk that fails and one that takes
seconds are then a short read, an error number and a thread that waits, rather than the end of the process or a lock held.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

from kveik.errors import Unreachable

INDEX, DAMAGED, LOCK = "index", "index.damaged", "lock"

DISK_FULL = "the disk is full"
FULL = (errno.ENOSPC, errno.EDQUOT)

_KEEP_SIZE, _PUNCH_HOLE = 1, 2

_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
"""The C library's, which Python does not offer; None where there is none."""


def in_words(error: OSError) -> str:
    """The cause of an error, without the path."""
    return DISK_FULL if error.errno in FULL else error.strerror or type(error).__name__


def open_plain(file: Path, flags: int) -> int:
    """Opens a plain file and nothing else: a pipe would wait for its other end, a link lead elsewhere. Raises OSError."""
    try:
        fd = os.open(file, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW, 0o644)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    except PermissionError as error:
        raise PermissionError(error.errno, f"there is no permission to use the file {file.name} in it") from error
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    raise OSError(errno.EINVAL, f"{file.name} in it is not a plain file")


def slots_file(group: int) -> str:
    """Name of the file that holds a group's slots."""
    return f"records-{group}"


def allocated_bytes(file: Path) -> int:
    """Bytes that a file takes on the disk; 0 where there is none."""
    try:
        return file.lstat().st_blocks * 512
    except OSError:
        return 0


class SlotFiles:
    """Open files of slots, one per group."""

    def __init__(self, folder: Path, sizes: Sequence[int], *, read_only: bool = False) -> None:
        """Raises OSError where they cannot be opened or made."""
        self._sizes = sizes
        self._fds: list[int] = []
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        try:
            for group in range(len(sizes)):
                self._fds.append(open_plain(folder / slots_file(group), flags))
        except FileNotFoundError as error:
            missing = slots_file(len(self._fds))
            self.close()
            raise FileNotFoundError(error.errno, f"the file {missing} is missing") from error
        except OSError:
            self.close()
            raise

    def read(self, group: int, slot: int, into: memoryview) -> int:
        """Bytes that were there; fewer than asked for where the file ends. Raises OSError."""
        start, done = slot * self._sizes[group], 0
        while done < len(into):
            count = os.preadv(self._fds[group], [into[done:]], start + done)
            if count == 0:
                break
            done += count
        return done

    def read_now(self, group: int, slot: int, header: memoryview, payload: memoryview) -> bool:
        """Fill both, if all of it is in the page cache; False: it is not, or the system cannot say, and part may be written."""
        try:
            count = os.preadv(self._fds[group], [header, payload], slot * self._sizes[group], os.RWF_NOWAIT)
        except OSError:
            # Whatever it is, reading and waiting for it will tell.
            return False
        return count == len(header) + len(payload)

    def write(self, group: int, slot: int, record: memoryview) -> None:
        """All of it, or OSError."""
        start, done = slot * self._sizes[group], 0
        while done < len(record):
            done += os.pwrite(self._fds[group], record[done:], start + done)

    def make_hole(self, group: int, first: int, count: int) -> bool:
        """Give the file system back the blocks of slots side by side; False where it cannot."""
        start, size = first * self._sizes[group], count * self._sizes[group]
        try:
            if start + size >= os.fstat(self._fds[group]).st_size:
                # Every file system can cut off a file's end. One that is shorter still is not made longer.
                self.cut(group, min(first, self.slots(group)))
                return True
        except OSError:
            return False
        if _fallocate is None:
            return False
        return bool(_fallocate(self._fds[group], _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(size)) == 0)

    def slots(self, group: int) -> int:
        """Slots of which the file has at least the beginning."""
        return -(-os.fstat(self._fds[group]).st_size // self._sizes[group])

    def cut(self, group: int, slots: int) -> None:
        """Keep the first so many slots. Raises OSError."""
        os.ftruncate(self._fds[group], slots * self._sizes[group])

    def sync(self) -> None:
        """To the disk. Raises OSError."""
        for fd in self._fds:
            os.fdatasync(fd)

    @property
    def removed(self) -> bool:
        """Whether somebody has deleted one of them."""
        return any(os.fstat(fd).st_nlink == 0 for fd in self._fds)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


class TwoThreads(RuntimeError):
    """A bug: the second thread must wait for the first by other means."""

    def __init__(self, inside: str, entering: str) -> None:
        super().__init__(f"Thread '{entering}' changes a disk store while thread '{inside}' does. One at a time may.")


class OneThread:
    """Context that one thread at a time may enter: a second one is refused before it has done harm. Nobody waits."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._inside = ""

    def __enter__(self) -> None:
        me = threading.current_thread().name
        if not self._free.acquire(blocking=False):
            raise TwoThreads(self._inside, me)
        self._inside = me

    def __exit__(self, *error: object) -> None:
        self._free.release()


class FolderInUse(Unreachable):
    """Another process has a folder's lock."""

    def __init__(self, process: str) -> None:
        super().__init__(
            f"The folder for cached blocks is in use by another engine (process {process}); give every engine its own."
        )
        self.process = process
        """Its number, as it wrote it there."""


class FolderLock:
    """Held as long as the process lives, or until `close`; gone with the process, however it ends.

    It is on the folder, which keeps it when the file is removed, and on the file, for file systems that cannot lock folders.
    """

    def __init__(self, file: Path, *, read_only: bool = False) -> None:
        """Raises FolderInUse where another engine has the folder, OSError where there can be no lock."""
        self._fds: list[int] = []
        try:
            self._lock(os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), file)
            if read_only and not file.exists():
                # Nobody can write there, so nobody needs to be kept out.
                return
            fd = open_plain(file, os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT)
            self._lock(fd, file)
            if not read_only:
                os.ftruncate(fd, 0)
                os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except (OSError, Unreachable):
            self.close()
            raise

    def _lock(self, fd: int, file: Path) -> None:
        self._fds.append(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderInUse(_holder(file)) from error
        except OSError:
            # Over a network a folder cannot be locked, because it cannot be opened for writing; the file can.
            if len(self._fds) > 1:
                raise

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _holder(file: Path) -> str:
    """Process that has written a lock."""
    try:
        fd = open_plain(file, os.O_RDONLY)
    except OSError:
        return "unknown"
    try:
        return os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
    finally:
        os.close(fd)
