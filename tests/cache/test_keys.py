"""Keys cover everything a block's content depends on, and nothing else makes them differ (law 3)."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kveik.cache.keys import KeyChain, KeySpace, Part, block_key, encode_parts
from kveik.cache.layout import LayerGroup

FULL = LayerGroup((0, 1), 2, 8, None)


def space(**changes: object) -> KeySpace:
    given: dict[str, object] = {"fingerprint": b"weights", "kv_dtype": "bfloat16", "block_size": 16, "groups": [FULL]}
    return KeySpace(**{**given, **changes})  # type: ignore[arg-type]  # the tests vary one argument at a time


def test_salt_adapter_media_tenant_and_absence_never_share_a_namespace() -> None:
    names = [
        space().namespace(),
        space().namespace(salt="X"),
        space().namespace(adapter=b"X"),
        space().namespace(media=b"X"),
        space().namespace(tenant=b"X"),
        space().namespace(private="X"),
        space().namespace(salt="None"),
        space().namespace(salt=""),
        space().namespace(salt="a", adapter=b"b"),
        space().namespace(salt="ab"),
        space().namespace(salt="b", adapter=b"a"),
        space().namespace(tenant=b"a", salt="b"),
    ]
    assert len(set(names)) == len(names)
    assert all(len(name) == 32 for name in names)


def test_a_salt_applies_to_every_block_of_the_chain() -> None:
    tokens = list(range(64))
    plain = KeyChain(space().namespace(), 16).extend(tokens, 4)
    salted = KeyChain(space().namespace(salt="s"), 16).extend(tokens, 4)
    assert set(plain).isdisjoint(salted)


def test_an_adapter_is_its_content_and_not_its_name() -> None:
    first, second = space().namespace(adapter=b"digest of weights 1"), space().namespace(adapter=b"digest of weights 2")
    assert first != second
    assert space().namespace(adapter=b"digest of weights 1") == first


def test_requests_with_different_media_share_nothing_and_with_equal_media_everything() -> None:
    tokens = [5] * 32
    chains = [KeyChain(space().namespace(media=media), 16).extend(tokens, 2) for media in (b"cat", b"dog", b"cat", None)]
    assert chains[0] == chains[2]
    assert len({tuple(chain) for chain in chains}) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": b"other weights"},
        {"kv_dtype": "float32"},
        {"block_size": 32},
        {"groups": [LayerGroup((0,), 2, 8, None)]},
        {"groups": [LayerGroup((0, 1), 4, 8, None)]},
        {"groups": [LayerGroup((0, 1), 2, 16, None)]},
        {"groups": [LayerGroup((0, 1), 2, 8, 512)]},
        {"groups": [LayerGroup((0,), 2, 8, None), LayerGroup((1,), 2, 8, None)]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_model_dtype_or_layout_has_other_keys(changes: dict[str, object]) -> None:
    assert space(**changes).namespace() != space().namespace()


@given(some.lists(some.one_of(some.none(), some.binary(), some.text(), some.integers())))
def test_encoded_parts_can_be_told_apart(parts: list[Part]) -> None:
    assert decode_parts(encode_parts(parts)) == [(type(part), part) for part in parts]


def decode_parts(encoded: bytes) -> list[tuple[type, Part]]:
    """The inverse, as a proof that nothing is lost: an encoding with an inverse is injective."""
    parts: list[tuple[type, Part]] = []
    while encoded:
        tag, length = encoded[:1], int.from_bytes(encoded[1:9], "little")
        content, encoded = encoded[9 : 9 + length], encoded[9 + length :]
        part: Part = {
            b"n": lambda _: None,
            b"b": bytes,
            b"s": lambda content: content.decode("utf-8", "surrogatepass"),
            b"i": lambda content: int(content.decode()),
        }[tag](content)
        parts.append((type(part), part))
    return parts


def test_a_salt_that_is_not_valid_unicode_is_a_name_like_any_other() -> None:
    assert space().namespace(salt="\ud800") != space().namespace(salt="\ud801")


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_token_ids_of_any_integer_type_give_the_same_keys(kind: type[np.integer]) -> None:
    tokens = list(range(100, 148))
    typed = [kind(token) for token in tokens]
    assert KeyChain(b"n" * 32, 16).extend(typed, 3) == KeyChain(b"n" * 32, 16).extend(tokens, 3)
    assert block_key(b"n" * 32, np.array(tokens, dtype=kind)) == block_key(b"n" * 32, tokens)


PROGRAM = """
from kveik.cache.keys import KeyChain, KeySpace
from kveik.cache.layout import LayerGroup
space = KeySpace(fingerprint=b"weights", kv_dtype="bfloat16", block_size=16, groups=[LayerGroup((0, 1), 2, 8, None)])
print(KeyChain(space.namespace(tenant=b"t", salt="s"), 16).extend(list(range(48)), 3)[-1].hex())
"""


def test_keys_are_the_same_in_every_process() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    here = KeyChain(space().namespace(tenant=b"t", salt="s"), 16).extend(list(range(48)), 3)[-1].hex()
    assert runs == [here, here]
    # Written down: a change of the encoding must be meant, and must change the format's name.
    assert here == "364432c1637b640fd55c846b1cb5d19d2dcd10b2bc2216706042e85aa77d7cd7"


def test_pairs_crafted_against_rolling_hashes_differ() -> None:
    # h = 31 h + token: one more in front and 31 less behind cancel out.
    tokens = [1000] * 16
    keys = set()
    for place in range(15):
        crafted = list(tokens)
        crafted[place] += 1
        crafted[place + 1] -= 31
        keys.add(block_key(b"n" * 32, crafted))
    assert len(keys | {block_key(b"n" * 32, tokens)}) == 16


def test_order_boundaries_and_width_of_tokens_matter() -> None:
    variants = [[1, 2], [2, 1], [1], [2], [1, 2, 0], [0, 1, 2], [258], [1, 2 << 8], [1 << 16, 2]]
    for left, right in itertools.combinations(variants, 2):
        assert block_key(b"n" * 32, left) != block_key(b"n" * 32, right)


def test_a_chain_grows_with_its_tokens_and_keeps_its_beginning() -> None:
    tokens = list(range(20))
    chain = KeyChain(b"n" * 32, 8)
    first = list(chain.extend(tokens, 2))
    tokens += range(20, 40)
    assert chain.extend(tokens, 5)[:2] == first
    assert chain.keys == KeyChain(b"n" * 32, 8).extend(tokens, 5)
    assert chain.parent(0) == b"n" * 32
    assert [chain.parent(number) for number in range(1, 6)] == chain.keys


def test_each_token_is_hashed_once() -> None:
    class Counted(list[int]):
        read = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def, override]  # counts what the chain reads
            part = super().__getitem__(place)
            Counted.read += len(part)
            return part

    tokens, chain = Counted(range(64)), KeyChain(b"n" * 32, 16)
    for blocks in (1, 1, 2, 4, 4, 3):
        chain.extend(tokens, blocks)
    assert Counted.read == 64
