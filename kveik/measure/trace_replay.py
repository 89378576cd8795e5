"""Reads traces of requests and replays them through the production pool and index: what would have been found in the cache.

A trace is a file of JSON lines (gzip where the name ends with .gz), one request each, in order of time, as published with
Mooncake (FAST'25): `timestamp` in ms, `input_length` and `output_length` in tokens, and `hash_ids` of the prompt's successive
blocks of 512 tokens, where equal ids mean equal content up to there. Nothing else about the requests is known, or needed.
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
from kveik.cache.eviction.policy import EvictionPolicy
from kveik.errors import BadValue, Unreachable
from kveik.measure.cache_replay import Replay, TraceRequest, tier_of
from kveik.offload.tier import Tier

BLOCK_TOKENS = 512

ID_BITS = 128

TOKENS_MOST = (1 << 63) - 1

MILLISECONDS_MOST = 1e15
"""Thirty thousand years; beyond it a float does not tell one millisecond from the next."""

Policy = Literal["lru", "hazard", "lru-plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetting:
    """What a trace is replayed with."""

    blocks: int
    """Blocks that stay cached between requests; the one that runs has its own beside them, unless `inside`."""

    policy: Policy = "hazard"
    inside: bool = False
    """Whether the blocks of the request that runs count too: what it computes then pushes others out before it is done."""

    below: int = 0
    """Blocks of a store below the pool; 0: there is none."""

    policy_below: Literal["lru", "hazard"] = "hazard"
    write_factor: float | None = 1.5
    """How much more than recent victims of the store below a block must be worth to be written there; None: all are."""


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """What one replay brought; hits are shares of all prompt blocks."""

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
    """All requests of a trace. Raises `Unreachable` where there is no such file, `BadValue` where a line is none of a trace."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            parents: dict[bytes, bytes] = {}
            return [_request(line, number, parents) for number, line in enumerate(lines, start=1) if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise Unreachable(f"The trace cannot be read: {error}.") from error


def _request(line: str, number: int, parents: dict[bytes, bytes]) -> TraceRequest:
    """`parents`: what each key has followed so far."""
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
    """A value, as far as it fits into a sentence."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def replay(requests: Sequence[TraceRequest], setting: ReplaySetting, seed: int) -> ReplayFigures:
    """One replay. The seed draws what `hazard` samples. Raises `BadValue` where a request does not fit into the pool."""
    longest = max((len(request.keys) for request in requests), default=0)
    if setting.inside and longest > setting.blocks:
        raise BadValue(
            f"--blocks is {setting.blocks}; with --inside it must hold the longest prompt, {longest}.", param="blocks"
        )
    below = _below(setting, seed)
    world = Replay(
        # Blocks beyond what the trace has would stay empty, and take memory.
        min(setting.blocks, max(len({key for request in requests for key in request.keys}), 1) + longest),
        _policy(setting.policy, seed, by_pool=not below),
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


def _policy(name: str, seed: int, *, by_pool: bool) -> EvictionPolicy | None:
    """None where the pool's own order does it."""
    if name == "hazard":
        return HazardPolicy(BLOCK_TOKENS, random.Random(seed))
    return None if by_pool else LruPolicy()


def _below(setting: ReplaySetting, seed: int) -> list[Tier]:
    if not setting.below:
        return []
    policy = _policy(setting.policy_below, seed + 1, by_pool=False)
    assert policy is not None
    # Recency has no measure of worth that a filter could go by.
    return [tier_of(setting.below, policy, setting.write_factor if setting.policy_below == "hazard" else None)]
