"""Block pool: reference counts and eviction order of one layer group's blocks. Independent of content.

States of a block:

    free    nobody holds it and it cannot be found by content
    cached  nobody holds it, but it can be found by content until it is allocated for something else
    held    one sequence or several hold it (its reference count); findable or not

            allocate                     free, findable
    free ──────────> held ─────────────────────────────────> cached
      ↑ ↑              │ ↑                                    │ │
      │ └──────────────┘ └────────────── touch ───────────────┘ │ allocate (it loses its content)
      │      free                                               │ or unmark
      └─────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator

UNFINDABLE, PARTIAL, FULL = 0, 1, 2
"""What can be found in a block: nothing; its first few slots; all of it."""


class LruOrder:
    """Unheld blocks in allocation order: first those that nobody can find, then partial ones, then full ones.

    A partial block saves less than a block of tokens, and nothing follows it. Among equals, those unheld for longest go first.
    A sequence frees its blocks from the tail to the head, so its tail goes before its head: what is left
    of a prefix is always a beginning of it, which can still be found.

    Two intrusive doubly linked lists in two arrays, with a sentinel behind the last block of each; every operation is O(1).

        spare ⇄ unfindable … ⇄ partial, freed last ⇄ spare          full ⇄ allocated next ⇄ … ⇄ freed last ⇄ full
    """

    def __init__(self, blocks: int) -> None:
        self._spare, self._full = blocks, blocks + 1
        self._after = list(range(blocks + 2))
        self._before = list(range(blocks + 2))

    def add(self, block: int, found: int) -> None:
        """The block is not held any more; `found`: what can be found in it."""
        after, before = self._after, self._before
        sentinel = self._full if found == FULL else self._spare
        left = before[sentinel] if found else sentinel
        right = after[left]
        after[left] = before[right] = block
        before[block], after[block] = left, right

    def remove(self, block: int) -> None:
        """The block is held again, because its content was found."""
        left, right = self._before[block], self._after[block]
        self._after[left], self._before[right] = right, left

    def put_first(self, block: int) -> None:
        """The block's content cannot be found any more."""
        after, before, spare = self._after, self._before, self._spare
        left, right = before[block], after[block]
        after[left], before[right] = right, left
        right = after[spare]
        after[spare] = before[right] = block
        before[block], after[block] = spare, right

    def take_spare(self, most: int, findable: bytearray) -> list[int]:
        """Remove the next blocks that cannot be found, up to so many."""
        after, spare = self._after, self._spare
        blocks, block = list[int](), after[spare]
        while len(blocks) < most and block != spare and not findable[block]:
            blocks.append(block)
            block = after[block]
        after[spare], self._before[block] = block, spare
        return blocks

    def next(self) -> int:
        """The block to allocate next. There is one."""
        block = self._after[self._spare]
        if block == self._spare:
            block = self._after[self._full]
            assert block != self._full, "no block is left"
        return block

    def full(self) -> Iterator[int]:
        """Full blocks, the next one to allocate first."""
        return self._list(self._full)

    def __iter__(self) -> Iterator[int]:
        yield from self._list(self._spare)
        yield from self._list(self._full)

    def _list(self, sentinel: int) -> Iterator[int]:
        block = self._after[sentinel]
        while block != sentinel:
            following = self._after[block]
            yield block
            block = following


