"""Blocks of one layer group: its pool and its prefix cache, kept in step with each other. Independent of sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kveik.cache.block_pool import FULL, PARTIAL, BlockPool
from kveik.cache.layout import LayerGroup
from kveik.cache.prefix_cache import PrefixCache, Tokens


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """How many blocks of a group are in which state; total = held + cached + free."""

    held: int
    cached: int
    free: int
    total: int


class GroupBlocks:
    """Blocks of one group, found by content and allocated in the pool's order, least recently used first.

    The evictor changes that order: it makes the content of other blocks unfindable first.
    """

    def __init__(self, group: LayerGroup, blocks: int) -> None:
        self.group = group
        self.window = group.window
        self.pool = BlockPool(blocks)
        self.index = PrefixCache()

    @property
    def usage(self) -> GroupUsage:
        pool = self.pool
        return GroupUsage(held=pool.held, cached=pool.cached, free=pool.free_count, total=pool.total)

    def first_needed(self, computed: int, block_size: int) -> int:
        return self.group.first_needed(computed, block_size)

    def allocate(self, count: int) -> list[int]:
        """Hold blocks for new content, and drop the content they have."""
        blocks = self.pool.allocate(count)
        for block in blocks:
            if block in self.index:
                self.index.drop(block)
        return blocks

    def register_full(self, block: int, parent: bytes, tokens: Tokens, key: bytes) -> bool:
        """The held block's slots are all written. False: that content has a block already, and the first one stays."""
        added = self.index.add_full(block, parent, tokens, key)
        if added:
            self.pool.mark(block, FULL)
        else:
            self.pool.unmark(block)
        return added

    def register_partial(self, block: int, parent: bytes, tokens: Tokens) -> None:
        """The held block's first len(tokens) slots are written; later slots belong to nobody."""
        if self.index.add_partial(block, parent, tokens):
            self.pool.mark(block, PARTIAL)
        else:
            self.pool.unmark(block)

    def remove(self, blocks: Sequence[int]) -> list[bytes]:
        """These blocks cannot be found by content any more; those held stay held. Returns the keys of the full ones."""
        keys = [key for block in blocks if block in self.index and (key := self.index.drop(block)) is not None]
        self.pool.unmark(*blocks)
        return keys

    def evict(self, keys: Iterable[bytes]) -> None:
        """The blocks with this content, if nobody holds them, are the next to be allocated."""
        index, references = self.index, self.pool.references
        blocks = [block for key in keys if (block := index.by_key.get(key)) is not None and references[block] == 0]
        for block in blocks:
            index.drop(block)
        self.pool.unmark(*blocks)

    def check(self, holders: dict[int, int]) -> None:
        """Laws of the pool and the index, and that both agree on what can be found."""
        self.pool.check(holders)
        self.index.check()
        full = {block for block in range(self.pool.total) if self.pool.findable[block] == FULL}
        partial = {block for block in range(self.pool.total) if self.pool.findable[block] == PARTIAL}
        assert full == set(self.index.by_key.values()), "pool and index disagree on which blocks can be found"
        assert full | partial == set(self.index.blocks()), "pool and index disagree on what can be found"
