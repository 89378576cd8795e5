"""The index finds what was registered, and the best partial match among thousands of siblings."""

from __future__ import annotations

import gc
import random

from kveik.cache.prefix_cache import PrefixCache, common_prefix
from tests.seeds import over_seeds

PARENT = b"p" * 32


def slow_longest(known: dict[int, tuple[bytes, tuple[int, ...]]], parent: bytes, tokens: tuple[int, ...]) -> int:
    """Most tokens in common with any block after this parent."""
    return max((common_prefix(content, tokens) for above, content in known.values() if above == parent), default=0)


@over_seeds(60)
def test_the_index_agrees_with_looking_at_every_block(seed: int) -> None:
    chance, index = random.Random(seed), PrefixCache()
    known: dict[int, tuple[bytes, tuple[int, ...]]] = {}
    keys: dict[bytes, int] = {}
    for _ in range(200):
        block, parent = chance.randrange(20), chance.choice((b"a", b"b"))
        tokens = tuple(chance.randrange(3) for _ in range(chance.randrange(1, 9)))
        key = parent + bytes(tokens)
        if chance.random() < 0.25 and known:
            gone = chance.choice(sorted(known))
            index.drop(gone)
            known.pop(gone)
            keys = {name: owner for name, owner in keys.items() if owner != gone}
        elif block in known:
            continue
        elif len(tokens) == 8:
            assert index.add_full(block, parent, tokens, key) == (key not in keys)
            if key not in keys:
                keys[key], known[block] = block, (parent, tokens)
        else:
            redundant = slow_longest(known, parent, tokens) == len(tokens)
            assert index.add_partial(block, parent, tokens) == (not redundant)
            if not redundant:
                known[block] = (parent, tokens)
        index.check()
        assert index.by_key == keys
        assert sorted(index.blocks()) == sorted(known)
        wanted = tuple(chance.randrange(3) for _ in range(chance.randrange(9)))
        found, common = index.longest(parent, wanted)
        assert common == slow_longest(known, parent, wanted)
        assert not common or common_prefix(known[found][1], wanted) == common


def test_a_key_that_is_known_keeps_its_first_block() -> None:
    index = PrefixCache()
    assert index.add_full(1, PARENT, (1, 2), b"k")
    assert not index.add_full(2, PARENT, (1, 2), b"k")
    assert index.by_key == {b"k": 1}
    assert index.entry(2) is None


def test_a_tail_grows_and_becomes_whole_with_one_entry_all_along() -> None:
    index = PrefixCache()
    assert index.add_partial(1, PARENT, (1,))
    assert index.add_partial(1, PARENT, (1, 2, 3))
    assert index.longest(PARENT, (1, 2, 9)) == (1, 2)
    assert index.add_full(1, PARENT, (1, 2, 3, 4), b"k")
    assert len(index) == 1
    assert index.longest(PARENT, (1, 2, 3, 4)) == (1, 4)
    index.drop(1)
    assert len(index) == 0
    assert index.longest(PARENT, (1, 2)) == (0, 0)
    index.check()


def test_a_tail_that_another_block_covers_is_not_kept() -> None:
    index = PrefixCache()
    index.add_full(1, PARENT, (1, 2, 3, 4), b"k")
    assert not index.add_partial(2, PARENT, (1, 2))
    assert index.add_partial(2, PARENT, (1, 3))


def test_the_best_of_many_siblings_is_found() -> None:
    index, chance = PrefixCache(), random.Random(0)
    for block in range(5000):
        index.add_partial(block, PARENT, tuple(chance.randrange(50) for _ in range(6)))
    index.add_partial(5000, PARENT, (7, 7, 7, 7, 7, 1))
    assert index.longest(PARENT, (7, 7, 7, 7, 7, 7)) == (5000, 5)


def test_the_collector_need_not_walk_over_what_is_kept_of_a_block() -> None:
    index = PrefixCache()
    gc.collect()
    before = len(gc.get_objects())
    for block in range(500):
        parent = PARENT if block % 50 == 0 else str(block).encode()
        index.add_full(block, parent, tuple(range(block, block + 16)), f"key {block}".encode())
    # Twice: a tuple is let go when what it holds has been.
    gc.collect()
    gc.collect()
    assert len(gc.get_objects()) - before < 20


def test_few_and_many_siblings_are_found_alike() -> None:
    index, blocks = PrefixCache(), list(range(60))
    random.Random(1).shuffle(blocks)
    for block in blocks:
        assert index.add_partial(block, PARENT, (block, 1))
        index.check()
    assert sorted(index.children(PARENT)) == list(range(60))
    for block in blocks[:-1]:
        index.drop(block)
        index.check()
    assert index.children(PARENT) == blocks[-1:]
    assert index.longest(PARENT, (blocks[-1], 2)) == (blocks[-1], 1)
