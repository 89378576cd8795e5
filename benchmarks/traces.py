"""Request traces for replays: read from files, or generated where a real one would not show what is asked."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from kveik.measure.replay import TraceRequest

BLOCK_TOKENS = 512


def _key(*parts: int) -> bytes:
    return b"".join(part.to_bytes(8, "big") for part in parts)


def cycle(blocks: int, rounds: int, blocks_each: int = 50, seconds: float = 1.0) -> Iterator[TraceRequest]:
    """Prompts of `blocks` blocks in all that share nothing, in the same order again and again: the worst case of recency."""
    now = 0.0
    for _ in range(rounds):
        for prompt in range(blocks // blocks_each):
            keys = tuple(_key(prompt, place) for place in range(blocks_each))
            yield TraceRequest(now, keys, blocks_each, 100)
            now += seconds


def agents(chance: random.Random, requests: int, agents_at_once: int = 24) -> Iterator[TraceRequest]:
    """Agents that call tools: each sends its growing context again seconds after every answer, until its task is done.

    Their instructions (4 blocks) are the same; a task begins with 1 to 6 blocks more, and every step adds 0 to 3.
    """
    waiting: list[tuple[float, int]] = []
    contexts: dict[int, list[bytes]] = {}
    started = 0
    for _ in range(requests):
        while len(waiting) < agents_at_once:
            contexts[started] = [_key(0, place) for place in range(4)]
            contexts[started] += [_key(1, started, place) for place in range(chance.randint(1, 6))]
            heapq.heappush(waiting, ((waiting[0][0] if waiting else 0.0) + chance.expovariate(0.2), started))
            started += 1
        now, agent = heapq.heappop(waiting)
        keys = contexts[agent]
        yield TraceRequest(now, tuple(keys), len(keys), round(chance.lognormvariate(4.5, 0.8)))
        if chance.random() < 0.05:
            del contexts[agent]
            continue
        keys += [_key(1, agent, len(keys) + place) for place in range(chance.randint(0, 3))]
        heapq.heappush(waiting, (now + 1.0 + chance.lognormvariate(1.5, 0.8), agent))
