"""One layer group's blocks: the pool and the index, kept in step with each other. Knows no sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kveik.cache.layout import LayerGroup
from kveik.cache.pool import BlockPool, EvictionOrder
from kveik.cache.prefix import PrefixIndex, Tokens


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """How many blocks of a group are in which state; total = held + cached + free."""

    held: int
    cached: int
    free: int
    total: int


class GroupBlocks:
    """Blocks of one group, found by content and taken in eviction order."""

    def __init__(self, group: LayerGroup, blocks: int, order: EvictionOrder | None = None) -> None:
        self.group = group
        self.window = group.window
        self.pool = BlockPool(blocks, order)
        self.index = PrefixIndex()

    @property
    def usage(self) -> GroupUsage:
        pool = self.pool
        return GroupUsage(held=pool.held, cached=pool.cached, free=pool.free, total=pool.total)

    def first_needed(self, computed: int, block_size: int) -> int:
        """Number of the first block that a query at position `computed` or later reads: i - window < j."""
        if self.window is None or computed < self.window:
            return 0
        return (computed - self.window + 1) // block_size

    def take(self) -> int:
        """Hold a block for new content; what it held before is forgotten."""
        block = self.pool.take()
        if block in self.index:
            self.index.drop(block)
        return block

    def register_full(self, block: int, parent: bytes, tokens: Tokens, key: bytes) -> None:
        """The held block's slots are all written. Where that content has a block already, the first one stays."""
        if self.index.add_full(block, parent, tokens, key):
            self.pool.mark(block)
        else:
            self.pool.unmark(block)

    def register_partial(self, block: int, parent: bytes, tokens: Tokens) -> None:
        """The held block's first len(tokens) slots are written; later slots belong to nobody."""
        if self.index.add_partial(block, parent, tokens):
            self.pool.mark(block)
        else:
            self.pool.unmark(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """These blocks cannot be found any more; those held stay held."""
        for block in blocks:
            self.index.drop(block)
            self.pool.unmark(block)

    def check(self, holders: dict[int, int]) -> None:
        """Laws of the pool and the index, and that both agree on what can be found."""
        self.pool.check(holders)
        self.index.check()
        findable = {block for block in range(self.pool.total) if self.pool.findable[block]}
        assert findable == set(self.index.blocks()), "pool and index disagree on what can be found"
