"""Anonymous mappings whose pages take memory when first written: for the pool, weights and the tier in RAM."""

from __future__ import annotations

import contextlib
import mmap

from kveik import words
from kveik.errors import DoesNotFit

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""The mapping is not counted as memory. Python names the flag from 3.13 on; Linux gives it this number."""


def address_space(size: int, purpose: str, advice: str, *, huge: bool = False, counted: bool = True) -> mmap.mmap:
    """Returns `size` zero bytes, at least one page. Pages take memory when they are first written.

    `huge`: on huge pages where the system has them. `counted`: the system checks now that it has as much memory.

    Raises:
        DoesNotFit: the system refuses the mapping; the message ends with the advice.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if counted else _NO_RESERVE)
    try:
        region = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=flags)
    except OSError as error:
        raise DoesNotFit(
            f"The system refuses {words.counted(size, 'byte')} of memory for {purpose} ({error.strerror}); {advice}."
        ) from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        # Only advice: a kernel that was built without huge pages refuses it, and small pages work too.
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
    return region


def amount(count: int) -> str:
    """Returns bytes as text with a binary unit."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
