"""The workload that every engine gets, and how it is timed. Standard library alone: it runs in every engine's own environment.

A cold prompt of 512 tokens, timed up to its first new token; and greedy decoding of 64 tokens behind prompts of 32, at several
batch sizes, timed from the step that gives the last of the batch its first token to the one that ends the first of them: so
the whole batch decodes while the clock runs. Every prompt is new, so that no cache of prefixes can know it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol

PREFILL_TOKENS = 512
PROMPT_TOKENS = 32
NEW_TOKENS = 64
BATCHES = (1, 8, 16, 32)
PREFILL = f"prefill_{PREFILL_TOKENS}"
COLUMNS = (PREFILL, *(f"decode_{batch}" for batch in BATCHES))

MARK = "peers-bench:"
"""Begins the lines that are meant for the runner; engines print others on the same stream."""


class Engine(Protocol):
    """An engine with its model loaded, driven step by step."""

    def submit(self, prompts: list[list[int]], new: int) -> None:
        """Queue prompts of token ids, each to get `new` tokens greedily, the end of text ignored."""
        ...

    def step(self) -> list[int]:
        """Compute one step; new tokens so far of each prompt that `submit` was given last."""
        ...


def batch_of(column: str) -> int:
    """Sequences of a decode column."""
    return int(column.removeprefix("decode_"))


def prompts(number: int, count: int, tokens: int) -> list[list[int]]:
    """The same in every engine; other ones for every number. Ids above the special tokens of every vocabulary in use."""
    return [
        [1000 + 7919 * (number * 100_000 + row * 1_009 + index) % 20_011 for index in range(tokens)] for row in range(count)
    ]


def measure(engine: Engine, column: str, number: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens per second of one column, measured once."""
    run(engine, prompts(2 * number, 1, PROMPT_TOKENS), 2)
    if column == PREFILL:
        start = clock()
        run(engine, prompts(2 * number + 1, 1, PREFILL_TOKENS), 1)
        return PREFILL_TOKENS / (clock() - start)
    return _decode(engine, prompts(2 * number + 1, batch_of(column), PROMPT_TOKENS), clock)


def run(engine: Engine, asked: list[list[int]], new: int) -> None:
    """Answer prompts and forget the answers."""
    engine.submit(asked, new)
    while min(engine.step()) < new:
        pass


def _decode(engine: Engine, asked: list[list[int]], clock: Callable[[], float]) -> float:
    engine.submit(asked, NEW_TOKENS + 1)
    counts = engine.step()
    while min(counts) == 0:
        counts = engine.step()
    start, before = clock(), sum(counts)
    while max(counts) <= NEW_TOKENS:
        counts = engine.step()
    rate = (sum(counts) - before) / (clock() - start)
    while min(counts) <= NEW_TOKENS:
        counts = engine.step()
    return rate


def answer(engine: Engine, facts: Mapping[str, object]) -> None:
    """Say that the engine is ready, warm it up and say so, then measure each column that a line of standard input names."""
    tell(facts)
    run(engine, prompts(0, 8, PROMPT_TOKENS), 4)
    run(engine, prompts(1, 1, PREFILL_TOKENS), 1)
    tell({"warm": True})
    for number, line in enumerate(sys.stdin, 1):
        tell({"rate": measure(engine, line.strip(), number)})


def tell(said: Mapping[str, object]) -> None:
    """One line for the runner."""
    print(MARK, json.dumps(said), flush=True)


def heard(line: str) -> dict[str, object] | None:
    """What `tell` said, None for a line of somebody else's."""
    # Not only at the start of the line: engines leave lines unfinished.
    _, mark, said = line.partition(MARK)
    return dict(json.loads(said)) if mark else None
