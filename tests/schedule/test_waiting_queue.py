"""The waiting queue, against a list that is sorted anew every time."""

from __future__ import annotations

import random

from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence
from kveik.schedule.scheduling_policy import Rank
from kveik.schedule.waiting_queue import WaitingQueue
from tests.seeds import over_seeds


def member(number: int) -> Sequence:
    request = Request(id=str(number), prompt=(1,), sampling=SamplingParams(max_tokens=1))
    return Sequence.start(id=number, request=request, choice=0, seed=0, arrived=0.0)


@over_seeds(30)
def test_the_line_is_always_in_order_whoever_comes_goes_parks_and_wakes(seed: int) -> None:
    chance, line = random.Random(seed), WaitingQueue()
    standing: dict[int, Rank] = {}
    parked: dict[int, bytes] = {}
    orders: dict[int, Rank] = {}
    members = {number: member(number) for number in range(40)}
    for _ in range(300):
        number = chance.randrange(40)
        match chance.randrange(4):
            case 0 if number not in standing and number not in parked:
                standing[number] = orders.setdefault(number, (chance.randrange(3), number))
                line.add(standing[number], members[number])
            case 1 if number in standing or number in parked:
                line.remove(members[number])
                standing.pop(number, None)
                parked.pop(number, None)
            case 2 if standing:
                place = chance.randrange(len(standing))
                number = sorted(standing, key=standing.__getitem__)[place]
                parked[number] = chance.choice((b"a", b"b", b"c"))
                del standing[number]
                line.park(place, parked[number])
            case 3:
                claimed = {chance.choice((b"a", b"b", b"c"))}
                woken = {number for number, claim in parked.items() if claim not in claimed}
                assert line.wake(claimed.__contains__) == bool(woken)
                for number in woken:
                    del parked[number]
                    standing[number] = orders[number]
        line.check()
        assert [line.at(place).id for place in range(line.ready)] == sorted(standing, key=standing.__getitem__)
        assert len(line) == len(standing) + len(parked)
        assert {sequence.id: claim for sequence, claim in line.parked} == parked


def test_whoever_returns_stands_ahead_of_later_equals() -> None:
    line = WaitingQueue()
    for number in (1, 2, 3):
        line.add((0.0, number), member(number))
    first = line.pop(0)
    line.add((0.0, 4), member(4))
    line.add((0.0, 1), first)
    assert [line.at(place).id for place in range(line.ready)] == [1, 2, 3, 4]


def test_ranks_that_change_with_time_give_another_order() -> None:
    queue = WaitingQueue()
    for number in (1, 2, 3):
        queue.add((0.0, number), member(number))
    queue.park(0, "claim")
    queue.sort(lambda sequence: (-float(sequence.id), sequence.id))
    queue.check()
    assert [queue.at(place).id for place in range(queue.ready)] == [3, 2]
    assert queue.wake(lambda claim: False)
    assert [queue.at(place).id for place in range(queue.ready)] == [3, 2, 1]
