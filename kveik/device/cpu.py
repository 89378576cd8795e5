"""CPU device: pool memory on huge pages, threads, instruction set of the native kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveik.cache.layout import BlockCopy, BlockLayout
from kveik.kernels import native
from kveik.machine.address_space import address_space
from kveik.machine.allocator import return_free_memory
from kveik.machine.huge_pages import bytes_on_huge_pages, collapse_onto_huge_pages
from kveik.machine.prefault import first_bytes, prefault

PROCESS = Path("/proc/self")


class CpuPoolMemory:
    """Pool memory that decoder, kernels and tiers share. The tensors keep it alive."""

    def __init__(self, layouts: Sequence[BlockLayout], blocks: Sequence[int], dtype: torch.dtype) -> None:
        for layout in layouts:
            assert layout.bytes_per_value == dtype.itemsize, "the memory plan and the pool disagree on the dtype"
            assert not layout.scale_bytes or dtype is torch.uint8, "the memory plan and the pool disagree on the dtype"
        self.tensors: list[Tensor] = []
        self._records: list[NDArray[np.uint8]] = []
        for layout, count in zip(layouts, blocks, strict=True):
            region = _region(count * layout.block_bytes)
            self.tensors.append(region.view(dtype).view(count, *layout.shape))
            self._records.append(region.view(count, layout.block_bytes).numpy())

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """As in `PoolMemory`."""
        for copy in copies:
            if copy.source != copy.target:
                self.tensors[copy.group][copy.target].copy_(self.tensors[copy.group][copy.source])

    def block(self, group: int, number: int) -> memoryview:
        """As in `PoolMemory`."""
        return memoryview(self._records[group][number])


class CpuDevice:
    """The processor and the host's memory. Copies and steps are done when the call returns."""

    def __init__(self) -> None:
        """Raises BadValue where KVEIK_ISA names an instruction set that the processor lacks."""
        native.use_environment()
        self._huge_bytes = 0
        self._closing = threading.Event()
        self._prefaults: list[threading.Thread] = []

    @property
    def isa(self) -> str:
        return native.isa() or "none"

    def use_threads(self, threads: int) -> None:
        """Of torch; native kernels take as many."""
        torch.set_num_threads(threads)

    def keep_weights(self, weight_bytes: int) -> None:
        """Move weights onto huge pages. Native weights were put there as they were packed."""
        # Collapsing would make the free parts of the heap resident again.
        return_free_memory()
        huge = bytes_on_huge_pages()
        self._huge_bytes = huge if huge > 0.8 * weight_bytes else collapse_onto_huge_pages()

    def peak_bytes(self, step: Callable[[], object]) -> int | None:
        """Of resident memory."""
        try:
            # Linux then counts the peak from what is resident now.
            (PROCESS / "clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return None
        before = _status_bytes("VmRSS")
        step()
        return max(0, _status_bytes("VmHWM") - before)

    def allocate(
        self, layouts: Sequence[BlockLayout], blocks: Sequence[int], dtype: torch.dtype, *, ready: int = 0
    ) -> CpuPoolMemory:
        """As in `Device`. Pages beyond the ready blocks come when they are first written."""
        memory = CpuPoolMemory(layouts, blocks, dtype)
        if ready:
            self._prefaults.append(prefault(memory.tensors, first_bytes(memory.tensors, ready), self._closing))
        return memory

    def describe(self) -> tuple[str, ...]:
        """Instruction set and huge pages."""
        huge = self._huge_bytes >> 20
        pages = f"{huge} MiB of the process on huge pages" if huge else "no huge pages: decoding is some percent slower"
        return native.described(), pages

    def close(self) -> None:
        """Waits for one step of the threads that make pages."""
        self._closing.set()
        for thread in self._prefaults:
            thread.join()


def _region(size: int) -> Tensor:
    """uint8 [size], on huge pages where the system has them. Raises DoesNotFit where the system does not give as much.

    Unused parts of a pool cost address space only. A step reads records from all over the pool: with pages of 4 KiB nearly
    every record would need a look-up of its own in the page tables.
    """
    advice = "ask for less with --kv-cache-memory-bytes or --gpu-memory-utilization"
    # The tensor keeps the region alive.
    return torch.frombuffer(address_space(size, "keys and values", advice, huge=True), dtype=torch.uint8, count=size)


def _status_bytes(name: str) -> int:
    for line in (PROCESS / "status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")
