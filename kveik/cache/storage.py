"""The memory behind the blocks: one tensor per layer group, allocated once. The only impure part of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kveik.cache.layout import BlockCopy, BlockLayout


class BlockStorage:
    """Keys and values of all blocks. A fresh block holds whatever it held before: nobody reads a slot he has not written."""

    def __init__(self, layouts: Sequence[BlockLayout], blocks: Sequence[int], dtype: torch.dtype) -> None:
        """`blocks`: per group. The layouts' bytes per value are those of `dtype`."""
        for layout in layouts:
            assert layout.bytes_per_value == dtype.itemsize, "the memory plan and the storage disagree on the dtype"
        self.tensors: list[Tensor] = [
            # Not zeroed: the system gives pages when they are first written, so an unused pool costs address space only.
            torch.empty(count, *layout.shape, dtype=dtype)
            for layout, count in zip(layouts, blocks, strict=True)
        ]
        """Per group: [blocks, layers in group, key|value, kv heads, block_size, head_dim]."""

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
