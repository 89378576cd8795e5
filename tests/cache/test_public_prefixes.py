"""Blocks wholly inside a declared prefix are everybody's; one token further on nothing is."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kveik.cache.key_chains import PublicPrefixes
from kveik.cache.keys import KeyChain, KeySpace
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup
from tests.seeds import over_seeds

SIZE = 4
SPACE = KeySpace(fingerprint=b"w", kv_dtype="float32", block_size=SIZE, groups=[LayerGroup((0,), 1, 1, None)])
DECLARED = list(range(10))


def chain(
    tenant: bytes, tokens: Sequence[int], salt: str | None = None, prefixes: Sequence[Sequence[int]] = (DECLARED,)
) -> KeyChain:
    public = PublicPrefixes(prefixes, SIZE)
    made = KeyChain(SPACE.namespace(tenant=tenant, salt=salt), SIZE, SPACE.public(), public.blocks(tokens))
    made.extend(tokens, len(tokens) // SIZE)
    return made


@pytest.mark.parametrize(
    ("prompt", "blocks"),
    [
        (DECLARED, 2),
        ([*range(9), 99, 99, 99], 2),
        ([*range(8)], 2),
        ([*range(7)], 1),
        ([*range(6), 99, 99], 1),
        ([*range(3)], 0),
        ([99, *range(9)], 0),
        ([], 0),
    ],
)
def test_public_is_what_lies_wholly_inside(prompt: list[int], blocks: int) -> None:
    assert PublicPrefixes([DECLARED], SIZE).blocks(prompt) == blocks


@over_seeds(20)
def test_of_several_prefixes_the_one_that_reaches_furthest_counts(seed: int) -> None:
    chance = random.Random(seed)
    prefixes = [[chance.randrange(2) for _ in range(chance.randrange(20))] for _ in range(6)]
    public = PublicPrefixes(prefixes, SIZE)
    for _ in range(50):
        prompt = [chance.randrange(2) for _ in range(chance.randrange(24))]
        inside = [
            blocks
            for blocks in range(len(prompt) // SIZE + 1)
            if not blocks
            or any(prefix[: blocks * SIZE] == prompt[: blocks * SIZE] and len(prefix) >= blocks * SIZE for prefix in prefixes)
        ]
        assert public.blocks(prompt) == max(inside)


def test_a_prefix_shorter_than_a_block_declares_nothing() -> None:
    public = PublicPrefixes([[1, 2, 3], []], SIZE)
    assert len(public) == 0
    assert public.blocks([1, 2, 3, 4]) == 0


def test_two_tenants_share_the_public_blocks_and_none_after_them() -> None:
    tokens = [*DECLARED, 50, 51, 52, 53, 54, 55]
    one, other = chain(b"a", tokens), chain(b"b", tokens)
    assert one.keys[:2] == other.keys[:2]
    assert set(one.keys[2:]).isdisjoint(other.keys[2:])
    assert len({*one.keys, *other.keys}) == 6
    salted = chain(b"a", tokens, salt="s")
    assert salted.keys[:2] == one.keys[:2]
    assert set(salted.keys[2:]).isdisjoint(one.keys[2:])


def test_what_stands_behind_the_public_part_covers_it() -> None:
    """Equal private tokens after different public ones are different contents."""
    prefixes = [[*range(8)], [*range(4), *range(54, 58)]]
    tails = [chain(b"a", [*prefix, 90, 91, 92, 93], prefixes=prefixes) for prefix in prefixes]
    assert tails[0].keys[0] == tails[1].keys[0]
    assert set(tails[0].keys[1:]).isdisjoint(tails[1].keys[1:])
    assert tails[0].parent(2) != tails[1].parent(2)


def test_public_keys_are_nobodys_own_and_made_step_by_step_as_at_once() -> None:
    tokens = [*DECLARED, *range(30, 44)]
    plain = KeyChain(SPACE.namespace(), SIZE)
    assert set(plain.extend(tokens, 6)).isdisjoint(chain(b"", tokens).keys)
    slowly = KeyChain(SPACE.namespace(tenant=b"a"), SIZE, SPACE.public(), 2)
    parents = []
    for blocks in range(7):
        slowly.extend(tokens, blocks)
        parents.append(slowly.parent(blocks))
    whole = chain(b"a", tokens)
    assert slowly.keys == whole.keys
    assert parents == [whole.parent(blocks) for blocks in range(7)]
    assert len(set(parents)) == 7


def test_media_and_adapters_have_public_parts_of_their_own() -> None:
    assert len({SPACE.public(), SPACE.public(adapter=b"x"), SPACE.public(media=b"x"), SPACE.namespace()}) == 4


Asked = tuple[bytes, str | None, list[int]]


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@over_seeds(12)
def test_no_tenant_finds_more_than_it_wrote_or_the_operator_declared(windows: Sequence[int | None], seed: int) -> None:
    """Three tenants, two salts, two public prefixes, few words so that they often agree; some end in the middle."""
    chance = random.Random(seed)
    prefixes = [[chance.randrange(2) for _ in range(chance.randrange(4, 20))] for _ in range(2)]
    public = PublicPrefixes(prefixes, SIZE)
    groups = [LayerGroup((number,), 1, 1, window) for number, window in enumerate(windows)]
    kv_cache = KVCacheManager(groups, [40] * len(groups), block_size=SIZE, rows=4, max_model_len=32, max_chunk=8, public=public)
    written, hits, crossed = list[Asked](), 0, 0
    for number in range(150):
        begin = chance.choice(prefixes)[: chance.randrange(20)] if chance.random() < 0.7 else []
        tokens = [*begin, *(chance.randrange(2) for _ in range(chance.randrange(1, 32 - len(begin))))]
        tenant, salt = chance.choice((b"a", b"b", b"c")), chance.choice((None, "s"))
        kv_cache.open(number, tokens, request="r", tenant=tenant, salt=salt)
        match = kv_cache.match(number, len(tokens) - 1)
        found = match.tokens if match else 0
        own = max((common(tokens, other) for who, how, other in written if (who, how) == (tenant, salt)), default=0)
        shared = max((common(tokens, other) for _, _, other in written), default=0)
        # Of others no more than what lies in the public blocks of this prompt.
        right = max(own, min(shared, SIZE * public.blocks(tokens)))
        assert found <= right
        hits, crossed = hits + found, crossed + (found > own)
        kv_cache.admit(number, match, len(tokens), 0.0)
        kv_cache.grow(number, len(tokens), 0.0)
        computed = chance.randrange(found, len(tokens) + 1)
        if computed > found:
            kv_cache.commit(number, computed)
            written.append((tenant, salt, tokens[:computed]))
            kv_cache.check()
        kv_cache.release(number, computed)
        kv_cache.close(number, 0.0)
        kv_cache.check()
    assert hits > 100
    assert crossed > 5


def common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
