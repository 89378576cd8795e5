"""The state of a tier follows its store and its breakers; a change is one event and one line, and events are rare."""

from __future__ import annotations

import itertools
import logging
import random

import pytest

from kveik.clock import StepClock
from kveik.observe.bus import EventBus
from kveik.observe.events import RecordsDamaged, TierState, TierStateChanged
from kveik.observe.tiers import log_tiers
from kveik.offload.availability import (
    AVAILABLE,
    DAMAGED_SECONDS,
    EVENTS_MAX,
    EVENTS_SECONDS,
    RECOVERY_SECONDS,
    Availability,
    TierAvailability,
)
from kveik.offload.stores.record import Miss, Refusal
from tests.offload.test_mover import LIMITS, World

FULL = Availability(TierState.DEGRADED, "the disk is full")
GONE = Availability(TierState.UNAVAILABLE, "the index was removed")


class Watched(World):
    """A tier whose events are asked for whenever something has been asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bus = EventBus()
        self.bus.subscribe(log_tiers)

    def look(self, *, last: bool = False) -> None:
        for event in self.mover.events(last=last):
            self.bus.publish(event)

    def ask(self, seconds: float = 0.1) -> None:
        """One load, and then so much time."""
        self.load(1)
        self.look()
        self.clock.advance(seconds)

    @property
    def state(self) -> tuple[TierState, str]:
        snapshot = self.mover.snapshot("ram")
        return snapshot.state, snapshot.reason


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> Watched:
    caplog.set_level(logging.INFO)
    found = Watched()
    found.put(1)
    return found


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(one.levelname, one.getMessage()) for one in caplog.records]


def test_a_tier_that_fails_for_an_hour_and_recovers_is_two_lines(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    world.store.gets = lambda _: [Miss.FAILED]
    while world.clock.now() < 3600:
        world.ask()
    assert lines(caplog) == [
        (
            "WARNING",
            'tier state: tier=ram state=unavailable reason="reads stopped: 3 failures in a row" seconds=0.2 changes=1',
        )
    ]
    world.store.gets = lambda _: None
    for _ in range(1000):
        world.ask()
    [(level, line)] = lines(caplog)[1:]
    assert level == "INFO"
    assert line.startswith("tier state: tier=ram state=available seconds=3")
    assert line.endswith("changes=1")


def test_a_tier_that_does_not_answer_is_unavailable_while_it_does_not(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    found: list[tuple[TierState, str]] = []

    def look_in_the_middle(_: int) -> None:
        world.clock.advance(LIMITS.timeout + 1)
        world.look()
        found.append(world.state)

    world.store.gets = look_in_the_middle
    world.load(1)
    assert found == [(TierState.UNAVAILABLE, "reads stopped: no answer for 2 s")]
    assert 'state=unavailable reason="reads stopped: no answer for 2 s"' in lines(caplog)[0][1]
    # The breaker has stopped reads by now, which is no change.
    world.look()
    assert len(lines(caplog)) == 1


def test_a_tier_that_is_not_written_is_degraded_and_says_how_slow_it_was(
    world: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(_: int) -> None:
        world.clock.advance(5.0)

    world.store.puts = slow
    world.put(2)
    world.look()
    assert world.state == (TierState.DEGRADED, "writes stopped: a try took 5.0 s, more than 2")
    assert [level for level, _ in lines(caplog)] == ["WARNING"]


def test_a_tier_that_is_read_again_and_not_yet_written_is_degraded(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    world.store.gets, world.store.puts = (lambda _: [Miss.FAILED]), (lambda _: [Refusal.FAILED])
    for number in range(3):
        world.ask()
        world.put(number + 2)
    assert world.state == (
        TierState.UNAVAILABLE,
        "reads stopped: 3 failures in a row; writes stopped: 3 failures in a row",
    )
    world.store.gets = lambda _: None
    for _ in range(100):
        world.ask()
    level, line = lines(caplog)[-1]
    assert level == "WARNING"
    assert 'state=degraded reason="writes stopped: 3 failures in a row"' in line


class Condition:
    """A tier whose store is as it is told to be."""

    def __init__(self) -> None:
        self.clock, self.now = StepClock(), AVAILABLE
        self.tier = TierAvailability("disk", lambda: self.now, LIMITS, 0.0)
        self.events: list[TierStateChanged] = []

    def be(self, now: Availability, seconds: float, *, last: bool = False) -> None:
        """Be like this for so long, and looked at when it begins and when it ends."""
        self.now = now
        self.look(last=last)
        self.clock.advance(seconds)
        self.look(last=last)

    def look(self, *, last: bool = False) -> None:
        if (event := self.tier.changed(self.clock.now(), last=last)) is not None:
            self.events.append(event)


def test_the_state_is_the_worst_of_store_and_breakers_with_every_reason() -> None:
    found = Condition()
    assert found.tier.current(0.0) == AVAILABLE
    found.now = FULL
    assert found.tier.current(0.0) == FULL
    for _ in range(3):
        found.tier.writing.begin(0.0)
        found.tier.writing.end(0.0, 0.1, failed=True)
    assert found.tier.current(0.0) == (TierState.DEGRADED, "writes stopped: 3 failures in a row; the disk is full")
    found.now = GONE
    assert found.tier.current(0.0) == (TierState.UNAVAILABLE, "writes stopped: 3 failures in a row; the index was removed")


def test_every_change_that_lasts_is_one_event_with_the_time_in_the_state_before() -> None:
    found = Condition()
    found.clock.advance(10.0)
    for now in (FULL, GONE, FULL, AVAILABLE):
        found.be(now, 10.0)
    assert found.events == [
        TierStateChanged("disk", *FULL, 10.0, 1),
        TierStateChanged("disk", *GONE, 10.0, 1),
        TierStateChanged("disk", *FULL, 20.0, 1),
        TierStateChanged("disk", *AVAILABLE, 10.0, 1),
    ]
    assert not found.tier.unsettled(0)


def test_one_that_seems_better_for_less_than_a_second_has_not_recovered() -> None:
    found = Condition()
    for _ in range(1000):
        found.be(FULL, 0.9 * RECOVERY_SECONDS)
        found.be(AVAILABLE, 0.9 * RECOVERY_SECONDS)
    assert [event.state for event in found.events] == [TierState.DEGRADED]
    assert found.tier.unsettled(0)
    found.be(AVAILABLE, RECOVERY_SECONDS)
    assert found.events[1] == TierStateChanged("disk", *AVAILABLE, found.clock.now(), 1999)


def test_a_tier_that_comes_and_goes_for_an_hour_is_a_few_events_a_minute_and_the_last_is_the_truth() -> None:
    found, times = Condition(), list[float]()
    while found.clock.now() < 3600:
        for now in (FULL, AVAILABLE):
            found.be(now, 1.5 * RECOVERY_SECONDS)
            times += [found.clock.now()] * (len(found.events) - len(times))
    assert len(times) > EVENTS_MAX * 30
    assert all(later - earlier >= EVENTS_SECONDS - 3 for earlier, later in zip(times, times[EVENTS_MAX:], strict=False))
    # Changes without an event of their own are counted in the next one.
    found.be(AVAILABLE, EVENTS_SECONDS)
    assert 2300 < sum(event.changes for event in found.events) <= 3600 / (1.5 * RECOVERY_SECONDS)
    assert found.events[-1].state is TierState.AVAILABLE
    assert not found.tier.unsettled(0)


def test_a_change_that_has_to_wait_is_published_at_the_end() -> None:
    found = Condition()
    for _ in range(EVENTS_MAX):
        found.be(FULL, RECOVERY_SECONDS)
        found.be(AVAILABLE, RECOVERY_SECONDS)
    assert len(found.events) == EVENTS_MAX
    found.be(GONE, 0.0)
    assert len(found.events) == EVENTS_MAX
    assert found.tier.unsettled(0)
    found.be(GONE, 0.0, last=True)
    assert (found.events[-1].state, found.events[-1].reason) == GONE


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_the_last_event_is_the_state_once_it_has_lasted(seed: int) -> None:
    chance, found = random.Random(seed), Condition()
    for _ in range(400):
        found.be(chance.choice((AVAILABLE, FULL, GONE)), chance.choice((0.0, 0.1, 2.0, 30.0)))
        states = [TierState.AVAILABLE, *(event.state for event in found.events)]
        assert all(one is not other for one, other in itertools.pairwise(states))
    for _ in range(3):
        found.be(found.now, EVENTS_SECONDS)
    assert found.events[-1].state is found.now.state
    assert not found.tier.unsettled(0)


def test_damaged_records_are_one_event_then_one_a_minute_and_none_is_left_out() -> None:
    found, published = Condition(), list[RecordsDamaged]()
    for second in range(600):
        if (event := found.tier.damaged(2 * (second + 1), float(second))) is not None:
            published.append(event)
    assert published[0] == RecordsDamaged("disk", 2)
    assert len(published) == 600 / DAMAGED_SECONDS
    last = found.tier.damaged(1200, 600.0, last=True)
    assert last is not None
    assert sum(event.records for event in [*published, last]) == 1200
    assert found.tier.damaged(1200, 1e9, last=True) is None


def test_damaged_records_are_counted_by_the_reader_and_logged(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    world.store.shown = lambda _, record: memoryview(bytes(record[:-1]) + bytes([record[-1] ^ 1]))
    assert world.load(1, 1) == [Miss.DAMAGED] * 2
    world.look()
    assert lines(caplog) == [("WARNING", "tier records damaged: tier=ram records=2")]
