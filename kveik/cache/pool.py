"""All blocks of one layer group: who is free, cached or held, and which free one is taken next. Knows no content.

States of a block:

    free    nobody holds it and it cannot be found by content
    cached  nobody holds it, but it can be found by content until it is taken for something else
    held    one sequence or several hold it (its reference count); findable or not

             take                      give_back, findable
    free ──────────> held ─────────────────────────────────> cached
      ↑ ↑              │ ↑                                    │ │
      │ └──────────────┘ └────────────── hold ────────────────┘ │ take (it loses its content)
      │   give_back                                             │ or unmark
      └─────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class EvictionOrder(Protocol):
    """The order in which unheld blocks are taken. Every unheld block is in it exactly once."""

    def add(self, block: int, *, findable: bool) -> None:
        """The block is not held any more."""
        ...

    def remove(self, block: int) -> None:
        """The block is held again, because its content was found."""
        ...

    def pop(self) -> int:
        """Remove and return the block to take next. There is one."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """Blocks, the next one to take first."""
        ...


class LruOrder:
    """Blocks that nobody can find first; then those that have been unheld for longest.

    A sequence gives its blocks back from the tail to the head, so its tail goes before its head: what is left of a prefix
    is always a beginning of it, which can still be found.

    An intrusive doubly linked list in two arrays, with a sentinel behind the last block; every operation is O(1).

        sentinel ⇄ taken next ⇄ … ⇄ freed last ⇄ sentinel
    """

    def __init__(self, blocks: int) -> None:
        self._after = [blocks] * (blocks + 1)
        self._before = [blocks] * (blocks + 1)
        self._sentinel = blocks
        self._count = 0

    def add(self, block: int, *, findable: bool) -> None:
        after, before, sentinel = self._after, self._before, self._sentinel
        left = before[sentinel] if findable else sentinel
        right = after[left]
        after[left] = before[right] = block
        before[block], after[block] = left, right
        self._count += 1

    def remove(self, block: int) -> None:
        left, right = self._before[block], self._after[block]
        self._after[left], self._before[right] = right, left
        self._count -= 1

    def pop(self) -> int:
        block = self._after[self._sentinel]
        assert block != self._sentinel, "no block is left"
        self.remove(block)
        return block

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        block = self._after[self._sentinel]
        while block != self._sentinel:
            yield block
            block = self._after[block]


class BlockPool:
    """Reference counts over blocks 0 … total - 1, and the order in which unheld ones are taken."""

    def __init__(self, blocks: int, order: EvictionOrder | None = None) -> None:
        self.total = blocks
        self.references = [0] * blocks
        self.findable = bytearray(blocks)
        self.cached = 0
        """Unheld blocks that can be found by content."""

        self._order: EvictionOrder = LruOrder(blocks) if order is None else order
        # Added in reverse because what cannot be found goes to the front: block 0 is taken first.
        for block in reversed(range(blocks)):
            self._order.add(block, findable=False)

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free and cached."""
        return len(self._order)

    @property
    def free(self) -> int:
        """Unheld blocks that cannot be found."""
        return len(self._order) - self.cached

    @property
    def held(self) -> int:
        return self.total - len(self._order)

    def take(self) -> int:
        """Hold the next block in order, for new content. It is not findable any more: its index entry must go too."""
        block = self._order.pop()
        self.references[block] = 1
        self.cached -= self.findable[block]
        self.findable[block] = 0
        return block

    def hold(self, block: int) -> None:
        """One more holder for a block that was found by content."""
        if self.references[block] == 0:
            self._order.remove(block)
            self.cached -= self.findable[block]
        self.references[block] += 1

    def give_back(self, block: int) -> None:
        """One holder less; after the last one the block keeps its content until it is taken."""
        assert self.references[block] > 0, f"block {block} is given back but not held"
        self.references[block] -= 1
        if self.references[block] == 0:
            self.cached += self.findable[block]
            self._order.add(block, findable=bool(self.findable[block]))

    def mark(self, block: int) -> None:
        """A held block's content can be found from now on."""
        assert self.references[block] > 0, f"block {block} is registered but not held"
        self.findable[block] = 1

    def unmark(self, block: int) -> None:
        """The block's content cannot be found any more; unheld, it is the next to be taken."""
        if not self.findable[block]:
            return
        self.findable[block] = 0
        if self.references[block] == 0:
            self.cached -= 1
            self._order.remove(block)
            self._order.add(block, findable=False)

    def check(self, holders: dict[int, int]) -> None:
        """Law 1, given how many holders each held block really has: O(blocks)."""
        unheld = list(self._order)
        assert len(unheld) == len(set(unheld)), "a block is free twice"
        assert len(unheld) == len(self._order), "the free count is wrong"
        assert set(unheld).isdisjoint(holders), "a block is free and held"
        assert len(unheld) + len(holders) == self.total, "a block is lost"
        assert all(count == holders.get(block, 0) for block, count in enumerate(self.references)), "a count is wrong"
        assert self.cached == sum(self.findable[block] for block in unheld), "the cached count is wrong"
        assert self.free + self.cached + self.held == self.total
