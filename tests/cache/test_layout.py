"""How many blocks a sequence needs, against walking through it."""

from __future__ import annotations

import pytest

from kveik.cache.layout import BlockLayout, LayerGroup, blocks_at_most, blocks_for


def walk(window: int | None, tokens: int, size: int, chunk: int, first_chunk: int) -> int:
    """Most blocks held while a sequence is computed: a short first chunk (after a hit), then whole ones."""
    computed, most = 0, 0
    while computed < tokens:
        end = min(tokens, computed + (first_chunk if computed == 0 else chunk))
        lowest = 0 if window is None else max(0, computed - window + 1)
        most = max(most, (end - 1) // size - lowest // size + 1)
        computed = end
    return most


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 16, 17, 33])
@pytest.mark.parametrize("chunk", [1, 3, 16, 40])
def test_a_sequence_never_holds_more_blocks_than_planned_and_sometimes_as_many(
    window: int | None, size: int, chunk: int
) -> None:
    group = LayerGroup((0,), 1, 1, window)
    worst = 0
    for tokens in (1, size, size + 1, 100, 137):
        planned = blocks_at_most(group, tokens, size, chunk)
        walked = max(walk(window, tokens, size, chunk, first) for first in range(1, chunk + 1))
        assert walked <= planned <= blocks_for(tokens, size)
        worst = max(worst, walked - planned)
    # Where no chunk can be aligned worst, the plan has one block to spare.
    assert worst >= -1


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_a_block_s_bytes_are_its_shape_s(size: int) -> None:
    layout = BlockLayout(LayerGroup((0, 2, 4), 3, 64, None), size, 2)
    assert layout.shape == (3, 2, 3, size, 64)
    assert layout.block_bytes == 3 * 2 * 3 * size * 64 * 2


def test_blocks_hold_at_least_the_tokens_and_less_than_a_block_more() -> None:
    assert [blocks_for(tokens, 16) for tokens in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_a_block_with_scales_holds_records_of_values_and_scales(size: int) -> None:
    layout = BlockLayout(LayerGroup((0, 2, 4), 3, 64, None), size, 1, scale_bytes=2)
    assert layout.record_bytes == size * 64 + size * 2
    assert layout.shape == (3, 2, 3, layout.record_bytes)
    assert layout.block_bytes == 3 * 2 * 3 * size * 66
