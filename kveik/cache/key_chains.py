"""Key chains: the keys of a sequence's blocks in its tenant's namespace, a public one, or its request's alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kveik.cache.keys import KeyChain, KeySpace
from kveik.cache.prefix_cache import common_prefix


class PublicPrefixes:
    """Beginnings of prompts that the operator has declared public: all tenants share their blocks.

    A prompt shares the whole blocks that lie in the part it has in common with a declared prefix.

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


@dataclass(slots=True)
class _Private:
    """A namespace that one request's choices share while prefix caching is off."""

    open: int = 0
    """Choices that have not been closed."""

    parents: dict[bytes, None] = field(default_factory=dict)
    """Parents of all blocks ever registered in it, in order."""


class KeyChains:
    """Makes the chain of a sequence's keys. Without caching it knows what a request leaves, so that it can be forgotten."""

    def __init__(self, space: KeySpace, block_size: int, *, caching: bool, public: PublicPrefixes | None) -> None:
        self.space = space
        self.caching = caching
        self._block_size = block_size
        self._public = public if public is not None and caching else PublicPrefixes((), block_size)
        self._private: dict[bytes, _Private] = {}

    def open(
        self,
        tokens: Sequence[int],
        *,
        request: str,
        tenant: bytes,
        salt: str | None,
        adapter: bytes | None,
        media: bytes | None,
    ) -> KeyChain:
        """The chain of a sequence that begins with these tokens."""
        private = None if self.caching else request
        namespace = self.space.namespace(tenant=tenant, salt=salt, adapter=adapter, media=media, private=private)
        if not self.caching:
            self._private.setdefault(namespace, _Private()).open += 1
        public = self.space.public(adapter=adapter, media=media)
        return KeyChain(namespace, self._block_size, public, self._public.blocks(tokens))

    def remember(self, chain: KeyChain, parent: bytes) -> None:
        """Without caching: a block behind this parent was registered."""
        if not self.caching:
            self._private[chain.namespace].parents[parent] = None

    def close(self, chain: KeyChain) -> tuple[bytes, ...]:
        """A sequence is closed. Parents of all blocks that nobody may find any more."""
        space = self._private.get(chain.namespace)
        if space is None:
            return ()
        space.open -= 1
        if space.open:
            return ()
        del self._private[chain.namespace]
        return tuple(space.parents)
