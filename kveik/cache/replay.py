"""The production pool and index under requests of which only the names of their blocks are known. No tokens, no clock.

One request after the other: what it finds is held, the rest is computed into fresh blocks, everything is given back and learnt
from, and the pool is brought back to its bound. A hit is the longest cached run of full blocks from the first on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kveik.cache.eviction.below import StoreBelow
from kveik.cache.eviction.policy import EvictionPolicy, Key, Visit
from kveik.cache.evictor import Evictor
from kveik.cache.group import GroupBlocks
from kveik.cache.layout import LayerGroup

_ROOT = b""
_WORDS = (0,)
"""A block's tokens, which nobody reads here: a key stands for its content and everything before it."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    came: float
    """Seconds since the trace began."""

    keys: tuple[Key, ...]
    """Of its prompt's blocks in order, the last one perhaps partial; equal keys mean equal content from the first block on."""

    full: int
    """How many of them are whole."""

    tokens_out: int


@dataclass(frozen=True, slots=True)
class Found:
    """Where a request's blocks were."""

    pool: int
    below: int = 0


class Replay:
    """A pool of one layer group, its index and policy, and perhaps a store below."""

    def __init__(
        self,
        blocks: int,
        policy: EvictionPolicy | None,
        *,
        beside: int,
        below: StoreBelow | None = None,
        plain: bool = False,
    ) -> None:
        """`blocks`: that stay cached between requests; `beside`: more for the request that runs. `policy` None: the pool's LRU.

        `plain`: as simulations of LRU have it that know of blocks only. A prompt's last, partial block counts as a full one; a
        prompt's beginning is the first to go; and what follows it, found by nobody any more, is renewed by whoever computes it.
        """
        self._blocks = blocks
        self._group = GroupBlocks(LayerGroup((0,), 1, 1, None), blocks + beside)
        self._evictor = Evictor([self._group], policy)
        self._below = below
        self._plain = plain
        if below is not None:
            self._evictor.offer = self._offer

    def serve(self, request: TraceRequest) -> Found:
        """One request from beginning to end."""
        group, keys = self._group, request.keys
        self._evictor.now = request.came
        kept = len(keys) if self._plain else request.full
        by_key, pool = group.index.by_key, group.pool
        held = []
        for key in keys[:kept]:
            block = by_key.get(key)
            if block is None:
                break
            pool.hold(block)
            held.append(block)
        found = Found(len(held), self._found_below(keys[len(held) : kept]))
        for place in range(len(held), len(keys)):
            parent = keys[place - 1] if place else _ROOT
            held.append(self._compute(keys[place], parent, keep=place < kept))
        for block in held if self._plain else reversed(held):
            pool.give_back(block)
        self._finish(keys[:kept], request)
        return found

    def _compute(self, key: Key, parent: Key, *, keep: bool) -> int:
        group = self._group
        if self._plain and (cached := group.index.by_key.get(key)) is not None:
            group.pool.hold(cached)
            return cached
        block = group.take()
        if keep:
            group.register_full(block, parent, _WORDS, key)
        return block

    def _finish(self, keys: Sequence[Key], request: TraceRequest) -> None:
        if self._below is not None:
            self._below.policy.used(Visit(keys, 0, request.tokens_out, request.came, request.came))
        self._evictor.finished(Visit(keys, 0, request.tokens_out, request.came, request.came))
        while self._group.pool.cached > self._blocks:
            self._group.shed()

    def _found_below(self, keys: Sequence[Key]) -> int:
        below = self._below
        if below is None:
            return 0
        return next((place for place, key in enumerate(keys) if not below.holds(key)), len(keys))

    def _offer(self, key: Key) -> None:
        assert self._below is not None
        self._below.offer(key, lambda _: True, self._evictor.now)

    @property
    def wants_lesson(self) -> bool:
        return any(policy.wants_lesson for policy in self._policies())

    def learn(self) -> None:
        """Off a request's path: whatever policy has enough to learn from learns."""
        for policy in self._policies():
            if policy.wants_lesson:
                policy.learn(self._evictor.now)

    def _policies(self) -> list[EvictionPolicy]:
        below = self._below.policy if self._below is not None else None
        return [policy for policy in (self._evictor.policy, below) if policy is not None]

    def check(self) -> None:
        """Laws of the pool, the index, the policies and the bounds: O(blocks). Raises AssertionError."""
        self._group.check({})
        self._evictor.check(frozenset())
        assert self._group.pool.cached <= self._blocks, "more stays cached than may"
        if self._below is not None:
            self._below.check()
