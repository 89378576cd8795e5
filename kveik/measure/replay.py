"""Replay of a trace of requests through the production pool, index and tiers: the hits that it would have had.

A trace is a file of JSON lines (gzip if the name ends with .gz), one request each, in order of time, as published with
Mooncake (FAST'25): `timestamp` in ms, `input_length` and `output_length` in tokens, and `hash_ids` of the prompt's successive
blocks of 512 tokens, where equal ids mean equal content up to there. Nothing else about the requests is known, or needed.

Requests run one after the other: hits are held, the rest is computed into fresh blocks, all blocks are freed and learnt from,
and the pool is brought back to its bound. A hit is the longest cached run of full blocks from the first on. Stores below the
pool finish at once, and nothing fails. `Replay` sees no clock.
"""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy, Key, Visit
from kveik.cache.evictor import Evictor
from kveik.cache.group import GroupBlocks
from kveik.cache.layout import LayerGroup
from kveik.errors import BadValue, Unreachable
from kveik.offload.tier import Tier, TierSpec
from kveik.offload.tier_chain import TierChain
from kveik.offload.transfer import StoreRecord

BLOCK_TOKENS = 512

ID_BITS = 128

TOKENS_MOST = (1 << 63) - 1

MILLISECONDS_MOST = 1e15
"""Thirty thousand years; beyond it a float does not tell one millisecond from the next."""

Policy = Literal["lru", "hazard", "lru-plain"]

_GROUP = LayerGroup((0,), 1, 1, None)
_ROOT = b""
_WORDS = (0,)
"""Tokens of a block, never read: a key stands for its content and everything before it."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Request of a trace."""

    came: float
    """Seconds since the trace began."""

    keys: tuple[Key, ...]
    """Of its prompt's blocks in order, the last one perhaps partial; equal keys mean equal content from the first block on."""

    full: int
    """Number of whole blocks."""

    tokens_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetting:
    """Options of a replay."""

    blocks: int
    """Blocks that stay cached between requests; the one that runs has its own beside them, unless `inside`."""

    policy: Policy = "hazard"
    inside: bool = False
    """Counts the blocks of the running request too, so that it evicts others before it is done."""

    below: int = 0
    """Blocks of a store below the pool; 0: there is none."""

    policy_below: Literal["lru", "hazard"] = "hazard"
    write_factor: float | None = 1.5
    """A block is written below if it is worth this many times the store's recent victims; None: every block is."""


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """Figures of one replay; hits are shares of all prompt blocks."""

    requests: int
    blocks: int
    hit_ratio: float
    """In the pool and below."""

    hit_ratio_pool: float
    writes: int
    """Blocks written to the store below."""

    touches_per_second: float
    """Prompt blocks per second of CPU time, learning not counted."""

    microseconds_per_request: float
    lessons: int
    lesson_milliseconds: float
    """Of CPU time, on average."""


