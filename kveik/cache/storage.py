"""The memory behind the blocks: one tensor per layer group, allocated once. The only impure part of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kveik.cache.layout import BlockCopy, BlockLayout
from kveik.machine.address_space import address_space


class BlockStorage:
    """Keys and values of all blocks. A fresh block holds whatever it held before: nobody reads a slot he has not written."""

    def __init__(self, layouts: Sequence[BlockLayout], blocks: Sequence[int], dtype: torch.dtype) -> None:
        """`blocks`: per group. `dtype`: of the tensors; the layouts' bytes per value are its, and where they have scales, both
        lie together as uint8.
        """
        for layout in layouts:
            assert layout.bytes_per_value == dtype.itemsize, "the memory plan and the storage disagree on the dtype"
            assert not layout.scale_bytes or dtype is torch.uint8, "the memory plan and the storage disagree on the dtype"
        self.tensors: list[Tensor] = [
            _memory(count * layout.block_bytes).view(dtype).view(count, *layout.shape)
            for layout, count in zip(layouts, blocks, strict=True)
        ]
        """Per group: [blocks, layers in group, key|value, kv heads, block_size, head_dim], or [.., kv heads, record bytes]
        where values have scales.
        """

    def copy(self, group: int, source: int, target: int) -> None:
        """The record of `source` becomes that of `target`."""
        if source != target:
            self.tensors[group][target].copy_(self.tensors[group][source])

    def copy_all(self, copies: Sequence[BlockCopy]) -> None:
        """One after the other: a later copy may overwrite what an earlier one has read."""
        for copy in copies:
            self.copy(copy.group, copy.source, copy.target)

    @property
    def bytes(self) -> int:
        """Bytes taken, all groups together."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def _memory(size: int) -> Tensor:
    """uint8 [size], on huge pages where the system has them. Raises DoesNotFit where the system does not give as much.

    Pages come when they are first written, so what is not used of a pool costs address space only. A step reads records from
    all over the pool: with pages of 4 KiB nearly every record would need a look-up of its own in the page tables.
    """
    advice = "ask for less with --kv-cache-memory-bytes or --gpu-memory-utilization"
    # The tensor keeps the region alive.
    return torch.frombuffer(address_space(size, "keys and values", advice, huge=True), dtype=torch.uint8, count=size)
