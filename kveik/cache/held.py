"""Laws between a sequence, its row in the block tables, and the blocks it holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kveik.cache.group import GroupBlocks
from kveik.cache.sequence_blocks import SequenceBlocks


def check_blocks(seq: SequenceBlocks, number: int, group: GroupBlocks, table: NDArray[np.int32], size: int) -> None:
    """The table shows what the sequence holds; what can be found of it holds these tokens; the rest is its alone.

    `number`: the group's. `table`: int32 [rows, blocks per sequence at most]. `size`: tokens per block. Raises AssertionError.
    """
    blocks, first, row = seq.blocks[number], seq.firsts[number], table[seq.row]
    assert row[: len(blocks)].tolist() == blocks, "the table differs from the sequence"
    assert not any(blocks[:first]), "a block outside the window is still listed"
    assert not row[len(blocks) :].any(), "the table goes on behind the sequence's last block"
    assert seq.committed <= len(blocks) * size <= table.shape[1] * size
    for place in range(first, len(blocks)):
        entry = group.index.entry(blocks[place])
        if entry is not None:
            assert entry.parent == seq.chain.parent(place), "a block is found under another prefix"
            assert entry.tokens == tuple(seq.tokens[place * size : place * size + len(entry.tokens)]), (
                "a block is found by other tokens"
            )
            assert place * size + len(entry.tokens) <= seq.committed, "a block was registered before it was written"
        if place >= seq.registered:
            assert group.pool.references[blocks[place]] == 1, "a block that is being written is shared"
