"""The pages of a pool's first blocks come before they are needed, and what lies in them stays."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kveik.config import CacheConfig, EngineConfig, ModelConfig
from kveik.engine.llm import LLM
from kveik.machine.address_space import address_space
from kveik.machine.prefault import STEP, first_bytes, prefault
from tests.engine.tiny import save_tiny_gemma

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
    prefault([memory, other], [36 * MIB, MIB]).join()
    for one, size in ((memory, 36 * MIB), (other, MIB)):
        found, pages = resident(one), size // mmap.PAGESIZE
        assert all(found[:pages])
        assert not any(found[pages:])
    assert memory.sum() == memory[3 * MIB] == 7


def test_it_goes_step_by_step_and_ends_where_the_system_does_not_know_how() -> None:
    memory, asked = region(40 * MIB), list[tuple[int, int]]()

    def advise(address: int, size: int) -> bool:
        asked.append((address - memory.data_ptr(), size))
        return len(asked) < 4

    prefault([memory], [2 * STEP + 5], advise).join()
    assert asked == [(0, STEP), (STEP, STEP), (2 * STEP, 5)]
    prefault([memory], [3 * STEP], advise).join()
    assert asked[3:] == [(0, STEP)]


def test_one_sequence_is_provided_for_and_a_large_one_in_part() -> None:
    full, windowed = torch.empty(100, 4096, dtype=torch.uint8), torch.empty(5, 1024, dtype=torch.uint8)
    assert first_bytes([full, windowed], block_size=16, max_model_len=160) == [10 * 4096, 5 * 1024]
    assert first_bytes([full, windowed], block_size=16, max_model_len=16_000) == [100 * 4096, 5 * 1024]
    assert first_bytes([full], block_size=16, max_model_len=160, most=4096) == [4096]
    assert first_bytes([], block_size=16, max_model_len=160) == []


def test_an_engine_provides_for_its_first_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[list[Tensor], list[int]]] = []
    monkeypatch.setattr("kveik.engine.build.prefault", lambda pool, sizes: begun.append((pool, sizes)))
    model = ModelConfig(model=str(save_tiny_gemma(tmp_path)), threads=1)
    llm = LLM(EngineConfig(model=model, cache=CacheConfig(num_gpu_blocks_override=512)))
    [(pool, sizes)] = begun
    assert len(pool) == 2
    assert sizes == first_bytes(pool, llm.loaded.config.cache.block_size, llm.loaded.max_model_len)
    assert all(0 < size <= one.nbytes for size, one in zip(sizes, pool, strict=True))
    llm.close()


ENDS_AT_ONCE = """
import atexit, time, torch
from kveik.machine.prefault import STEP, prefault
calls = []
def advise(address, size):
    calls.append(size)
    time.sleep(0.02)
    return True
thread = prefault([torch.empty(1)], [500 * STEP], advise)
atexit.register(lambda: print(thread.is_alive(), len(calls) < 500))
"""


def test_a_process_that_ends_meanwhile_waits_for_a_step_of_it_and_not_for_all() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False True\n", "")
