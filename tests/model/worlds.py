"""Sequences over real paged storage whose free slots are poisoned, for running a decoder by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kveik.cache.layout import blocks_for
from kveik.kernels.attention import AttentionBatch
from kveik.kernels.kv_types import KvType
from kveik.model.decoder import Decoder
from kveik.model.step_batch import StepBatch

POISON = 0xFF
"""In every byte: scales are NaN."""


class PagedWorld:
    """Rows of tokens, fed chunk by chunk; block 0 belongs to nobody, blocks are scattered, windowed groups drop old ones."""

    def __init__(
        self,
        decoder: Decoder,
        rows: int,
        tokens_max: int,
        block_size: int,
        seed: int = 0,
        kv_type: KvType | None = None,
    ) -> None:
        """`kv_type`: None where keys and values are stored in the decoder's own type."""
        self.decoder = decoder
        self.block_size = block_size
        self.kv_type = kv_type
        width = blocks_for(tokens_max, block_size)
        self.tables, self.storage = [], []
        for group in decoder.spec.groups:
            order = np.random.default_rng(seed).permutation(np.arange(1, rows * width + 1, dtype=np.int32))
            self.tables.append(torch.from_numpy(order.reshape(rows, width)))
            shape = (rows * width + 1, len(group.layers), 2, group.kv_heads)
            if kv_type is None:
                self.storage.append(torch.full((*shape, block_size, group.head_dim), torch.nan, dtype=decoder.dtype))
            else:
                record = kv_type.record_bytes(block_size, group.head_dim)
                self.storage.append(torch.full((*shape, record), POISON, dtype=torch.uint8))
        self.computed = [0] * rows

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """chunks: (row, tokens), those of one token first -> logits [tokens, vocab] of each."""
        logits = self.decoder.logits(self.decoder.forward(self.batch(chunks), self.storage))
        for row, tokens in chunks:
            self.computed[row] += len(tokens)
        self._drop()
        return list(logits.split([len(tokens) for _, tokens in chunks]))

    def batch(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> StepBatch:
        """The step that computes these chunks and wants every token's logits."""
        positions = [torch.arange(self.computed[row], self.computed[row] + len(tokens)) for row, tokens in chunks]
        return StepBatch(
            token_ids=torch.tensor([token for _, tokens in chunks for token in tokens]),
            positions=torch.cat(positions),
            groups=tuple(self._group(group, [row for row, _ in chunks], positions) for group in range(len(self.tables))),
            logits_indices=torch.arange(sum(len(tokens) for _, tokens in chunks)),
        )

    def _group(self, group: int, rows: list[int], positions: list[Tensor]) -> AttentionBatch:
        size, tables = self.block_size, self.tables[group]
        counts = [len(here) for here in positions]
        slots = [tables[row, here // size].long() * size + here % size for row, here in zip(rows, positions, strict=True)]
        return AttentionBatch(
            tables=tables[rows],
            slot_mapping=torch.cat(slots),
            query_start_loc=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            seq_lens=torch.tensor([int(here[-1]) + 1 for here in positions], dtype=torch.int32),
            decodes=next((row for row, count in enumerate(counts) if count != 1), len(counts)),
            block_size=size,
            window=self.decoder.spec.groups[group].window,
            kv_type=self.kv_type,
        )

    def _drop(self) -> None:
        """Blocks that have left the window go to somebody else: their table entries become 0, their content poison."""
        for group, layers in enumerate(self.decoder.spec.groups):
            for row, computed in enumerate(self.computed):
                gone = 0 if layers.window is None else max(0, computed - layers.window + 1) // self.block_size
                for entry in range(gone):
                    self.storage[group][int(self.tables[group][row, entry])] = torch.nan if self.kv_type is None else POISON
                    self.tables[group][row, entry] = 0
