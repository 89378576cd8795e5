"""A disk that was full for a moment is asked again in a second; one that says more than it has, ever more seldom."""

from __future__ import annotations

from kveik.offload.stores.disk import PAUSE_SECONDS, PAUSE_SECONDS_MOST, DiskBound

MOST, LEAST = 1_000_000, 1_000


def test_a_whole_batch_that_finds_the_disk_full_costs_one_pause() -> None:
    room = DiskBound(MOST, LEAST)
    for _ in range(16):
        room.narrow(500_000, now=10.0)
    assert (room.bytes, room.is_narrow) == (500_000, True)
    assert not room.may_ask(10.0 + PAUSE_SECONDS / 2)
    assert room.may_ask(10.0 + PAUSE_SECONDS)
    room.widen(2 * MOST, now=11.0)
    assert (room.bytes, room.is_narrow, room.may_ask(1e9)) == (MOST, False, False)


def test_while_nothing_is_free_it_is_asked_every_second_and_never_falls_below_one_record_of_each_group() -> None:
    room = DiskBound(MOST, LEAST)
    room.narrow(-5, now=0.0)
    assert room.bytes == LEAST
    for second in range(1, 600):
        assert room.may_ask(float(second))
        room.widen(LEAST, now=float(second))
    room.widen(MOST // 2, now=600.0)
    assert room.bytes == MOST // 2


def test_where_more_is_said_to_be_free_than_there_is_it_is_asked_ever_more_seldom() -> None:
    room, now, asked = DiskBound(MOST, LEAST), 0.0, 0
    room.narrow(500_000, now)
    while now < 3600.0:
        now += 0.25
        if room.may_ask(now):
            asked += 1
            room.widen(MOST, now)
            room.narrow(500_000, now)
    assert asked < 8 + 3600 / PAUSE_SECONDS_MOST + 8
    # Much later it is another story.
    room.narrow(400_000, now + 5 * PAUSE_SECONDS_MOST)
    assert room.may_ask(now + 5 * PAUSE_SECONDS_MOST + PAUSE_SECONDS)
