"""Rates are found again in spells that were drawn from them, and the index is the best rate over any horizon."""

from __future__ import annotations

import numpy as np
import pytest

from kveik.cache.eviction import reuse
from kveik.cache.eviction.reuse import AGES, KINDS, bucket

WIDTHS = np.array([1.0, *(float(1 << place) for place in range(13)), 8192.0])
STARTS = np.array([0.0, *(float(1 << place) for place in range(14))])


@pytest.mark.parametrize(
    ("age", "place"), [(0, 0), (0.99, 0), (1, 1), (1.99, 1), (2, 2), (63, 6), (64, 7), (8191, 13), (8192, 14)]
)
def test_buckets_of_age_double(age: float, place: int) -> None:
    assert bucket(age) == place
    assert STARTS[place] <= age < STARTS[place] + WIDTHS[place]


def test_kinds_tell_turns_new_tokens_and_answers_apart() -> None:
    kinds = {
        reuse.session_kind(uses, new, out) for uses in (0, 1, 2, 4) for new in (0, 512, 2048, 8192) for out in (0, 32, 256)
    } | {reuse.shared_kind(uses) for uses in (0, 1, 2, 4)}
    assert kinds == set(range(KINDS))
    assert reuse.session_kind(2, 511, 31) == reuse.session_kind(3, 0, 0)


def test_exposure_is_the_time_that_spells_spent_in_a_bucket() -> None:
    used, unused = np.zeros((KINDS, AGES)), np.zeros((KINDS, AGES))
    used[0, 3], unused[0, 1] = 2.0, 1.0
    time = reuse.exposure(used, unused)
    assert time[0].tolist() == [3.0, 2.5, 4.0, 4.0, *([0.0] * (AGES - 4))]
    assert not time[1:].any()


def test_rates_are_found_in_what_they_caused() -> None:
    """Factors and a shape over age, spells enough that the prior counts little, and expected uses in place of drawn ones."""
    chance = np.random.default_rng(5)
    sessions = (reuse.TURNS, reuse.NEWS, reuse.OUTS)
    factors = np.exp(chance.normal(0, 0.7, sessions[0]))[:, None, None] * np.exp(chance.normal(0, 0.7, sessions[1]))[:, None]
    kinds = np.concatenate([(factors * np.exp(chance.normal(0, 0.7, sessions[2]))).ravel(), [1.0, 2.0, 3.0, 4.0]])
    true = kinds[:, None] * 0.02 / (STARTS + 1.0)
    time = WIDTHS * 1e7 / (STARTS + 1.0)
    fitted = reuse.fit(true * time, np.broadcast_to(time, true.shape))
    assert np.abs(fitted / true - 1.0).max() < 0.02


def test_without_any_spell_the_order_is_that_of_lru() -> None:
    index = reuse.index(reuse.fit(np.zeros((KINDS, AGES)), np.zeros((KINDS, AGES))))
    assert (np.diff(index, axis=1) < 0).all()
    assert np.allclose(index, index[0])


def test_a_kind_that_returns_is_worth_more_than_one_that_does_not() -> None:
    used, unused = np.zeros((KINDS, AGES)), np.zeros((KINDS, AGES))
    used[3, 6], unused[3, 9], used[5, 6], unused[5, 9] = 300.0, 10.0, 10.0, 300.0
    index = reuse.index(reuse.fit(used, reuse.exposure(used, unused)))
    assert (index[3, :6] > 2 * index[5, :6]).all()
    # Before its peak, waiting pays: it is worth more than long after it.
    assert index[3, 5] > index[3, 9]


def test_the_index_is_the_best_ratio_over_finely_cut_time() -> None:
    rates = np.full((KINDS, AGES), 1e-4)
    rates[0, 6:8] = 0.02
    rates[1] = np.random.default_rng(1).uniform(1e-4, 1e-2, AGES)
    index = reuse.index(rates)
    for kind in (0, 1):
        for age in range(AGES - 1):
            slow = best_ratio(rates[kind], STARTS[age] + WIDTHS[age] / 2)
            assert index[kind, age] == pytest.approx(slow, rel=0.02)


def best_ratio(rates: np.ndarray, age: float) -> float:
    """Every horizon at an end of a bucket, by summing over 4,000 steps per bucket."""
    alive, used, kept, best = 1.0, 0.0, 0.0, 0.0
    for place in range(AGES):
        end = STARTS[place] + WIDTHS[place]
        if end <= age:
            continue
        step = (end - max(age, STARTS[place])) / 4000
        left = alive * (1.0 - rates[place] * step) ** np.arange(4001)
        used, kept, alive = used + left[0] - left[-1], kept + left[:-1].sum() * step, left[-1]
        best = max(best, used / kept)
    return best


def test_a_constant_rate_is_its_own_index() -> None:
    assert np.allclose(reuse.index(np.full((KINDS, AGES), 0.003)), 0.003)
