"""The walk through a prompt's life in docs/CACHE.md, as it is told there."""

from __future__ import annotations

from kveik.cache.layout import BlockCopy
from tests.cache.making import kv_cache, leave

A_TO_J = [ord(letter) for letter in "abcdefghij"]


def test_a_prompt_lives_as_the_page_says() -> None:
    cache, tokens = kv_cache(), list(A_TO_J)
    index = cache._groups[0].index

    def known() -> list[str]:
        entries = [index.entry(block) for block in sorted(index.blocks())]
        return ["".join(map(chr, entry.tokens)) for entry in entries if entry]

    cache.open(1, tokens, request="r")
    cache.admit(1, None, 10, 0.0)
    assert len(cache._claims) == 3
    cache.grow(1, 8, 0.0)
    assert known() == []
    cache.commit(1, 8)
    assert known() == ["abcd", "efgh"]
    assert len(cache._claims) == 1
    cache.grow(1, 10, 0.0)
    cache.commit(1, 10)
    assert known() == ["abcd", "efgh", "ij"]
    tokens += [ord("k"), ord("l"), ord("m")]
    cache.grow(1, 12, 0.0)
    cache.commit(1, 12)
    assert known() == ["abcd", "efgh", "ijkl"]
    first = cache.tables[0][0, :3].tolist()
    leave(cache, 1, 12)
    assert known() == ["abcd", "efgh", "ijkl"]

    cache.open(2, list(A_TO_J), request="r")
    admission = cache.admit(2, cache.match(2, 9), 10, 0.0)
    second = cache.tables[0][admission.row, :3].tolist()
    assert admission.matched == 9
    assert second[:2] == first[:2]
    assert admission.copies == (BlockCopy(0, first[2], second[2]),)
    assert second[2] != first[2]
