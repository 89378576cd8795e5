"""A breaker stops after failures, for a pause that doubles, and lets one try for all."""

from __future__ import annotations

import random

from kveik.offload.availability import Breaker, BreakerLimits
from tests.seeds import over_seeds

LIMITS = BreakerLimits(failures=3, timeout=2.0, pause=1.0, pause_max=8.0)


def stopped_at(now: float = 0.0) -> Breaker:
    breaker = Breaker(LIMITS)
    for _ in range(3):
        breaker.begin(now)
        breaker.end(now, 0.1, failed=True)
    return breaker


def test_failures_in_a_row_open_it_and_others_do_not() -> None:
    breaker = Breaker(LIMITS)
    for failed in (True, True, False, True, True):
        breaker.begin(0.0)
        breaker.end(0.0, 0.1, failed=failed)
    assert breaker.stopped(0.0) is None
    breaker.end(0.0, 0.1, failed=True)
    assert breaker.stopped(0.0) == "3 failures in a row"
    assert not breaker.admits(0.0)


def test_one_try_that_takes_too_long_opens_it_though_it_succeeds() -> None:
    breaker = Breaker(LIMITS)
    breaker.begin(0.0)
    breaker.end(5.0, 5.0, failed=False)
    assert breaker.stopped(5.0) == "a try took 5.0 s, more than 2"
    assert not breaker.admits(5.0)


def test_after_the_pause_one_may_try_for_all() -> None:
    breaker = stopped_at()
    assert not breaker.admits(0.99)
    assert breaker.admits(1.0)
    breaker.begin(1.0)
    assert not breaker.admits(1.0)
    breaker.end(1.1, 0.1, failed=False)
    assert breaker.stopped(1.1) is None
    assert breaker.admits(1.1)


def test_the_pause_doubles_up_to_its_most_and_begins_anew_after_success() -> None:
    breaker, now, pauses = stopped_at(), 0.0, []
    for _ in range(6):
        start = now
        while not breaker.admits(now):
            now += 0.25
        pauses.append(now - start)
        breaker.begin(now)
        breaker.end(now, 0.0, failed=True)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert breaker.stops == 7
    now += 8.0
    breaker.begin(now)
    breaker.end(now, 0.0, failed=False)
    for _ in range(3):
        breaker.end(now, 0.0, failed=True)
    assert not breaker.admits(now + 0.99)
    assert breaker.admits(now + 1.0)


def test_a_check_that_goes_well_closes_it_and_the_pause_goes_on_doubling_until_something_has_been_served() -> None:
    breaker, now, pauses = stopped_at(), 0.0, []
    for _ in range(3):
        start = now
        while not breaker.admits(now):
            now += 0.25
        pauses.append(now - start)
        breaker.begin(now)
        breaker.end(now, 0.1, failed=False, check=True)
        assert breaker.stopped(now) is None
        breaker.begin(now)
        breaker.end(now, 5.0, failed=False)
    assert pauses == [1.0, 2.0, 4.0]
    now += 8.0
    breaker.begin(now)
    breaker.end(now, 0.1, failed=False, check=True)
    breaker.end(now, 0.1, failed=False)
    breaker.end(now, 0.1, failed=False, check=True)
    breaker.end(now, 5.0, failed=False)
    assert not breaker.admits(now + 0.99)
    assert breaker.admits(now + 1.0)


@over_seeds(5)
def test_asking_changes_nothing_and_it_always_comes_back(seed: int) -> None:
    chance, breaker, now = random.Random(seed), Breaker(LIMITS), 0.0
    for _ in range(300):
        now += chance.random() * 3
        assert [breaker.admits(now) for _ in range(3)] in ([True] * 3, [False] * 3)
        if breaker.admits(now):
            breaker.begin(now)
            breaker.end(now, chance.random() * 2.5, failed=chance.random() < 0.6)
    assert breaker.admits(now + LIMITS.pause_max)


def test_a_try_that_does_not_come_back_stops_others_until_it_does() -> None:
    breaker = Breaker(LIMITS)
    breaker.begin(0.0)
    assert (breaker.stopped(2.0), breaker.admits(2.0)) == (None, True)
    assert (breaker.stopped(2.5), breaker.admits(2.5)) == ("no answer for 2 s", False)
    breaker.end(3.0, 3.0, failed=False)
    assert not breaker.admits(3.5)
    assert breaker.admits(4.0)
