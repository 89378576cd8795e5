"""Populates the pool's first pages in a thread, before requests need them.

When a page is first written the system clears it, which takes longer than the write: a long conversation that is loaded from
disk after a start would wait several times as long for that as for its keys and values. See madvise(2), MADV_POPULATE_WRITE: it
changes no byte, so blocks may be in use meanwhile. Linux 5.14 and later; elsewhere pages are cleared when they are written.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

MOST_BYTES = 512 << 20
"""Bound for all groups together, so that an unused pool takes little memory."""

STEP = 2 << 20
"""Bytes per call, one huge page. The system holds a lock during each call, which delays other threads that need memory. The
thread has normal priority, because a low one would hold that lock for long."""

_MADV_POPULATE_WRITE = 23
"""Python's mmap module does not name it."""


def first_bytes(pool: Sequence[Tensor], blocks: int, most: int = MOST_BYTES) -> list[int]:
    """Bytes of each group's first blocks, which an unused pool gives out in order; `most` in all.

    pool: a group's blocks each, [blocks, ...].
    """
    sizes = [min(len(one), blocks) * one[:1].nbytes for one in pool]
    share = min(1.0, most / max(1, sum(sizes)))
    return [int(size * share) for size in sizes]


def prefault(
    pool: Sequence[Tensor],
    sizes: Sequence[int],
    stop: threading.Event,
    advise: Callable[[int, int], bool] | None = None,
) -> threading.Thread:
    """A thread that has begun to make the pages of so many bytes of each. It ends when all are there, on `stop`, when the
    system does not know how, or when the process ends. `advise(address, bytes)`: the system.
    """
    # The thread keeps the tensors, and so their memory, alive. The interpreter joins it at exit: a thread that returns from a
    # system call after the interpreter's end aborts the process.
    thread = threading.Thread(target=_make_pages, args=(pool, sizes, stop, advise or _populate), name="kveik-prefault")
    thread.start()
    return thread


def _make_pages(
    pool: Sequence[Tensor], sizes: Sequence[int], stop: threading.Event, advise: Callable[[int, int], bool]
) -> None:
    for one, size in zip(pool, sizes, strict=True):
        for at in range(0, size, STEP):
            if stop.is_set() or not threading.main_thread().is_alive():
                return
            if not advise(one.data_ptr() + at, min(STEP, size - at)):
                return


def _populate(address: int, size: int) -> bool:
    """Makes the call without the interpreter's lock, which `mmap.madvise` would keep."""
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return False
    return int(advise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(_MADV_POPULATE_WRITE))) == 0
