"""Parts of a text that are read: disjoint, spread over it, and exactly as many tokens as were asked for."""

from __future__ import annotations

import random

import pytest

from kveik.measure.hidden_states import prompts, windows
from tests.seeds import over_seeds


@over_seeds(50)
def test_windows_are_disjoint_in_order_and_hold_what_was_asked_for(seed: int) -> None:
    chance = random.Random(seed)
    text = list(range(1, chance.randrange(3, 400)))
    total, context = chance.randrange(2, 500), chance.randrange(3, 60)
    found = windows(text, total, context)
    read = [token for window in found for token in window]
    assert read == sorted(set(read))
    assert all(2 <= len(window) <= context for window in found)
    assert all(list(window) == text[window[0] - 1 : window[-1]] for window in found)
    # A last window of one token would foretell nothing, and is left out.
    assert 0 <= min(total, len(text)) - len(read) <= 1


def test_windows_are_spread_from_the_beginning_to_the_end() -> None:
    found = windows(range(1000), 40, 10)
    assert [window[0] for window in found] == [0, 330, 660, 990]
    assert found[-1][-1] == 999


def test_every_window_begins_with_the_start_token_within_its_context() -> None:
    found = windows(range(100, 200), 20, 6, lead=(1,))
    assert [len(window) for window in found] == [6, 6, 6, 6]
    assert all(window[0] == 1 for window in found)
    assert sum(len(window) - 1 for window in found) == 20


@pytest.mark.parametrize("text", [[], [7]])
def test_a_text_that_foretells_nothing_has_no_window(text: list[int]) -> None:
    assert windows(text, 100, 10) == []


def test_prompts_begin_all_over_the_text() -> None:
    assert prompts(range(100), 4, 10) == [tuple(range(place, place + 10)) for place in (0, 22, 45, 67)]
    assert prompts(range(100), 2, 10, lead=(200,))[1] == (200, *range(45, 54))
    assert prompts(range(3), 2, 10) == [(0, 1, 2), (0, 1, 2)]
    assert prompts(range(100), 0, 10) == []
