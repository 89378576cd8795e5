"""The write filter goes by what went lately, and by nothing whose worth nobody knows."""

from __future__ import annotations

from kveik.offload.write_filter import REMEMBERED, WriteFilter


def test_the_mean_of_what_went_follows_what_went_lately() -> None:
    one = WriteFilter(1.0)
    for _ in range(5000):
        one.gave_up([1.0])
    for _ in range(8 * REMEMBERED):
        one.gave_up([3.0])
    assert 2.9 < one.least <= 3.0


def test_what_nobody_knows_the_worth_of_says_nothing() -> None:
    one = WriteFilter(2.0)
    one.gave_up([1.0])
    one.gave_up([float("-inf")])
    assert one.least == 2.0
