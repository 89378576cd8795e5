"""Device protocol: pool memory, copies of blocks, preparation for computing.

    planner ──layouts──▶ device.allocate ──▶ PoolMemory ◀── executor: tensors, copies        offload: bytes of a block

Independent of models, plans and samplers. The executor joins decoder, sampler and pool memory; `collect` is where it waits for
what runs asynchronously. Logits reach the host's memory in one place, `kveik.sample.logprobs.as_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kveik.cache.layout import BlockCopy, BlockLayout


class PoolMemory(Protocol):
    """Keys and values of all blocks. A fresh block holds whatever it held before: no slot is read before it is written."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Per group: [blocks, layers in group, key|value, kv heads, block_size, head_dim], or [.., kv heads, record bytes]
        where values have scales. On the device, for decoder and kernels alone.
        """
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy records in order: a later copy may overwrite what an earlier one has read. Steps launched later see them."""
        ...

    def block(self, group: int, number: int) -> memoryview:
        """Bytes of one block's record, writable, as long as the pool lives. Other threads may read and write them between
        two steps' accesses to the block.
        """
        ...


class Device(Protocol):
    """What holds the pool and computes. Used by one thread; opened before a model is loaded."""

    @property
    def isa(self) -> str:
        """Instruction set in use, for metrics."""
        ...

    def use_threads(self, threads: int) -> None:
        """Threads of the arithmetic, for the whole process."""
        ...

    def keep_weights(self, weight_bytes: int) -> None:
        """Prepare loaded weights for being read in every step. Called once, before the pool is allocated."""
        ...

    def peak_bytes(self, step: Callable[[], object]) -> int | None:
        """Run a step; return the memory it took at its peak. None: the system does not tell, and the step was not run."""
        ...

    def allocate(
        self, layouts: Sequence[BlockLayout], blocks: Sequence[int], dtype: torch.dtype, *, ready: int = 0
    ) -> PoolMemory:
        """Memory for `blocks` blocks per group, of which the first `ready` of each are prepared in the background.

        dtype: of the tensors. The layouts' bytes per value are its size; records with scales are uint8.
        Raises DoesNotFit where the system does not give as much.
        """
        ...

    def describe(self) -> tuple[str, ...]:
        """Lines for the start-up log, once weights are loaded."""
        ...

    def close(self) -> None:
        """End what runs in the background. Pool memory stays valid."""
        ...
