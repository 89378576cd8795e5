"""Prefix cache: content -> block of one layer group. Independent of holders, sequences and tensors.

    by key      key of a full block -> block
    children    parent key -> [(tokens, block), …] sorted by tokens: full blocks and partial tails that follow this parent

A block has one entry at most, so the index is bounded by the pool. The best partial match among the children is a neighbour
of the place where the wanted tokens would be inserted, because in lexicographic order common prefixes shrink with distance.

What is kept per block are tuples of numbers and bytes alone: Python's cyclic collector stops looking at those once it has seen
them, where lists and classes would be walked again and again, with a pause that grows with the pool.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

Tokens = tuple[int, ...]

_FEW = 16
"""So many children are kept in a tuple, and more in a list, into which inserting is quicker."""


Children = tuple[tuple[Tokens, int], ...] | list[tuple[Tokens, int]]


class Entry(NamedTuple):
    """What a block is known to hold: `tokens` after `parent`; `key` where it is full."""

    parent: bytes
    tokens: Tokens
    key: bytes | None


def common_prefix(left: Tokens, right: Tokens) -> int:
    """How many leading tokens are equal."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


class PrefixCache:
    """Content -> block, for one layer group."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, int] = {}
        self._children: dict[bytes, Children] = {}
        self._entries: dict[int, tuple[bytes, Tokens, bytes | None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        """Whether the block is known to hold anything."""
        return block in self._entries

    def entry(self, block: int) -> Entry | None:
        """What the block is known to hold."""
        entry = self._entries.get(block)
        return None if entry is None else Entry(*entry)

    def longest(self, parent: bytes, tokens: Tokens) -> tuple[int, int]:
        """(block, tokens in common), of the child of `parent` that has most tokens in common; (0, 0) where none has any.

        Time O(log children).
        """
        children = self._children.get(parent)
        if not children:
            return 0, 0
        place = bisect_left(children, (tokens, -1))
        best = (0, 0)
        for known, block in children[max(place - 1, 0) : place + 1]:
            common = common_prefix(known, tokens)
            if common > best[1]:
                best = (block, common)
        return best

    def add_full(self, block: int, parent: bytes, tokens: Tokens, key: bytes) -> bool:
        """Register a full block, in place of a shorter entry it may have. False: that content had a block already."""
        if block in self._entries:
            self.drop(block)
        if key in self.by_key:
            return False
        self.by_key[key] = block
        self._insert(block, parent, tokens, key)
        return True

    def add_partial(self, block: int, parent: bytes, tokens: Tokens) -> bool:
        """Register a block's first tokens, in place of a shorter entry it may have.

        False: the same tokens, or more that begin with them, can be found in another block already.
        """
        if block in self._entries:
            self.drop(block)
        children = self._children.get(parent, ())
        place = bisect_left(children, (tokens, -1))
        if place < len(children) and children[place][0][: len(tokens)] == tokens:
            return False
        self._insert(block, parent, tokens, None)
        return True

    def drop(self, block: int) -> bytes | None:
        """Forget what the block holds. Its key, where it was full."""
        parent, tokens, key = self._entries.pop(block)
        if key is not None:
            del self.by_key[key]
        children = self._children[parent]
        if len(children) == 1:
            del self._children[parent]
            return key
        place = bisect_left(children, (tokens, block))
        if isinstance(children, list):
            del children[place]
        else:
            self._children[parent] = children[:place] + children[place + 1 :]
        return key

    def children(self, parent: bytes) -> list[int]:
        """Blocks that follow `parent`."""
        return [block for _, block in self._children.get(parent, ())]

    def blocks(self) -> list[int]:
        """All blocks with an entry."""
        return list(self._entries)

    def _insert(self, block: int, parent: bytes, tokens: Tokens, key: bytes | None) -> None:
        self._entries[block] = (parent, tokens, key)
        item = (tokens, block)
        children = self._children.get(parent)
        if children is None:
            self._children[parent] = (item,)
            return
        place = bisect_left(children, item)
        if isinstance(children, list):
            children.insert(place, item)
        elif len(children) < _FEW:
            self._children[parent] = (*children[:place], item, *children[place:])
        else:
            self._children[parent] = [*children[:place], item, *children[place:]]

    def check(self) -> None:
        """Every entry is in both places exactly once, and the children are sorted: O(entries)."""
        full = {key: block for block, (_, _, key) in self._entries.items() if key is not None}
        assert full == self.by_key, "a key leads to a block without that entry"
        listed = 0
        for parent, children in self._children.items():
            assert children, "a parent without children is kept"
            assert list(children) == sorted(children), "children are out of order"
            listed += len(children)
            for tokens, block in children:
                assert self._entries[block][:2] == (parent, tokens), "a child differs from its entry"
        assert listed == len(self._entries), "an entry is listed twice or never"