def read_trace(path: Path) -> list[TraceRequest]:
    """Returns all requests. Raises `Unreachable` if the file cannot be read, `BadValue` if a line is not a request."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            parents: dict[bytes, bytes] = {}
            return [_request(line, number, parents) for number, line in enumerate(lines, start=1) if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise Unreachable(f"The trace cannot be read: {error}.") from error


def _request(line: str, number: int, parents: dict[bytes, bytes]) -> TraceRequest:
    """`parents`: the key before each key so far."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not row.keys() >= {"timestamp", "input_length", "output_length", "hash_ids"}:
        raise _bad(number, "is not a request: it must be an object with timestamp, input_length, output_length and hash_ids")
    came, ids = row["timestamp"], row["hash_ids"]
    if type(came) not in (int, float) or not abs(came) <= MILLISECONDS_MOST:
        raise _bad(number, f"has timestamp {_short(came)}; it must be milliseconds, a number up to {MILLISECONDS_MOST:g}")
    for name in ("input_length", "output_length"):
        if type(row[name]) is not int or not 0 <= row[name] <= TOKENS_MOST:
            raise _bad(number, f"has {name} {_short(row[name])}; it must be a whole number from 0 to {TOKENS_MOST}")
    if not isinstance(ids, list):
        raise _bad(number, f"has hash_ids {_short(ids)}; it must be a list of whole numbers")
    for one in ids:
        if type(one) is not int or not 0 <= one < 1 << ID_BITS:
            raise _bad(number, f"has {_short(one)} among its hash_ids; they must be whole numbers from 0, below 2^{ID_BITS}")
    keys = tuple(one.to_bytes(ID_BITS // 8, "big") for one in ids)
    for parent, key in pairwise((b"", *keys)):
        if (before := parents.setdefault(key, parent)) != parent:
            raise _bad(
                number,
                f"has id {_named(key)} {_behind(parent)}, and it was {_behind(before)} before; an id must stand for all "
                "content up to the end of its block, so that what precedes it is always the same",
            )
    return TraceRequest(came / 1000, keys, min(row["input_length"] // BLOCK_TOKENS, len(keys)), row["output_length"])


def _bad(number: int, what: str) -> BadValue:
    return BadValue(f"Line {number} of the trace {what}.", param="trace")


def _named(key: bytes) -> str:
    return _short(int.from_bytes(key, "big"))


def _behind(key: bytes) -> str:
    return f"behind {_named(key)}" if key else "the first"


def _short(value: object) -> str:
    """Writes a value, cut to the length of a sentence."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@dataclass(frozen=True, slots=True)
class Found:
    """Hits of one request, in blocks."""

    pool: int
    below: int = 0


def tier_of(blocks: int, policy: EvictionPolicy, factor: float | None) -> Tier:
    """Returns a tier that holds so many blocks. `factor`: of its write filter; None: everything is written."""
    spec = TierSpec(name="below", capacity_bytes=blocks, record_bytes=(1,), factor=factor)
    return Tier(spec, policy)


class Replay:
    """Pool of one layer group, its index and policy, and optional tiers below."""

    def __init__(
        self,
        blocks: int,
        policy: EvictionPolicy,
        *,
        beside: int,
        below: Sequence[Tier] = (),
        plain: bool = False,
    ) -> None:
        """`blocks`: that stay cached between requests; `beside`: more for the request that runs.

        `plain`: as simulations of LRU have it that know of blocks only. A prompt's last, partial block counts as a full one; a
        prompt's beginning is the first to go; and what follows it,
        now out of reach, is renewed by the request that computes it.
        """
        self.writes = 0
        """Records written below, into whichever tier."""

        self._blocks = blocks
        self._group = GroupBlocks(_GROUP, blocks + beside)
        self._evictor = Evictor([self._group], policy, record_facts=bool(below))
        self._below = TierChain([_GROUP], 1, below)
        self._now = 0.0
        self._plain = plain

    def serve(self, request: TraceRequest) -> Found:
        """Serves one request from beginning to end."""
        group, keys = self._group, request.keys
        self._now = request.came
        kept = len(keys) if self._plain else request.full
        by_key, pool = group.index.by_key, group.pool
        held = []
        for key in keys[:kept]:
            block = by_key.get(key)
            if block is None:
                break
            pool.touch(block)
            held.append(block)
        found = Found(len(held), self._found_below(keys[:kept], len(held)))
        if self._plain:
            self._compute_plainly(keys, held)
        else:
            self._compute(keys, kept, held)
        pool.free(*(held if self._plain else reversed(held)))
        # The policy gives up a chain's end first: plainly that is its beginning.
        self._finish(keys[kept - 1 :: -1] if self._plain else keys[:kept], request)
        return found

    def _found_below(self, keys: Sequence[Key], start: int) -> int:
        """Returns the number of blocks after the pool's hit that loading would bring."""
        by_key = self._group.index.by_key
        found = self._below.found(keys, (start, start), lambda _, key: key in by_key)
        return int(found.cuts[-1]) - start

    def _compute(self, keys: Sequence[Key], kept: int, held: list[int]) -> None:
        """Computes the blocks after those held; the first `kept` of all can be found again."""
        group, start = self._group, len(held)
        held += self._evictor.allocate(0, len(keys) - start, b"", self._now)
        for place in range(start, kept):
            group.register_full(held[place], keys[place - 1] if place else _ROOT, _WORDS, keys[place])

    def _compute_plainly(self, keys: Sequence[Key], held: list[int]) -> None:
        group = self._group
        for place in range(len(held), len(keys)):
            block = group.index.by_key.get(keys[place])
            if block is not None:
                group.pool.touch(block)
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
        for one in self._below.take_transfers():
            if isinstance(one, StoreRecord):
                self._below.stored(one.target, one.key, one.group)
                self.writes += 1

    @property
    def wants_lesson(self) -> bool:
        return self._evictor.wants_lesson or self._below.wants_lesson

    def learn(self) -> None:
        """Lets every policy learn that has enough to learn from, between requests."""
        self._evictor.learn(self._now)
        self._below.learn(self._now)

    def check(self) -> None:
        """Checks the laws of the pool, the index, the policies and the bounds: O(blocks). Raises AssertionError."""
        self._group.check({})
        self._evictor.check(frozenset())
        self._below.check()
        assert self._group.pool.cached <= self._blocks, "more stays cached than may"


def replay(requests: Sequence[TraceRequest], setting: ReplaySetting, seed: int) -> ReplayFigures:
    """Replays a trace once. The seed is for the samples of `hazard`. Raises `BadValue` if a request does not fit."""
    longest = max((len(request.keys) for request in requests), default=0)
    if setting.inside and longest > setting.blocks:
        raise BadValue(
            f"--blocks is {setting.blocks}; with --inside it must hold the longest prompt, {longest}.", param="blocks"
        )
    below = _below(setting, seed)
    world = Replay(
        # Blocks beyond what the trace has would stay empty, and take memory.
        min(setting.blocks, max(len({key for request in requests for key in request.keys}), 1) + longest),
        _policy(setting.policy, seed),
        beside=0 if setting.inside else longest,
        below=below,
        plain=setting.policy == "lru-plain",
    )
    in_pool = in_below = lessons = 0
    learning, started = 0.0, time.process_time()
    for request in requests:
        found = world.serve(request)
        in_pool, in_below = in_pool + found.pool, in_below + found.below
        if world.wants_lesson:
            before = time.process_time()
            world.learn()
            learning, lessons = learning + time.process_time() - before, lessons + 1
    seconds = max(time.process_time() - started - learning, 1e-9)
    world.check()
    blocks = sum(len(request.keys) for request in requests)
    return ReplayFigures(
        requests=len(requests),
        blocks=blocks,
        hit_ratio=(in_pool + in_below) / max(blocks, 1),
        hit_ratio_pool=in_pool / max(blocks, 1),
        writes=world.writes,
        touches_per_second=blocks / seconds,
        microseconds_per_request=1e6 * seconds / max(len(requests), 1),
        lessons=lessons,
        lesson_milliseconds=1e3 * learning / max(lessons, 1),
    )


def _policy(name: str, seed: int) -> EvictionPolicy:
    return HazardPolicy(BLOCK_TOKENS, random.Random(seed)) if name == "hazard" else LruPolicy()


def _below(setting: ReplaySetting, seed: int) -> list[Tier]:
    if not setting.below:
        return []
    policy = _policy(setting.policy_below, seed + 1)
    # Recency has no measure of worth that a filter could go by.
    return [tier_of(setting.below, policy, setting.write_factor if setting.policy_below == "hazard" else None)]
