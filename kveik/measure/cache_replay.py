"""The production pool, index and directory under requests of which only the names of their blocks are known. No clock.

One request after the other: what it finds is held, the rest is computed into fresh blocks, everything is given back and learnt
from, and the pool is brought back to its bound. A hit is the longest cached run of full blocks from the first on. What the
directory orders below the pool is done at once, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kveik.cache.eviction.policy import EvictionPolicy, Key, Visit
from kveik.cache.evictor import Evictor
from kveik.cache.group import GroupBlocks
from kveik.cache.layout import LayerGroup
from kveik.offload.tier import Tier, TierSpec
from kveik.offload.tier_chain import TierChain
from kveik.offload.transfer import Spill

_GROUP = LayerGroup((0,), 1, 1, None)
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


def tier_of(blocks: int, policy: EvictionPolicy, factor: float | None) -> Tier:
    """A tier that holds so many blocks. `factor`: of its write filter; None: everything is written."""
    spec = TierSpec(name="below", capacity_bytes=blocks, record_bytes=(1,), factor=factor)
    return Tier(spec, policy)


class Replay:
    """A pool of one layer group, its index and policy, and perhaps tiers below."""

    def __init__(
        self,
        blocks: int,
        policy: EvictionPolicy | None,
        *,
        beside: int,
        below: Sequence[Tier] = (),
        plain: bool = False,
    ) -> None:
        """`blocks`: that stay cached between requests; `beside`: more for the request that runs. `policy` None: the pool's LRU,
        where nothing lies below.

        `plain`: as simulations of LRU have it that know of blocks only. A prompt's last, partial block counts as a full one; a
        prompt's beginning is the first to go; and what follows it, found by nobody any more, is renewed by whoever computes it.
        """
        assert policy is not None or not below, "without a policy nothing is offered to the tiers"
        self.writes = 0
        """Records written below, into whichever tier."""

        self._blocks = blocks
        self._group = GroupBlocks(_GROUP, blocks + beside)
        self._evictor = Evictor([self._group], policy, record_facts=bool(below))
        self._below = TierChain([_GROUP], 1, below)
        self._now = 0.0
        self._plain = plain

    def serve(self, request: TraceRequest) -> Found:
        """One request from beginning to end."""
        group, keys = self._group, request.keys
        self._now = request.came
        kept = len(keys) if self._plain else request.full
        by_key, pool = group.index.by_key, group.pool
        held = []
        for key in keys[:kept]:
            block = by_key.get(key)
            if block is None:
                break
            pool.hold(block)
            held.append(block)
        found = Found(len(held), self._found_below(keys[:kept], len(held)))
        if self._plain:
            self._compute_plainly(keys, held)
        else:
            self._compute(keys, kept, held)
        pool.give_back(*(held if self._plain else reversed(held)))
        self._finish(keys[:kept], request)
        return found

    def _found_below(self, keys: Sequence[Key], start: int) -> int:
        """Blocks behind the pool's hit that loading would bring."""
        by_key = self._group.index.by_key
        found = self._below.found(keys, (start, start), lambda _, key: key in by_key)
        return int(found.cuts[-1]) - start

    def _compute(self, keys: Sequence[Key], kept: int, held: list[int]) -> None:
        """What follows the blocks held, the first `kept` of them all to be found again."""
        group, start = self._group, len(held)
        held += self._evictor.allocate(0, len(keys) - start, b"", self._now)
        for place in range(start, kept):
            group.register_full(held[place], keys[place - 1] if place else _ROOT, _WORDS, keys[place])

    def _compute_plainly(self, keys: Sequence[Key], held: list[int]) -> None:
        group = self._group
        for place in range(len(held), len(keys)):
            block = group.index.by_key.get(keys[place])
            if block is not None:
                group.pool.hold(block)
            else:
                (block,) = self._evictor.allocate(0, 1, b"", self._now)
                group.register_full(block, keys[place - 1] if place else _ROOT, _WORDS, keys[place])
            held.append(block)

    def _finish(self, keys: Sequence[Key], request: TraceRequest) -> None:
        self._evictor.finished(Visit(keys, 0, request.tokens_out, request.came, request.came))
        excess = self._group.pool.cached - self._blocks
        if excess > 0:
            self._evictor.evict(0, excess, self._now)
        self._below.absorb(self._evictor.take_facts(), self._now)
        for one in self._below.take_orders():
            if isinstance(one, Spill):
                self._below.stored(one.target, one.key, one.group)
                self.writes += 1

    @property
    def wants_lesson(self) -> bool:
        return self._evictor.wants_lesson or self._below.wants_lesson

    def learn(self) -> None:
        """Off a request's path: whatever policy has enough to learn from learns."""
        self._evictor.learn(self._now)
        self._below.learn(self._now)

    def check(self) -> None:
        """Laws of the pool, the index, the policies and the bounds: O(blocks). Raises AssertionError."""
        self._group.check({})
        self._evictor.check(frozenset())
        self._below.check()
        assert self._group.pool.cached <= self._blocks, "more stays cached than may"
