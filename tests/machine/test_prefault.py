"""The pages of a pool's first blocks come before they are needed, and what lies in them stays."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from kveik.machine.address_space import address_space
from kveik.machine.prefault import STEP, first_bytes, prefault

MIB = 1 << 20


def region(size: int) -> Tensor:
    return torch.frombuffer(address_space(size, "a test", "", huge=False), dtype=torch.uint8, count=size)


def resident(memory: Tensor) -> list[bool]:
    """Of each page."""
    pages = -(-memory.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), found) == 0
    return [bool(page & 1) for page in found]


def populates() -> bool:
    """Linux, 5.14 or later."""
    system = os.uname()
    return system.sysname == "Linux" and tuple(map(int, system.release.split(".")[:2])) >= (5, 14)


@pytest.mark.skipif(not populates(), reason="the system makes no pages ahead")
def test_the_first_bytes_of_each_become_resident_and_no_others() -> None:
    memory, other = region(40 * MIB), region(4 * MIB)
    memory[3 * MIB] = 7
    prefault([memory, other], [36 * MIB, MIB], threading.Event()).join()
    for one, size in ((memory, 36 * MIB), (other, MIB)):
        found, pages = resident(one), size // mmap.PAGESIZE
        assert all(found[:pages])
        assert not any(found[pages:])
    assert memory.sum() == memory[3 * MIB] == 7


def test_it_goes_step_by_step_until_it_is_told_to_stop_or_the_system_does_not_know_how() -> None:
    memory, asked, stop = region(40 * MIB), list[tuple[int, int]](), threading.Event()

    def advise(address: int, size: int) -> bool:
        asked.append((address - memory.data_ptr(), size))
        return len(asked) < 4

    prefault([memory], [2 * STEP + 5], stop, advise).join()
    assert asked == [(0, STEP), (STEP, STEP), (2 * STEP, 5)]
    prefault([memory], [3 * STEP], stop, advise).join()
    assert asked[3:] == [(0, STEP)]
    stop.set()
    prefault([memory], [3 * STEP], stop, advise).join()
    assert len(asked) == 4


def test_the_first_blocks_of_each_are_counted_and_of_many_a_part() -> None:
    full, windowed = torch.empty(100, 4096, dtype=torch.uint8), torch.empty(5, 1024, dtype=torch.uint8)
    assert first_bytes([full, windowed], blocks=10) == [10 * 4096, 5 * 1024]
    assert first_bytes([full, windowed], blocks=1000) == [100 * 4096, 5 * 1024]
    assert first_bytes([full], blocks=10, most=4096) == [4096]
    assert first_bytes([], blocks=10) == []


ENDS_AT_ONCE = """
import atexit, threading, time, torch
from kveik.machine.prefault import STEP, prefault
calls = []
def advise(address, size):
    calls.append(size)
    time.sleep(0.02)
    return True
thread = prefault([torch.empty(1)], [500 * STEP], threading.Event(), advise)
atexit.register(lambda: print(thread.is_alive(), len(calls) < 500))
"""


def test_a_process_that_ends_meanwhile_waits_for_a_step_of_it_and_not_for_all() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False True\n", "")