class BlockPool:
    """Reference counts over blocks 0 … total - 1, and the order in which unheld ones are allocated.

    Whoever knows better than that order which full block should go makes it unfindable first.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.references = [0] * blocks
        self.findable = bytearray(blocks)
        """UNFINDABLE, PARTIAL or FULL."""

        self.available = blocks
        """Blocks that can be allocated now: free and cached."""

        self.full = 0
        """Unheld blocks of which all can be found."""

        self.partial = 0
        """Unheld blocks of which a part can be found."""

        self.party = [0] * blocks
        """Per block, the number of the party whose content it is, as far as whoever decides has said so; else 0."""

        self.idle = [blocks]
        """Per party, its unheld blocks."""

        self._order = LruOrder(blocks)
        # Added in reverse because what cannot be found goes to the front: block 0 is allocated first.
        for block in reversed(range(blocks)):
            self._order.add(block, UNFINDABLE)

    @property
    def cached(self) -> int:
        """Unheld blocks that can be found by content."""
        return self.full + self.partial

    @property
    def free_count(self) -> int:
        """Unheld blocks that cannot be found."""
        return self.available - self.cached

    @property
    def spare(self) -> int:
        """Unheld blocks that can be allocated without losing a full one."""
        return self.available - self.full

    @property
    def held(self) -> int:
        return self.total - self.available

    def count_parties(self, parties: int) -> None:
        """From now on numbers up to this are assigned."""
        self.idle = [0] * (parties + 1)
        for block in self._order:
            self.idle[self.party[block]] += 1

    def assign(self, block: int, party: int) -> None:
        """The content that can be found in the block is this party's, until it cannot be found any more."""
        if self.references[block] == 0:
            self.idle[self.party[block]] -= 1
            self.idle[party] += 1
        self.party[block] = party

    def oldest(self) -> Iterator[int]:
        """Full unheld blocks, those unheld for longest first. It may be stopped at any time, and what it gave be changed."""
        return self._order.full()

    def allocate(self, count: int) -> list[int]:
        """Hold the next blocks in order, for new content. They are not findable any more: their index entries must go too."""
        blocks = self._order.take_spare(count, self.findable)
        self.available -= len(blocks)
        # What cannot be found is nobody's.
        self.idle[0] -= len(blocks)
        while len(blocks) < count:
            block = self._order.next()
            self._leave(block)
            self.findable[block] = UNFINDABLE
            self.party[block] = 0
            blocks.append(block)
        for block in blocks:
            self.references[block] = 1
        return blocks

    def touch(self, block: int) -> None:
        """One more holder for a block that was found by content."""
        if self.references[block] == 0:
            self._leave(block)
        self.references[block] += 1

    def free(self, *blocks: int) -> None:
        """One holder less of each; after the last one a block keeps its content until it is allocated, the first freed before
        the last.
        """
        references = self.references
        for block in blocks:
            assert references[block] > 0, f"block {block} is freed but not held"
            references[block] -= 1
            if references[block] == 0:
                self._join(block)

    def mark(self, block: int, found: int) -> None:
        """A held block's content can be found from now on: FULL or PARTIAL."""
        assert self.references[block] > 0, f"block {block} is registered but not held"
        self.findable[block] = found

    def unmark(self, *blocks: int) -> None:
        """The blocks' content cannot be found any more; unheld, they are the next to be allocated, the last one first."""
        findable, references, party, idle, order = self.findable, self.references, self.party, self.idle, self._order
        for block in blocks:
            found = findable[block]
            if found and references[block] == 0:
                order.put_first(block)
                if found == FULL:
                    self.full -= 1
                else:
                    self.partial -= 1
                idle[party[block]] -= 1
                idle[0] += 1
            if found:
                findable[block] = UNFINDABLE
                party[block] = 0

    def renew(self, block: int) -> None:
        """An unheld block goes to the end of its order, as if it had been freed now."""
        self._leave(block)
        self._join(block)

    def _join(self, block: int) -> None:
        found = self.findable[block]
        self._order.add(block, found)
        self.available += 1
        self.idle[self.party[block]] += 1
        if found == FULL:
            self.full += 1
        elif found:
            self.partial += 1

    def _leave(self, block: int) -> None:
        found = self.findable[block]
        self._order.remove(block)
        self.available -= 1
        self.idle[self.party[block]] -= 1
        self.full -= found == FULL
        self.partial -= found == PARTIAL

    def check(self, holders: dict[int, int]) -> None:
        """Law 1, given how many holders each held block really has: O(blocks)."""
        unheld = list(self._order)
        assert len(unheld) == len(set(unheld)), "a block is free twice"
        assert len(unheld) == self.available, "the free count is wrong"
        assert set(unheld).isdisjoint(holders), "a block is free and held"
        assert len(unheld) + len(holders) == self.total, "a block is lost"
        assert all(count == holders.get(block, 0) for block, count in enumerate(self.references)), "a count is wrong"
        parties = [self.party[block] for block in unheld]
        assert self.idle == [parties.count(party) for party in range(len(self.idle))], "a party's idle blocks are miscounted"
        found = [self.findable[block] for block in unheld]
        assert found == sorted(found), "blocks of which less can be found are not allocated first"
        assert (self.partial, self.full) == (found.count(PARTIAL), found.count(FULL)), "a count of cached blocks is wrong"
        assert self.free_count + self.cached + self.held == self.total
