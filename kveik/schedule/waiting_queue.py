"""Sequences that wait, in the order in which they should run. Knows no blocks; the order is given by a policy.

line    [ first  second  third … ]        can be admitted as soon as there is room
parked  claim -> [ … ]                    wait for content that a running sequence is about to compute
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from kveik.request.sequence import Sequence

Order = tuple[float, int]
"""Smaller runs earlier; the second part is the sequence's id, so no two are equal."""


class WaitingQueue:
    """A sorted array: O(log n) to find a place, and to move at most `max_waiting` pointers to use it.

    A preempted sequence has the order it had before, and so returns ahead of all that are equal but came later.
    """

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._line: list[Sequence] = []
        self._parked: dict[bytes, dict[int, tuple[Order, Sequence]]] = {}
        self._claim: dict[int, bytes] = {}

    def __len__(self) -> int:
        """All that wait, the parked ones included."""
        return len(self._line) + len(self._claim)

    @property
    def ready(self) -> int:
        """How many stand in line."""
        return len(self._line)

    @property
    def parked(self) -> int:
        """How many wait for a claim."""
        return len(self._claim)

    def at(self, place: int) -> Sequence:
        """Who stands at this place in line; 0 is first."""
        return self._line[place]

    def add(self, order: Order, sequence: Sequence) -> None:
        place = bisect_left(self._orders, order)
        self._orders.insert(place, order)
        self._line.insert(place, sequence)

    def leave(self, place: int) -> Sequence:
        """Take the one at this place out."""
        del self._orders[place]
        return self._line.pop(place)

    def park(self, place: int, claim: bytes) -> None:
        """The one at this place waits for a claim, and is not in line meanwhile."""
        order = self._orders[place]
        sequence = self.leave(place)
        self._parked.setdefault(claim, {})[sequence.id] = (order, sequence)
        self._claim[sequence.id] = claim

    def wake(self, claimed: Callable[[bytes], bool]) -> bool:
        """Whoever waits for a claim that is gone is back in line, in his old place. Whether there was anybody."""
        gone = [claim for claim in self._parked if not claimed(claim)]
        for claim in gone:
            for order, sequence in self._parked.pop(claim).values():
                del self._claim[sequence.id]
                self.add(order, sequence)
        return bool(gone)

    def remove(self, order: Order, sequence: Sequence) -> None:
        """Take out one that is in line or parked."""
        claim = self._claim.pop(sequence.id, None)
        if claim is None:
            self.leave(bisect_left(self._orders, order))
            return
        waiters = self._parked[claim]
        del waiters[sequence.id]
        if not waiters:
            del self._parked[claim]

    def check(self) -> None:
        """The line is sorted, nobody is in it twice, and the parked ones are found from both sides."""
        assert self._orders == sorted(self._orders), "the line is out of order"
        ids = [sequence.id for sequence in self._line]
        assert [order[1] for order in self._orders] == ids
        parked = {id_: claim for claim, waiters in self._parked.items() for id_ in waiters}
        assert parked == self._claim
        assert len(set(ids) | set(parked)) == len(self), "somebody waits twice"
