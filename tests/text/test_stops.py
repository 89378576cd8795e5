"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import random
import time

from kveik.text.stops import Match, StopFinder
from tests.seeds import over_seeds


def first_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The slow model: the first position at which some stop string is complete, and the longest one there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def pending_of(text: str, stops: list[str]) -> int:
    """The slow model: the longest end of the text that begins a stop string and is not all of it."""
    lengths = [n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


@over_seeds(200)
def test_matches_and_what_is_pending_equal_the_slow_model_whatever_the_pieces(seed: int) -> None:
    chance = random.Random(seed)
    stops = ["".join(chance.choices("abc", k=chance.randint(1, 5))) for _ in range(chance.randint(1, 5))]
    text = "".join(chance.choices("abcd", k=chance.randint(0, 40)))
    finder, read = StopFinder(stops), 0
    expected = first_end(text, stops)
    while read < len(text):
        piece = text[read : read + chance.randint(1, 6)]
        match = finder.feed(piece)
        if match is not None:
            assert expected == (read + match.end, match.stop)
            return
        read += len(piece)
        assert finder.pending == pending_of(text[:read], stops)
    assert expected is None


def test_a_match_inside_a_piece_is_found() -> None:
    assert StopFinder(["DE"]).feed("ABCDEF") == Match("DE", 5)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert StopFinder(["abcdef", "cd"]).feed("abcdef") == Match("cd", 4)


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    assert StopFinder(["c", "abc", "bc"]).feed("xabc") == Match("abc", 4)


def test_only_what_may_become_a_stop_string_is_pending() -> None:
    finder = StopFinder(["\n\nUser:"])
    for text, pending in [("Hello", 0), ("\n", 1), ("\n", 2), ("\n", 2), ("Use", 5), ("x", 0)]:
        assert finder.feed(text) is None
        assert finder.pending == pending


def test_passing_over_keeps_only_what_may_begin_another_stop_string() -> None:
    finder = StopFinder(["END", "D!"])
    assert finder.feed("the END", counts=False) is None
    assert finder.pending == 1
    assert finder.feed("!") == Match("D!", 1)


def test_passed_over_matches_do_not_hide_longer_ones() -> None:
    finder = StopFinder(["ab", "abc"])
    assert finder.feed("ab", counts=False) is None
    assert finder.feed("c") == Match("abc", 1)


def test_the_most_and_longest_stop_strings_allowed_cost_one_step_per_character() -> None:
    stops = ["a" * 1023 + chr(0x4E00 + index) for index in range(64)]
    finder = StopFinder(stops)
    start = time.process_time()
    for _ in range(2000):
        assert finder.feed("a" * 100) is None
    # 200,000 steps; comparing every beginning of every stop string at each would be 13 thousand million.
    assert time.process_time() - start < 2
    assert finder.pending == 1023
    assert finder.feed(chr(0x4E01)) == Match(stops[1], 1)
