"""The longest hit, against trying every length and looking at every block."""

from __future__ import annotations

import random

import pytest

from kveik.cache.group import GroupBlocks
from kveik.cache.keys import KeyChain
from kveik.cache.layout import LayerGroup
from kveik.cache.prefix_cache import common_prefix
from kveik.cache.prefix_match import PrefixMatch, longest_match
from tests.seeds import over_seeds

SIZE = 4


def slow_match(groups: list[GroupBlocks], tokens: list[int], limit: int) -> int:
    """Every length from the longest down; every position that the next query reads must be found in every group."""
    keys = KeyChain(b"n" * 32, SIZE)
    keys.extend(tokens, len(tokens) // SIZE)
    for length in range(limit, 0, -1):
        if all(has(group, keys, tokens, length) for group in groups):
            return length
    return 0


def has(group: GroupBlocks, chain: KeyChain, tokens: list[int], length: int) -> bool:
    lowest = 0 if group.window is None else max(0, length - group.window + 1)
    for number in range(lowest // SIZE, length // SIZE):
        if chain.keys[number] not in group.index.by_key:
            return False
    rest = tuple(tokens[length - length % SIZE : length])
    children = group.index.children(chain.parent(length // SIZE))
    entries = [group.index.entry(block) for block in children]
    return not rest or any(entry is not None and common_prefix(entry.tokens, rest) == len(rest) for entry in entries)


def fill(group: GroupBlocks, tokens: list[int], chance: random.Random) -> None:
    """Register a prompt's blocks, with gaps, and perhaps its tail."""
    chain = KeyChain(b"n" * 32, SIZE)
    keys = chain.extend(tokens, len(tokens) // SIZE)
    for number, key in enumerate(keys):
        if chance.random() < 0.8 and group.pool.available:
            (block,) = group.allocate(1)
            group.register_full(block, chain.parent(number), tuple(tokens[number * SIZE : (number + 1) * SIZE]), key)
    tail = tuple(tokens[len(keys) * SIZE :])
    if tail and chance.random() < 0.7 and group.pool.available:
        group.register_partial(group.allocate(1)[0], chain.parent(len(keys)), tail)


@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 6), (3,), (1, 9), (None, 2, 30)], ids=str)
@over_seeds(12)
def test_the_longest_hit_is_found_in_every_mixture_of_groups(seed: int, windows: tuple[int | None, ...]) -> None:
    chance = random.Random(seed)
    groups = [GroupBlocks(LayerGroup((0,), 1, 1, window), 60) for window in windows]
    found = 0
    for _ in range(6):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 40))]
        for group in groups:
            fill(group, tokens, chance)
        for _ in range(20):
            query = tokens[: chance.randrange(len(tokens) + 1)] + [chance.randrange(2) for _ in range(chance.randrange(1, 9))]
            limit = chance.randrange(len(query))
            match = longest_match(groups, KeyChain(b"n" * 32, SIZE), query, limit)
            assert (match.tokens if match else 0) == slow_match(groups, query, limit)
            if match:
                check_match(groups, match, query)
                found += 1
    assert found > 0


def check_match(groups: list[GroupBlocks], match: PrefixMatch, query: list[int]) -> None:
    """The blocks named really hold these tokens."""
    for number, group in enumerate(groups):
        first = match.firsts[number]
        assert len(match.blocks[number]) == match.full - first
        for place, block in enumerate(match.blocks[number], start=first):
            entry = group.index.entry(block)
            assert entry is not None
            assert entry.tokens == tuple(query[place * SIZE : (place + 1) * SIZE])
        rest = match.tokens - match.full * SIZE
        assert (rest > 0) == bool(match.sources)
        if rest:
            entry = group.index.entry(match.sources[number])
            assert entry is not None
            assert entry.tokens[:rest] == tuple(query[match.full * SIZE : match.tokens])
