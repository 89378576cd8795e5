"""One layer group's blocks: the pool and the index, kept in step with each other. Knows no sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

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
    """Blocks of one group, found by content and taken in eviction order: the pool's own, least recently used first, unless
    whoever decides on evictions (`evictor.py`) makes another block free in time."""

    def __init__(self, group: LayerGroup, blocks: int) -> None:
        self.group = group
        self.window = group.window
        self.pool = BlockPool(blocks)
        self.index = PrefixCache()
        self.give_up: Callable[[int], None] | None = None
        """Called when the next so many blocks to take are full ones: makes the content unfindable that should go before it."""

        self.forgotten: Callable[[bytes], None] | None = None
        """Called with the key of a full block that cannot be found any more."""

    @property
    def usage(self) -> GroupUsage:
        pool = self.pool
        return GroupUsage(held=pool.held, cached=pool.cached, free=pool.free, total=pool.total)

    def first_needed(self, computed: int, block_size: int) -> int:
        """Number of the first block that a query at position `computed` or later reads: i - window < j."""
        if self.window is None or computed < self.window:
            return 0
        return (computed - self.window + 1) // block_size

    def take(self, count: int) -> list[int]:
        """Hold blocks for new content; what they held before is forgotten."""
        pool = self.pool
        short = count - (pool.available - pool.full)
        if short > 0 and self.give_up is not None:
            self.give_up(short)
        blocks = pool.take(count)
        for block in blocks:
            if block in self.index:
                self._drop(block)
        return blocks

    def shed(self, count: int) -> None:
        """Give up the content of full cached blocks, although nobody needs the blocks now. There are as many."""
        pool = self.pool
        left = pool.full - count
        if self.give_up is not None:
            self.give_up(count)
        self.forget(list(islice(pool.oldest(), max(0, pool.full - left))))

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

    def forget(self, blocks: Sequence[int]) -> None:
        """These blocks cannot be found any more; those held stay held."""
        for block in blocks:
            self._drop(block)
            self.pool.unmark(block)

    def lose(self, keys: Iterable[bytes]) -> None:
        """The blocks with this content, if nobody holds them, are the next to be taken; `forgotten` is not called."""
        index, references = self.index, self.pool.references
        blocks = [block for key in keys if (block := index.by_key.get(key)) is not None and references[block] == 0]
        for block in blocks:
            index.drop(block)
        self.pool.unmark(*blocks)

    def _drop(self, block: int) -> None:
        if block in self.index:
            key = self.index.drop(block)
            if key is not None and self.forgotten is not None:
                self.forgotten(key)

    def check(self, holders: dict[int, int]) -> None:
        """Laws of the pool and the index, and that both agree on what can be found."""
        self.pool.check(holders)
        self.index.check()
        full = {block for block in range(self.pool.total) if self.pool.findable[block] == FULL}
        partial = {block for block in range(self.pool.total) if self.pool.findable[block] == PARTIAL}
        assert full == set(self.index.by_key.values()), "pool and index disagree on which blocks can be found"
        assert full | partial == set(self.index.blocks()), "pool and index disagree on what can be found"
