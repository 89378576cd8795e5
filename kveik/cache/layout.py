"""What one block of a layer group looks like in memory. Arithmetic only.

    storage of a group: [block, layer in group, key|value, kv head, slot, head dim]

One block is one contiguous record, so that it can be moved with one copy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a pool and a block table, because their blocks live and die alike."""

    layers: tuple[int, ...]
    """Indices of the decoder layers, ascending."""

    kv_heads: int
    head_dim: int
    window: int | None
    """A query at position i reads keys at i - window < j <= i; None: all j <= i."""

    @property
    def values_per_token(self) -> int:
        """Numbers stored per token: keys and values of every layer in the group."""
        return len(self.layers) * 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A group's blocks, in numbers and bytes."""

    group: LayerGroup
    block_size: int
    bytes_per_value: int

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of one block: [layer in group, key|value, kv head, slot, head dim]."""
        group = self.group
        return (len(group.layers), 2, group.kv_heads, self.block_size, group.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.group.values_per_token * self.block_size * self.bytes_per_value


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
