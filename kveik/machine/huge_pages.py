"""Moves resident memory onto huge pages. Linux only, and only advice: without it the process is slower.

A decode step reads every weight once. On pages of 4 KiB that is tens of thousands of page-table look-ups per step, and the
processor's prefetchers stop at every page's end; on pages of 2 MiB there are a few hundred. See madvise(2), MADV_COLLAPSE
(Linux 6.1 and later).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86-64 and, with pages of 4 KiB, on ARM."""

LEAST_BYTES = 2 * HUGE_PAGE
"""Mappings smaller than this hold hardly one aligned huge page."""

MADV_COLLAPSE = 25
"""Python's mmap module does not name it yet."""


def collapse_onto_huge_pages(process: Path = Path("/proc/self")) -> int:
    """Put the process's large anonymous mappings onto huge pages, now and for later writes.

    Returns the bytes on huge pages afterwards; 0 where the system has none or does not report them. Call it when the weights
    are loaded and before the pool is mapped, whose pages take memory when they are written.
    """
    try:
        advise = ctypes.CDLL(None).madvise
        mappings = list(_large_anonymous(process / "maps"))
    except (OSError, AttributeError):
        return 0
    for first, stop in mappings:
        for advice in (getattr(mmap, "MADV_HUGEPAGE", None), MADV_COLLAPSE):
            if advice is not None:
                # The result does not matter: a range that the kernel cannot collapse stays as it is.
                advise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), ctypes.c_int(advice))
    return bytes_on_huge_pages(process)


def _large_anonymous(maps: Path) -> Iterator[tuple[int, int]]:
    """[first, stop) of writable private mappings without a file, cut to whole huge pages."""
    for line in maps.read_text(encoding="utf-8").splitlines():
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        low, high = (int(address, 16) for address in addresses.split("-"))
        if rights == "rw-p" and inode == "0" and high - low >= LEAST_BYTES and name in ([], ["[heap]"]):
            first, stop = -(-low // HUGE_PAGE) * HUGE_PAGE, high // HUGE_PAGE * HUGE_PAGE
            if first < stop:
                yield first, stop


def bytes_on_huge_pages(process: Path = Path("/proc/self")) -> int:
    """Anonymous bytes on huge pages now; 0 where the system does not report them."""
    try:
        lines = (process / "smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))
