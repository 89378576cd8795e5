"""Beginnings of prompts that the operator has declared public: all tenants share their blocks. Token-exact; knows no keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kveik.cache.prefix_cache import common_prefix


class PublicPrefixes:
    """How much of a prompt is public: its whole blocks that lie in the part it has in common with a declared prefix.

        declared   S S S S S S S S S S              blocks of 4
        prompt     S S S S S S S S S u u u          two blocks are public; the third holds u, and is not
        prompt     S S S S S S u u u u u u          one block is
        prompt     u S S S S S S S S S              none

    Found by the first block's tokens, so that a prompt which begins otherwise costs one look.
    """

    def __init__(self, prefixes: Iterable[Sequence[int]], block_size: int) -> None:
        self._size = block_size
        self._by_start: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for prefix in dict.fromkeys(tuple(prefix[: len(prefix) // block_size * block_size]) for prefix in prefixes):
            if prefix:
                self._by_start.setdefault(prefix[:block_size], []).append(prefix)

    def __len__(self) -> int:
        """Prefixes that have at least one whole block."""
        return sum(map(len, self._by_start.values()))

    def blocks(self, tokens: Sequence[int]) -> int:
        """Leading whole blocks of a prompt that are everybody's: O(tokens) at most, and O(1) where none is."""
        if not self._by_start:
            return 0
        known = self._by_start.get(tuple(tokens[: self._size]), ())
        return max((self._common(prefix, tokens) for prefix in known), default=0) // self._size

    def _common(self, prefix: tuple[int, ...], tokens: Sequence[int]) -> int:
        begin = tuple(tokens[: len(prefix)])
        # Comparing whole tuples is quick; counting is for the few that differ.
        return len(prefix) if begin == prefix else common_prefix(prefix, begin)
