"""Memory in front of one tier, taken once: a spilled block is copied here at once, and its pool memory is free again."""

from __future__ import annotations

import threading

from kveik.offload.stores.record import HEADER_BYTES

_ALIGNED = 64


class Staging:
    """Buffers of one size, each with room for a record's header in front of a block."""

    def __init__(self, block_bytes: int, memory_bytes: int) -> None:
        """`block_bytes`: of the largest block. At least one buffer, whatever the memory."""
        self.buffer_bytes = -(-(HEADER_BYTES + block_bytes) // _ALIGNED) * _ALIGNED
        self.buffers = max(memory_bytes // self.buffer_bytes, 1)
        self._memory = memoryview(bytearray(self.buffers * self.buffer_bytes))
        self._free = list(range(self.buffers - 1, -1, -1))
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Buffers that can be taken."""
        return len(self._free)

    @property
    def bytes_used(self) -> int:
        return len(self._taken) * self.buffer_bytes

    def take(self) -> int | None:
        """A buffer's number; None: all are taken."""
        with self._lock:
            if not self._free:
                return None
            number = self._free.pop()
            self._taken.add(number)
            return number

    def give_back(self, number: int) -> None:
        """Once per `take`."""
        with self._lock:
            self._taken.remove(number)
            self._free.append(number)

    def view(self, number: int, size: int) -> memoryview:
        """The first so many bytes of a buffer."""
        start = number * self.buffer_bytes
        return self._memory[start : start + size]
