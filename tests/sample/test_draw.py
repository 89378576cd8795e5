import numpy as np
import pytest
import torch

from kveik.sample.draw import Filters, draw
from kveik.sample.tiles import TiledLogits
from tests.seeds import over_seeds

LAST = np.nextafter(1.0, 0.0)
"""The largest chance that there is."""

SHARES = [0.04, 0.3, 0.0, 0.6, 0.06, 0.0]


def drawn(row, chance, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    logits = torch.from_numpy(np.asarray(row, dtype=np.float32)[None])
    filters = Filters(np.array([temperature]), np.array([top_k]), np.array([top_p]), np.array([min_p]))
    return int(draw(TiledLogits.over(logits, logits.shape[1]), np.array([0]), filters, np.array([chance]))[0])


@pytest.mark.parametrize(
    "filters, first, last",
    [
        # Without filters the tokens lie in the order of their ids, with filters in that of their probabilities.
        ({}, 0, 4),
        ({"top_k": 3}, 3, 4),
        ({"top_k": 5}, 3, 0),
        ({"min_p": 0.2}, 3, 1),
        ({"top_p": 0.61}, 3, 1),
        ({"top_p": 0.999}, 3, 0),
    ],
)
def test_the_ends_of_the_chance_are_the_ends_of_what_is_kept(filters, first, last):
    with np.errstate(divide="ignore"):
        row = np.log(SHARES)
    assert drawn(row, 0.0, **filters) == first
    assert drawn(row, LAST, **filters) == last


@over_seeds(20)
@pytest.mark.parametrize("filters", [{}, {"top_k": 700}, {"min_p": 1e-7}, {"top_p": 0.9999}, {"top_p": 0.9}, {"top_k": 7}])
def test_no_chance_leads_to_a_token_without_weight(seed, filters):
    row = np.random.default_rng(seed).normal(size=1000) * 4
    row[::3] = -np.inf
    for chance in (0.0, 1e-300, 0.5, LAST):
        assert np.isfinite(row[drawn(row, chance, **filters)])


def test_a_rising_chance_walks_down_the_ranks():
    row = np.random.default_rng(0).normal(size=2000)
    ranks = np.argsort(np.argsort(-row, kind="stable"))
    for filters in ({"top_p": 0.97}, {"top_k": 1500}, {"min_p": 0.01}):
        walked = [ranks[drawn(row, chance, **filters)] for chance in np.linspace(0, LAST, 60)]
        assert walked == sorted(walked)
        assert walked[0] == 0
