import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kveik.sample.nucleus import draw_wide


def draw_by_sorting(values, temperature, top_p, chance):
    """The token, and its neighbours where rounding may decide."""
    weights = np.exp((values.astype(np.float64) - values.max()) / temperature)
    order = np.lexsort((np.arange(len(values)), -values))
    sums = np.cumsum(weights[order])
    tokens = set()
    for slip in (-2e-6, 0.0, 2e-6):
        kept = sums[: np.searchsorted(sums, top_p * sums[-1] * (1 + slip)) + 1]
        tokens.add(int(order[min(np.searchsorted(kept, chance * kept[-1] * (1 + slip), side="right"), len(kept) - 1)]))
    return tokens


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1 << 20),
    st.sampled_from([1, 2, 50, 3000]),
    st.sampled_from([0.0, 0.1, 3.0, 40.0]),
    st.sampled_from([1, 1000]),
    st.sampled_from([0.2, 1.0, 5.0]),
    st.floats(1e-9, 0.999999),
    st.floats(0, 1, exclude_max=True),
)
def test_the_token_is_the_one_that_a_full_sort_would_give(seed, size, spread, levels, temperature, top_p, chance):
    values = np.random.default_rng(seed).normal(size=size) * spread
    values = (np.round(values * levels) / levels).astype(np.float32)
    assert draw_wide(values, temperature, top_p, chance) in draw_by_sorting(values, temperature, top_p, chance)


@pytest.mark.parametrize("chance", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_neither_end_of_the_chance_leaves_the_nucleus(chance):
    values = np.log(np.array([0.04, 0.3, 0.6, 0.06], dtype=np.float32))
    assert draw_wide(values, 1.0, 0.61, chance) in (1, 2)
    assert draw_wide(values, 1.0, 0.59, chance) == 2
    values[:3] = -np.inf
    assert draw_wide(values, 1.0, 0.99, chance) == 3
