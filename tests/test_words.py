"""A count and its noun agree."""

from __future__ import annotations

import pytest

from kveik.words import counted


@pytest.mark.parametrize(
    ("number", "noun", "form", "shown"),
    [
        *((0, "record", "", "0 records"), (1, "record", "", "1 record"), (2, "record", "", "2 records")),
        *(
            (1, "entry", "", "1 entry"),
            (12_345, "entry", ",", "12,345 entries"),
            (1, "damaged record", ",", "1 damaged record"),
        ),
        (12_345, "byte", "", "12345 bytes"),
    ],
)
def test_one_is_one_and_all_else_are_many(number: int, noun: str, form: str, shown: str) -> None:
    assert counted(number, noun, form) == shown
