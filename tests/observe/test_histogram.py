import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Theirs

from kveik.observe.histogram import Histogram

BOUNDS = (0.1, 0.5, 1, 10)
VALUES = st.lists(st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0, 10.0, 11.0]), st.floats(0, 100)), max_size=40)


@given(st.lists(VALUES, max_size=5))
def test_values_fall_into_the_buckets_of_the_clients_own_histogram(batches):
    ours, registry = Histogram(BOUNDS), CollectorRegistry()
    theirs = Theirs("seconds", "Seconds.", buckets=BOUNDS, registry=registry)
    for batch in batches:
        ours.observe_all(batch)
        for value in batch:
            theirs.observe(value)
    for bound, count in ours.buckets:
        assert registry.get_sample_value("seconds_bucket", {"le": bound}) == count
    assert registry.get_sample_value("seconds_count") == ours.count
    assert registry.get_sample_value("seconds_sum") == pytest.approx(ours.sum)


@given(VALUES)
def test_many_at_once_count_as_one_by_one(values):
    together, singly = Histogram(BOUNDS), Histogram(BOUNDS)
    together.observe_all(values)
    for value in values:
        singly.observe(value)
    assert together.buckets == singly.buckets
    assert together.sum == pytest.approx(singly.sum)


def test_bounds_that_do_not_ascend_are_refused():
    with pytest.raises(AssertionError):
        Histogram([1, 1])
