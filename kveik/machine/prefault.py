"""The pool's first pages come before anybody needs them, beside whatever else goes on.

When a page is first written the system clears it, which takes longer than the writing: a long conversation that comes back
after a start would wait for that alone several times as long as for its keys and values from the disk. See madvise(2),
MADV_POPULATE_WRITE: it changes no byte, so blocks may be in use meanwhile. Linux 5.14 and later; elsewhere pages come when
they are written.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

MOST_BYTES = 512 << 20
"""Of all groups together: what is never used should take little memory."""

STEP = 2 << 20
"""Bytes at a time, one huge page. The system holds a lock for each, for which others who ask for memory wait; at a low priority
that could take long, so the thread has everybody's.
"""

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
    # The thread holds the tensors, and they their memory. The interpreter waits for it at its end: a thread that comes back
    # from the system when there is no interpreter any more ends the process with an abort.
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
    """Without the interpreter's lock, which `mmap.madvise` would keep."""
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return False
    return int(advise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(_MADV_POPULATE_WRITE))) == 0
