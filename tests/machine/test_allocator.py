"""The process bounds its own allocator and caches; what the environment sets stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kveik.machine.allocator import COMPILED_PRODUCTS, bound_memory, resident_bytes, return_free_memory

ARENAS = """
import ctypes, os, re, sys, threading
from kveik.machine.allocator import bound_memory
if sys.argv[1] == "bound":
    bound_memory(os.environ)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
meet = threading.Barrier(8)
def allocate():
    meet.wait()
    for _ in range(2000):
        libc.malloc(1000)
threads = [threading.Thread(target=allocate) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fopen.restype = ctypes.c_void_p
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
"""


def arenas(tmp_path: Path, how: str) -> int:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    told = tmp_path / how
    subprocess.run([sys.executable, "-c", ARENAS, how, str(told)], check=True, env=kept)
    return told.read_text(encoding="ascii").count("<heap ")


def test_threads_share_one_arena(tmp_path: Path) -> None:
    assert arenas(tmp_path, "bound") == 1
    assert arenas(tmp_path, "unbound") > 1


def test_compiled_products_are_few_unless_the_environment_says_otherwise() -> None:
    environment = {"LRU_CACHE_CAPACITY": "7"}
    bound_memory(environment)
    assert environment == {"LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": COMPILED_PRODUCTS}


def test_memory_that_is_written_is_resident_and_goes_back() -> None:
    # What earlier tests have left free would be used again, and nothing would grow.
    return_free_memory()
    before = resident_bytes()
    block = bytearray(os.urandom(1 << 20)) * 64
    assert resident_bytes() - before > 60 << 20
    del block
    return_free_memory()
    assert resident_bytes() - before < 32 << 20


def test_a_system_that_does_not_tell_has_no_resident_memory(tmp_path: Path) -> None:
    assert resident_bytes(tmp_path) == 0
