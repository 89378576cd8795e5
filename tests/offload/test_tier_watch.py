"""What becomes of a tier is told once per change, and seldom, however often it changes; in virtual time."""

from __future__ import annotations

import logging

import pytest

from kveik.observe.bus import EventBus
from kveik.observe.tier_log import log_tiers
from kveik.offload.stores.record import Miss, Refusal
from kveik.offload.tier_watch import DAMAGED_SECONDS, LINES_MOST, LINES_SECONDS, SETTLED_SECONDS, TierWatch
from tests.offload.test_mover import LIMITS, World


class Watched(World):
    """A tier that is looked at whenever something has been asked of it."""

    def __init__(self) -> None:
        super().__init__()
        bus = EventBus()
        bus.subscribe(log_tiers)
        self.watch = TierWatch(["ram"], bus.publish)

    def look(self, *, last: bool = False) -> None:
        self.watch.look("ram", self.mover.hindrances("ram"), self.clock.now(), last=last)

    def ask(self, seconds: float = 0.1) -> None:
        """One load, and then so much time."""
        self.load(1)
        self.look()
        self.clock.advance(seconds)


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> Watched:
    caplog.set_level(logging.INFO)
    found = Watched()
    found.spill(1)
    return found


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(one.levelname, one.getMessage()) for one in caplog.records]


def test_a_tier_that_fails_for_an_hour_and_is_mended_is_two_lines(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    world.store.gets = lambda _: [Miss.FAILED]
    while world.clock.now() < 3600:
        world.ask()
    assert lines(caplog) == [("WARNING", "The tier ram is in trouble: nothing is read from it: 3 failures in a row.")]
    world.store.gets = lambda _: None
    for _ in range(1000):
        world.ask()
    assert lines(caplog)[1:] == [("INFO", "The tier ram is available again.")]


def test_a_half_that_stands_still_is_told_while_it_does(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    def look_in_the_middle(_: int) -> None:
        world.clock.advance(LIMITS.seconds + 1)
        world.look()

    world.store.gets = look_in_the_middle
    world.load(1)
    assert lines(caplog) == [("WARNING", "The tier ram is in trouble: nothing is read from it: no answer for 2 s.")]
    world.store.puts = look_in_the_middle
    world.spill(2)
    assert "nothing is written to it: no answer for 2 s" in lines(caplog)[1][1]
    # That the breakers opened then is no change.
    world.look()
    assert len(lines(caplog)) == 2


def test_a_tier_that_is_too_slow_says_how_slow(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    def slow(_: int) -> None:
        world.clock.advance(5.0)

    world.store.puts = slow
    world.spill(2)
    world.look()
    assert lines(caplog) == [
        ("WARNING", "The tier ram is in trouble: nothing is written to it: a try took 5.0 s, more than 2.")
    ]


def test_what_is_mended_by_halves_is_told_by_halves(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    world.store.gets, world.store.puts = (lambda _: [Miss.FAILED]), (lambda _: [Refusal.FAILED])
    for number in range(3):
        world.ask()
        world.spill(number + 2)
    world.store.gets = lambda _: None
    for _ in range(100):
        world.ask()
    assert lines(caplog)[-1] == ("INFO", "The tier ram is better, but: nothing is written to it: 3 failures in a row.")


def test_a_store_that_forgets_its_trouble_while_a_half_is_left_alone_is_no_news(
    world: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100):
        hindrances = {"writing": "3 failures in a row"} | ({"store": "no room"} if number % 2 == 0 else {})
        world.watch.look("ram", hindrances, world.clock.now())
        world.clock.advance(2 * SETTLED_SECONDS)
    assert [level for level, _ in lines(caplog)] == ["WARNING"]
    # Nobody has to look again while nothing changes.
    assert not world.watch.unsettled
    for _ in range(2):
        world.watch.look("ram", {}, world.clock.now())
        world.clock.advance(SETTLED_SECONDS)
    assert lines(caplog)[1:] == [("INFO", "The tier ram is available again.")]


def test_one_that_seems_well_for_less_than_a_second_is_not_told_to_be(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    trouble = {"store": "no room"}
    for _ in range(1000):
        for hindrances in (trouble, {}):
            world.watch.look("ram", hindrances, world.clock.now())
            world.clock.advance(0.9 * SETTLED_SECONDS)
    assert lines(caplog) == [("WARNING", "The tier ram is in trouble: no room.")]


def test_a_tier_that_comes_and_goes_for_an_hour_is_a_few_lines_a_minute(
    world: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[float] = []
    faults = 0
    while world.clock.now() < 3600:
        for hindrances in ({"store": "no room"}, {}):
            faults += bool(hindrances)
            world.watch.look("ram", hindrances, world.clock.now())
            told += [world.clock.now()] * (len(caplog.records) - len(told))
            world.clock.advance(1.5 * SETTLED_SECONDS)
            world.watch.look("ram", hindrances, world.clock.now())
            told += [world.clock.now()] * (len(caplog.records) - len(told))
    assert len(told) > LINES_MOST * 30
    assert all(later - earlier >= LINES_SECONDS for earlier, later in zip(told, told[LINES_MOST:], strict=False))
    # What was not told by itself is in the numbers; and the last word is the truth.
    assert sum("faults since" in line for _, line in lines(caplog)) > 30
    world.clock.advance(LINES_SECONDS)
    world.watch.look("ram", {}, world.clock.now())
    assert lines(caplog)[-1][1].startswith("The tier ram is available again")
    assert not world.watch.unsettled


def test_what_there_was_no_line_for_is_told_at_the_end(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(LINES_MOST):
        for hindrances in ({"store": "no room"}, {}):
            world.watch.look("ram", hindrances, world.clock.now())
            world.clock.advance(SETTLED_SECONDS)
            world.watch.look("ram", hindrances, world.clock.now())
    assert len(lines(caplog)) == LINES_MOST
    world.watch.look("ram", {"store": "gone"}, world.clock.now())
    assert len(lines(caplog)) == LINES_MOST
    assert world.watch.unsettled
    world.watch.look("ram", {"store": "gone"}, world.clock.now(), last=True)
    assert lines(caplog)[-1][1].startswith("The tier ram is in trouble: gone (faults since the line before: ")


def test_damaged_records_are_one_line_then_one_a_minute_and_none_is_left_out(
    world: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(600):
        world.watch.count_damaged("ram", 2)
        world.ask(1.0)
    found = lines(caplog)
    assert found[0] == ("WARNING", "The tier ram gave 2 damaged records; what they held is computed again.")
    assert len(found) == 600 / DAMAGED_SECONDS
    world.look(last=True)
    assert sum(int(line.split(" gave ")[1].split()[0]) for _, line in lines(caplog)) == 1200
