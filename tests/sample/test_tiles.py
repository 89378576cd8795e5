import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kveik.sample.tiles import TILE, TiledLogits, in_order

REALS = st.sampled_from([1, 2, 127, 128, 129, 256, 1000, 4 * TILE, 40 * TILE, 40 * TILE + 1])


def in_slow_order(row: np.ndarray) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def some_logits(seed: int, real: int, levels: int, padding: int = 5) -> torch.Tensor:
    """[3, real + padding], with many equal values where there are few levels; the padding would win everything."""
    values = np.random.default_rng(seed).normal(size=(3, real + padding)) * 4
    values = np.round(values * levels) / levels
    values[:, real:] = 1e6
    values[1, : real // 3] = -np.inf
    return torch.from_numpy(values.astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), REALS, st.sampled_from([1, 4, 10_000]), st.integers(1, 300))
def test_the_likeliest_are_those_of_a_full_sort_ties_by_lower_id(seed, real, levels, width):
    logits = some_logits(seed, real, levels)
    ranked = TiledLogits.over(logits, real).rank_all(np.arange(3), width)
    for row in range(3):
        slow = in_slow_order(logits[row, :real].numpy())[:width]
        assert ranked.ids[row].tolist() == slow
        assert ranked.values[row].tolist() == logits[row, slow].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), REALS, st.sampled_from([1, 10_000]))
def test_the_best_is_the_first_of_the_largest(seed, real, levels):
    logits = some_logits(seed, real, levels)
    assert (
        TiledLogits.over(logits, real).best(np.array([0, 2])).tolist() == logits[[0, 2], :real].numpy().argmax(axis=1).tolist()
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), REALS, st.floats(0, 10), st.sampled_from([1, 10_000]))
def test_a_ranking_by_value_holds_every_token_from_there_up(seed, real, depth, levels):
    logits = some_logits(seed, real, levels)
    tiles = TiledLogits.over(logits, real)
    floors = tiles.peaks - np.float32(depth)
    ranked = tiles.rank(np.arange(3), floors)
    for row in range(3):
        values = logits[row, :real].numpy()
        slow = [token for token in in_slow_order(values) if values[token] >= floors[row]]
        assert ranked.ids[row, : len(slow)].tolist() == slow
        assert np.isneginf(ranked.values[row, len(slow) :]).all()


def test_few_tiles_are_read_for_few_tokens(monkeypatch):
    read = []
    original = TiledLogits.read
    monkeypatch.setattr(
        TiledLogits,
        "read",
        lambda self, rows, tiles, beyond: read.append(len(tiles)) or original(self, rows, tiles, beyond=beyond),
    )
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 400 * TILE)).astype(np.float32))
    TiledLogits.over(logits, 400 * TILE).rank_all(np.arange(4), 20)
    assert sum(read) == 4 * 20


def test_rankings_are_cut_into_parts_of_bounded_size():
    flat = torch.zeros(40, 400 * TILE)
    tiles = TiledLogits.over(flat, 400 * TILE)
    parts = tiles.parts(np.arange(40), np.zeros(40, np.float32))
    assert sorted(np.concatenate(parts).tolist()) == list(range(40))
    assert max(len(part) for part in parts) * 400 * TILE <= 1 << 20


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_row_has_a_peak_that_is_not_finite(poison):
    logits = torch.zeros(2, 300)
    logits[1, 299] = poison
    assert np.isfinite(TiledLogits.over(logits, 300).peaks).tolist() == [True, False]
    assert np.isfinite(TiledLogits.over(logits, 299).peaks).all()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_every_float_has_its_place_in_the_order(values):
    row = np.array(values, dtype=np.float32)
    assert in_order(row, np.arange(len(row))).tolist() == in_slow_order(row)
