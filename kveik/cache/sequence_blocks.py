"""Sequence blocks: keys, blocks and progress of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kveik.cache.block_pool import BlockPool
from kveik.cache.eviction.policy import Retention
from kveik.cache.group import GroupBlocks
from kveik.cache.keys import KeyChain, block_key
from kveik.cache.layout import BlockCopy
from kveik.cache.prefix_match import PrefixMatch


@dataclass(frozen=True, slots=True)
class Admission:
    """What a sequence got when it was admitted."""

    row: int
    matched: int
    """Tokens whose keys and values are there already, once `copies` are done."""

    copies: tuple[BlockCopy, ...]


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """One sequence's keys and blocks, from `open` to `close`.

    blocks[group]   [ 0 0 | b b b | b b ]
                      ↑     ↑       └ not all slots written yet
                      │     └ registered: whole, can be found by content
                      └ firsts[group]: left the window, freed; placeholders that mean nothing
    """

    sequence_id: int
    tokens: list[int]
    """The sequence's own list, read only; it grows with every sampled token."""

    chain: KeyChain
    blocks: list[list[int]]
    firsts: list[int]
    tenant: bytes = b""
    """The tenant for which blocks are allocated."""

    retention: Retention | None = None
    """What its request asked for about the blocks that it leaves behind."""

    row: int | None = None
    """Row in the block tables while it holds blocks."""

    matched: int = 0
    """Tokens that were found by content at the latest admission."""

    committed: int = 0
    """Tokens up to which it was last committed: written, and their step has finished. It may have computed some more."""

    registered: int = 0
    """Whole blocks that have been registered or were found."""

    prompt: int = field(init=False)
    """Tokens that it was opened with."""

    came: float | None = None
    """When it was first admitted, in seconds."""

    private: bool = False
    """Whether what it fills is not to be found: the cache was reset while it ran."""

    kept: int = 0
    """Whole blocks that it ever left findable when it gave its blocks back; some may have gone since."""

    target: int = 0
    """Tokens that it computes before it goes on one by one; given at admission."""

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def held(self) -> bool:
        return self.row is not None

    def keys_of(self, first: int, length: int) -> list[bytes]:
        """Keys of the first `length` tokens' blocks from number `first` on, that of a partial last block included."""
        size = self.chain.block_size
        whole = length // size
        keys = self.chain.extend(self.tokens, whole)[first:whole]
        if length % size:
            keys.append(block_key(self.chain.parent(whole), self.tokens[whole * size : length]))
        return keys

    def keys_to_compute(self) -> list[bytes]:
        """Keys of the blocks that it computes before it goes on one by one."""
        return self.keys_of(self.registered, self.target)

    def share(self, number: int, match: PrefixMatch, pool: BlockPool, table: NDArray[np.int32]) -> None:
        """Hold the matched blocks of group `number` too."""
        first, matched = match.firsts[number], match.blocks[number]
        for block in matched:
            pool.touch(block)
        self.firsts[number] = first
        self.blocks[number] = [0] * first + list(matched)
        table[self.row, first : match.full] = matched

    def truncate(self, number: int, needed: int, pool: BlockPool, table: NDArray[np.int32]) -> None:
        """Free the blocks of group `number` behind its first `needed`."""
        blocks = self.blocks[number]
        pool.free(*reversed(blocks[needed:]))
        table[self.row, needed : len(blocks)] = 0
        del blocks[needed:]

    def leave_window(self, number: int, first: int, pool: BlockPool, table: NDArray[np.int32]) -> None:
        """Free the blocks of group `number` before its block number `first`, which no later query reads."""
        blocks = self.blocks[number]
        for block in range(self.firsts[number], first):
            pool.free(blocks[block])
            blocks[block] = 0
            table[self.row, block] = 0
        self.firsts[number] = first

    def released(self) -> None:
        """Note that all its blocks are free and its row is another's."""
        self.kept = 0 if self.private else max(self.kept, self.registered)
        self.private = False
        self.row, self.matched, self.committed, self.registered = None, 0, 0, 0
        self.blocks = [[] for _ in self.blocks]
        self.firsts = [0] * len(self.firsts)

    def check(self, number: int, group: GroupBlocks, table: NDArray[np.int32]) -> None:
        """The table shows the sequence's blocks; those found by content hold its tokens; the rest have no other holder.

        `number`: the group's. `table`: int32 [rows, blocks per sequence at most]. Raises AssertionError.
        """
        blocks, first, row, size = self.blocks[number], self.firsts[number], table[self.row], self.chain.block_size
        assert row[: len(blocks)].tolist() == blocks, "the table differs from the sequence"
        assert not any(blocks[:first]), "a block outside the window is still listed"
        assert not row[len(blocks) :].any(), "the table goes on behind the sequence's last block"
        assert self.committed <= len(blocks) * size <= table.shape[1] * size
        for place in range(first, len(blocks)):
            entry = group.index.entry(blocks[place])
            if entry is not None:
                assert entry.parent == self.chain.parent(place), "a block is found under another prefix"
                content = tuple(self.tokens[place * size : place * size + len(entry.tokens)])
                assert entry.tokens == content, "a block is found by other tokens"
                assert place * size + len(entry.tokens) <= self.committed, "a block was registered before it was written"
            if place >= self.registered:
                assert group.pool.references[blocks[place]] == 1, "a block that is being written is shared"
