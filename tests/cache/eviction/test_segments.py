"""The prefix tree against keys in plain dictionaries."""

from __future__ import annotations

import random

import pytest

from kveik.cache.eviction.segments import Segment, SegmentTree
from tests.cache.eviction.making import chain, drawn_chain
from tests.seeds import over_seeds


def learn(tree: SegmentTree, keys: list[bytes]) -> list[Segment]:
    """The chain becomes known, as the policy makes it known."""
    known = tree.known(keys)
    last = tree.owner[keys[known - 1]] if known else tree.root
    if known and known < last.start + len(last.keys):
        last = tree.split(last, known - last.start)
    if known < len(keys):
        if known and not last.children:
            tree.grow(last, keys[known:])
        else:
            last = tree.add(last, keys[known:], 0.0)
    return tree.path(last)


@over_seeds(10)
def test_the_tree_knows_the_chains_it_was_given_and_their_records(seed: int) -> None:
    chance, tree = random.Random(seed), SegmentTree()
    known, stored = set[bytes](), set[bytes]()
    for _ in range(150):
        keys = drawn_chain(chance)
        assert tree.known(keys) == sum(key in known for key in keys)
        path = learn(tree, keys)
        assert [key for segment in path for key in segment.keys] == keys
        known.update(keys)
        for segment in path:
            change(chance, segment, stored)
        tree.check()
        assert {key for one in tree.segments() for key, mark in zip(one.keys, one.marks, strict=True) if mark} == stored


def change(chance: random.Random, segment: Segment, stored: set[bytes]) -> None:
    """Store or give up some of its records."""
    assert segment.parent is not None
    before, place = segment.count, chance.randrange(len(segment.keys))
    match chance.randrange(4):
        case 0:
            segment.fill(place)
            stored.update(segment.keys[:place])
        case 1:
            some = chance.sample(segment.keys, place + 1)
            segment.put(some)
            stored.update(some)
        case 2:
            assert segment.cut(place) == (segment.keys[place] in stored)
            stored.discard(segment.keys[place])
        case 3 if segment.count:
            held = chance.choice(segment.keys)
            gone = segment.ends(place + 1, lambda key: key != held)
            latest = [key for key in reversed(segment.keys) if key in stored]
            assert gone == latest[: len(gone)]
            assert gone or latest[0] == held
            segment.shorten(len(gone))
            stored.difference_update(gone)
    segment.parent.live_children += (segment.count > 0) - (before > 0)


def test_a_split_leaves_the_history_with_both_parts() -> None:
    tree = SegmentTree()
    (whole,) = learn(tree, chain(1, 2, 3))
    whole.uses, whole.kind, whole.touched = 5, 7, 3.0
    whole.fill(2)
    tree.root.live_children = 1
    upper = tree.split(whole, 1)
    assert (upper.keys, whole.keys) == (chain(1, 2, 3)[:1], chain(1, 2, 3)[1:])
    assert (upper.count, whole.count, upper.live_children) == (1, 1, 1)
    assert (upper.uses, upper.kind, upper.touched) == (5, 7, 3.0)
    tree.check()


def test_forgetting_a_segment_forgets_its_keys_only() -> None:
    tree = SegmentTree()
    learn(tree, chain(1, 2))
    lower = learn(tree, chain(1, 3))[-1]
    assert tree.remove(lower) is lower.parent
    assert tree.known(chain(1, 3)) == 1
    assert tree.known(chain(1, 2)) == 2
    tree.check()


class Counted(bytes):
    """A key that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


@pytest.mark.parametrize("backwards", [True, False], ids=["from the end", "from the beginning"])
def test_a_long_chain_is_stored_and_discarded_without_a_search_for_each_record(backwards: bool) -> None:
    keys = [Counted(number.to_bytes(4, "big")) for number in range(2000)]
    tree = SegmentTree()
    segment = tree.add(tree.root, keys, 0.0)
    Counted.compared = 0
    for place in reversed(range(2000)) if backwards else range(2000):
        assert segment.place_of(keys[place]) == place
        segment.put([segment.keys[place]])
    while segment.top:
        place = segment.top - 1
        assert segment.place_of(keys[place]) == place
        segment.cut(place)
    assert Counted.compared <= 3 * 2 * 2000


def test_a_record_is_found_wherever_it_is_in_its_segment() -> None:
    chance, tree = random.Random(0), SegmentTree()
    keys = chain(*range(40))
    segment = tree.add(tree.root, keys, 0.0)
    for _ in range(300):
        place = chance.randrange(40)
        assert segment.place_of(keys[place]) == place
        if chance.random() < 0.5:
            segment.put([segment.keys[place]])
        else:
            segment.cut(place)
