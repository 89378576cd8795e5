"""Random steps over paged storage, whose unowned slots are poisoned with NaN: what every attention must survive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kveik.cache.layout import blocks_for
from kveik.kernels.attention import AttentionBatch

LAYERS, LAYER = 3, 1
"""The storage holds several layers; the test reads one in the middle, so that strides count."""


@dataclass(frozen=True, slots=True)
class World:
    batch: AttentionBatch
    storage: Tensor
    """[blocks, LAYERS, 2, kv_heads, block_size, head_dim]"""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @property
    def cache(self) -> Tensor:
        return self.storage[:, LAYER]


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 8
    window: int | None = None
    dtype: torch.dtype = torch.float32


def world(shape: Shape, seq_lens: list[int], counts: list[int], seed: int) -> World:
    """Row i has seq_lens[i] positions of which the last counts[i] are new. Rows with one query must come first."""
    chance = torch.Generator().manual_seed(seed)
    held = [_held(shape, context, count) for context, count in zip(seq_lens, counts, strict=True)]
    order = iter(np.random.default_rng(seed).permutation(np.arange(1, 1 + sum(len(blocks) for blocks in held))).tolist())
    width = max(blocks_for(context, shape.block_size) for context in seq_lens) + 1
    # What a row does not hold points to block 0, which belongs to nobody.
    tables = torch.zeros(len(seq_lens), width, dtype=torch.int32)
    for row, blocks in enumerate(held):
        for block in blocks:
            tables[row, block] = next(order)
    blocks = 1 + sum(len(row) for row in held)
    storage = torch.full((blocks, LAYERS, 2, shape.kv_heads, shape.block_size, shape.head_dim), torch.nan, dtype=shape.dtype)
    _fill_pasts(storage, tables, shape, seq_lens, counts, chance)
    slots = [
        int(tables[row, position // shape.block_size]) * shape.block_size + position % shape.block_size
        for row, (context, count) in enumerate(zip(seq_lens, counts, strict=True))
        for position in range(context - count, context)
    ]
    tokens = sum(counts)
    leading = next((row for row, count in enumerate(counts) if count != 1), len(counts))
    batch = AttentionBatch(
        tables=tables,
        slot_mapping=torch.tensor(slots),
        query_start_loc=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        decodes=leading,
        block_size=shape.block_size,
        window=shape.window,
    )

    def normal(heads: int) -> Tensor:
        return torch.randn(tokens, heads, shape.head_dim, generator=chance).to(shape.dtype)

    return World(batch, storage, normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads))


def _held(shape: Shape, context: int, count: int) -> list[int]:
    """Blocks of the row that hold a position which some query of the step reads or writes."""
    first = 0 if shape.window is None else max(0, context - count - shape.window + 1)
    return list(range(first // shape.block_size, blocks_for(context, shape.block_size)))


def _fill_pasts(
    storage: Tensor, tables: Tensor, shape: Shape, seq_lens: list[int], counts: list[int], chance: torch.Generator
) -> None:
    """Positions that the step reads but does not write; all else keeps its poison."""
    for row, (context, count) in enumerate(zip(seq_lens, counts, strict=True)):
        first = 0 if shape.window is None else max(0, context - count - shape.window + 1)
        for position in range(first, context - count):
            block, within = int(tables[row, position // shape.block_size]), position % shape.block_size
            known = torch.randn(2, shape.kv_heads, shape.head_dim, generator=chance)
            storage[block, LAYER, :, :, within] = known.to(shape.dtype)


def alone(world: World, row: int) -> AttentionBatch:
    """The same row as a step of its own."""
    batch = world.batch
    first, stop = int(batch.query_start_loc[row]), int(batch.query_start_loc[row + 1])
    return replace(
        batch,
        tables=batch.tables[row : row + 1],
        slot_mapping=batch.slot_mapping[first:stop],
        query_start_loc=torch.tensor([0, stop - first], dtype=torch.int32),
        seq_lens=batch.seq_lens[row : row + 1],
        decodes=int(row < batch.decodes),
        memo={},
    )


def with_threads(threads: int, work: Callable[[], Tensor]) -> Tensor:
    """What `work` gives with so many threads of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return work()
    finally:
        torch.set_num_threads(before)
