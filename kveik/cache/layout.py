"""Layout of one block of a layer group in memory. Arithmetic only.

    storage of a group: [block, layer in group, key|value, kv head, slot, head dim]         plain values
                        [block, layer in group, key|value, kv head, record byte]            quantised ones
    record              = block_size * head_dim values  ++  block_size scales, one per slot

One block lies in one piece, scales and all, so that it can be moved with one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Tokens = TypeVar("Tokens", int, NDArray[np.int64])
"""A number of tokens, or several."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a pool and a block table, because their blocks live and die alike."""

    layers: tuple[int, ...]
    """Indices of the decoder layers, ascending."""

    kv_heads: int
    head_dim: int
    window: int | None
    """A query at position i reads keys at i - window < j <= i; None: all j <= i."""

    def first_needed(self, computed: Tokens, block_size: int) -> Tokens:
        """Number of the first block that a query at position `computed` or later reads: i - window < j."""
        if self.window is None:
            return computed * 0
        return (computed - self.window + 1) // block_size * (computed >= self.window)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A group's blocks, in numbers and bytes."""

    group: LayerGroup
    block_size: int
    bytes_per_value: int
    scale_bytes: int = 0
    """Bytes beside the values of one token in one kv head: their scale. 0: the values are stored as they are."""

    @property
    def record_bytes(self) -> int:
        """Of one kv head's keys (or values) in one block."""
        return self.block_size * (self.group.head_dim * self.bytes_per_value + self.scale_bytes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one block: [layer in group, key|value, kv head], then [slot, head dim], or with scales [record byte]."""
        group = self.group
        record = (self.record_bytes,) if self.scale_bytes else (self.block_size, group.head_dim)
        return (len(group.layers), 2, group.kv_heads, *record)

    @property
    def block_bytes(self) -> int:
        return len(self.group.layers) * 2 * self.group.kv_heads * self.record_bytes


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: the record of `source` becomes that of `target`. Carried out in order, before any write of the step."""

    group: int
    source: int
    target: int


def blocks_for(tokens: int, block_size: int) -> int:
    """How many blocks hold this many tokens."""
    return -(-tokens // block_size)


def blocks_at_most(group: LayerGroup, tokens: int, block_size: int, chunk: int) -> int:
    """Most blocks of a group that one sequence of `tokens` positions holds at once, computed in chunks of at most `chunk`.

    A windowed group needs the blocks of positions [computed - window + 1, computed + chunk): at most window + chunk - 1
    positions, which touch (window + chunk - 2) // block_size + 2 blocks where they are aligned worst.
    """
    whole = blocks_for(tokens, block_size)
    if group.window is None:
        return whole
    return min(whole, (group.window + chunk - 2) // block_size + 2)
