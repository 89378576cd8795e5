"""A hit below is what all groups can serve: against a slow model that tries every cut by the definition of a window."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kveik.cache.eviction.policy import Key
from kveik.offload.tier import Tier
from kveik.offload.tier_match import find_below
from tests.offload.making import SIZE, groups_of, tier
from tests.seeds import over_seeds

Place = tuple[int, int]
"""Group and block."""


def keys_of(count: int) -> list[Key]:
    return [bytes([number]) for number in range(count)]


def filled(records: Sequence[set[Place]], sizes: Sequence[int]) -> list[Tier]:
    tiers = []
    for held in records:
        one = tier(10_000, sizes=sizes)
        for group, place in held:
            assert one.found(bytes([place]), group, 0.0)
        tiers.append(one)
    return tiers


def test_a_full_group_is_found_up_to_its_first_gap_each_block_in_the_nearest_tier() -> None:
    tiers = filled([{(0, 1)}, {(0, 0), (0, 1), (0, 2), (0, 4)}], (10,))
    below = find_below(groups_of((None,)), tiers, keys_of(6), (0, 0), SIZE, lambda *_: False)
    assert below.cuts.tolist() == [0, 1, 2, 3]
    assert below.prospect.sizes.tolist() == [[0, 0, 10, 10], [0, 10, 10, 20]]
    assert [(record.place, record.tier) for record in below.records(3)] == [(0, 1), (1, 0), (2, 1)]


def test_a_windowed_group_needs_only_the_blocks_of_its_window() -> None:
    # Window 5: a query at position 16 reads positions 12 to 16, which begin in block 3.
    tiers = filled([{(0, place) for place in range(4)} | {(1, 3)}], (10, 1))
    below = find_below(groups_of((None, 5)), tiers, keys_of(4), (0, 0), SIZE, lambda *_: False)
    assert below.cuts.tolist() == [0, 4]
    assert below.prospect.sizes.tolist() == [[0, 41]]
    assert [(record.group, record.place) for record in below.records(1)] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3)]


def test_what_the_pool_has_is_not_loaded_though_its_own_hit_ends_before_it() -> None:
    """The pool has all of the full group, but lost the windowed group's last block, which the tier has."""
    tiers = filled([{(1, 3), (0, 0)}], (10, 1))
    below = find_below(groups_of((None, 5)), tiers, keys_of(4), (0, 0), SIZE, lambda group, _: group == 0)
    assert below.prospect.sizes.tolist() == [[0, 1]]
    assert [(record.group, record.place) for record in below.records(1)] == [(1, 3)]


def test_nothing_below_is_nothing_to_load() -> None:
    below = find_below(groups_of((None,)), filled([set()], (10,)), keys_of(3), (6, 1), SIZE, lambda *_: False)
    assert not below
    assert below.prospect.tokens.tolist() == [6]
    assert below.records(0) == ()


@pytest.mark.parametrize("windows", [(None,), (None, 5), (3, None, 9), (6,), (4, 9)])
@over_seeds(25)
def test_every_cut_is_one_by_definition_and_costs_what_it_loads(windows: Sequence[int | None], seed: int) -> None:
    chance, blocks = random.Random(seed), 9
    groups, sizes, keys = groups_of(windows), [1, 10, 100][: len(windows)], keys_of(blocks)
    everything = [(group, place) for group in range(len(windows)) for place in range(blocks)]
    pool, *held = ({one for one in everything if chance.random() < share} for share in (0.4, 0.6, 0.7))
    start = max(cut for cut in range(blocks + 1) if servable(windows, pool, cut * SIZE, cut))
    tokens = start * SIZE + (chance.randrange(SIZE) if start < blocks else 0)
    if not servable(windows, pool, tokens, start):
        tokens = start * SIZE
    below = find_below(groups, filled(held, sizes), keys, (tokens, start), SIZE, lambda group, key: (group, key[0]) in pool)
    anywhere = pool.union(*held)
    cuts = [cut for cut in range(start + 1, blocks + 1) if servable(windows, anywhere, cut * SIZE, cut)]
    assert below.cuts.tolist() == [start, *cuts]
    assert below.prospect.tokens.tolist() == [tokens, *(cut * SIZE for cut in cuts)]
    for number, cut in enumerate(cuts, start=1):
        wanted = needed(windows, cut * SIZE, cut) - pool
        first = {one: next(tier for tier, places in enumerate(held) if one in places) for one in wanted}
        records = below.records(number)
        assert {(record.group, record.place): record.tier for record in records} == first
        assert [record.place for record in records] == sorted(record.place for record in records)
        assert all(record.key == keys[record.place] for record in records)
        loaded = [sum(sizes[group] for (group, _), tier in first.items() if tier == one) for one in range(len(held))]
        assert below.prospect.sizes[:, number].tolist() == loaded


def needed(windows: Sequence[int | None], tokens: int, blocks: int) -> set[Place]:
    """Blocks, of the first so many, that a query at position `tokens` or later reads."""
    return {
        (group, place)
        for group, window in enumerate(windows)
        for place in range(blocks)
        if window is None or any(tokens - window < position for position in range(place * SIZE, (place + 1) * SIZE))
    }


def servable(windows: Sequence[int | None], held: set[Place], tokens: int, blocks: int) -> bool:
    return needed(windows, tokens, blocks) <= held
