"""Waiting queue: sequences in the order in which they should run. Independent of blocks; a policy gives the ranks.

queue   [ first  second  third … ]        can be admitted as soon as there are blocks
parked  claim -> [ … ]                    wait for blocks that are being computed or loaded
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable

from kveik.request.sequence import Sequence
from kveik.schedule.scheduling_policy import Rank


class WaitingQueue:
    """A sorted array: O(log n) to find a place, then at most `max_waiting` pointers to move.

    A preempted sequence has the rank it had before, and so returns ahead of all that are equal but came later.
    """

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._queue: list[Sequence] = []
        self._parked: dict[Hashable, dict[int, Sequence]] = {}
        self._claim: dict[int, Hashable] = {}
        self._rank_of: dict[int, Rank] = {}
        self.parkings = 0
        """Incremented by every parking and waking: values derived from the parked sequences are valid until then."""

    def __len__(self) -> int:
        """Number of waiting sequences, the parked ones included."""
        return len(self._rank_of)

    @property
    def ready(self) -> int:
        """Number of sequences that are not parked."""
        return len(self._queue)

    @property
    def parked(self) -> list[tuple[Sequence, Hashable]]:
        """Parked sequences, each with its claim."""
        return [(sequence, claim) for claim, waiters in self._parked.items() for sequence in waiters.values()]

    def at(self, place: int) -> Sequence:
        """The sequence at this place in the queue; 0 is first."""
        return self._queue[place]

    def add(self, rank: Rank, sequence: Sequence) -> None:
        self._rank_of[sequence.id] = rank
        self._insert(rank, sequence)

    def _insert(self, rank: Rank, sequence: Sequence) -> None:
        place = bisect_left(self._ranks, rank)
        self._ranks.insert(place, rank)
        self._queue.insert(place, sequence)

    def pop(self, place: int) -> Sequence:
        """Remove and return the sequence at this place."""
        del self._ranks[place]
        sequence = self._queue.pop(place)
        del self._rank_of[sequence.id]
        return sequence

    def park(self, place: int, claim: Hashable) -> None:
        """Move the sequence at this place from the queue to those that wait for this claim."""
        del self._ranks[place]
        sequence = self._queue.pop(place)
        self._parked.setdefault(claim, {})[sequence.id] = sequence
        self._claim[sequence.id] = claim
        self.parkings += 1

    def wake(self, pending: Callable[[Hashable], bool]) -> bool:
        """Return sequences whose claim is not pending any more to their places in the queue. True if there were any."""
        gone = [claim for claim in self._parked if not pending(claim)]
        for claim in gone:
            for sequence in self._parked.pop(claim).values():
                del self._claim[sequence.id]
                self._insert(self._rank_of[sequence.id], sequence)
        self.parkings += len(gone)
        return bool(gone)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is in the queue or parked."""
        rank, claim = self._rank_of.pop(sequence.id), self._claim.pop(sequence.id, None)
        if claim is None:
            place = bisect_left(self._ranks, rank)
            del self._ranks[place], self._queue[place]
            return
        waiters = self._parked[claim]
        del waiters[sequence.id]
        self.parkings += 1
        if not waiters:
            del self._parked[claim]

    def sort(self, rank: Callable[[Sequence], Rank]) -> None:
        """Rank all sequences anew: O(n log n)."""
        everything = [*self._queue, *(sequence for sequence, _ in self.parked)]
        self._rank_of = {sequence.id: rank(sequence) for sequence in everything}
        self._queue.sort(key=lambda sequence: self._rank_of[sequence.id])
        self._ranks = [self._rank_of[sequence.id] for sequence in self._queue]

    def check(self) -> None:
        """The queue is sorted, no sequence is in it twice, and both indices of parked sequences agree."""
        assert self._ranks == sorted(self._ranks), "the waiting queue is out of order"
        ids = [sequence.id for sequence in self._queue]
        assert self._ranks == [self._rank_of[id_] for id_ in ids], "a rank is not the sequence's"
        parked = {id_: claim for claim, waiters in self._parked.items() for id_ in waiters}
        assert parked == self._claim, "the two indices of parked sequences differ"
        assert set(ids) | set(parked) == self._rank_of.keys(), "a sequence waits twice or never"
        assert len(ids) + len(parked) == len(self), "a sequence waits twice or never"
