"""Bounds on memory beside weights, pool and tiers: allocator arenas and caches of compiled products.

glibc gives each allocating thread an arena, and keeps what was freed in it. oneDNN compiles a product for every number of rows
and keeps a thousand of them, half a megabyte each; torch's handles keep as many alive.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import MutableMapping
from pathlib import Path

COMPILED_PRODUCTS = "64"
"""Compiled products in the cache. One step needs seven for its number of rows, and those of its attention."""

_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Read by oneDNN, and by torch for its handles to oneDNN's products."""

_MALLOC = (("MALLOC_ARENA_MAX", -8, 1), ("MALLOC_MMAP_THRESHOLD_", -3, 32 << 20), ("MALLOC_TRIM_THRESHOLD_", -1, 64 << 20))
"""glibc's variable, the number of the same setting in mallopt(3), and its value. With thresholds this high a step's scratch
memory stays in the heap and the next step uses it again."""


def bound_memory(environment: MutableMapping[str, str]) -> None:
    """Set the bounds for this process, before torch is loaded. Variables that are set already stay."""
    for name in _CACHES:
        environment.setdefault(name, COMPILED_PRODUCTS)
    mallopt = getattr(_c_library(), "mallopt", None)
    for name, setting, value in _MALLOC:
        if mallopt is not None and name not in environment:
            mallopt(ctypes.c_int(setting), ctypes.c_int(value))


def return_free_memory() -> None:
    """Return the heap's free pages to the system; without glibc nothing happens."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def resident_bytes(process: Path = Path("/proc/self")) -> int:
    """Resident memory of the process, in bytes; 0 where the system does not report it."""
    try:
        return int((process / "statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def _c_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
