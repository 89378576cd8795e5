"""Namespaces of block keys: a sequence's tenant's, public for its beginning, or its request's alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kveik.cache.keys import KeyChain, KeySpace
from kveik.cache.public_prefixes import PublicPrefixes


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
