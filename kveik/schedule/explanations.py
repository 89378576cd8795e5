"""Explanations: reasons why sequences do not run, kept from plan to plan, because most reasons outlive many steps."""

from __future__ import annotations

from kveik.cache.capacity import Shortage
from kveik.request.sequence import Sequence
from kveik.schedule.reasons import Cause, NotScheduled, PrefixInFlight
from kveik.schedule.waiting_queue import WaitingQueue


class Explanations:
    """The reasons of one scheduler's waiting sequences."""

    def __init__(self) -> None:
        self._blocked: dict[int, NotScheduled] = {}
        self._parked: tuple[int, tuple[NotScheduled, ...]] = (-1, ())
        self._all: tuple[NotScheduled, ...] | None = None

    def clear(self) -> None:
        """The queue is examined anew."""
        if self._blocked:
            self._blocked.clear()
            self._all = None

    def block(self, sequence: Sequence, shortage: Shortage) -> None:
        """The sequence was examined, and does not fit."""
        cause = Cause.ROWS if shortage.rows else Cause.BLOCKS
        self._note(sequence, cause, shortage.needed, shortage.available)

    def put_off(self, sequence: Sequence) -> None:
        """The policy admitted others first."""
        self._note(sequence, Cause.POLICY, sequence.passed_over, 0)

    def starve(self, sequence: Sequence, budget: int) -> None:
        """No token of the step was left for the sequence."""
        self._note(sequence, Cause.BUDGET, sequence.pending, budget)

    def remove(self, sequence: Sequence) -> None:
        """The sequence runs, or has ended."""
        if self._blocked.pop(sequence.id, None) is not None:
            self._all = None

    def _note(self, sequence: Sequence, cause: Cause, needed: int, available: int) -> None:
        self._all = None
        self._blocked[sequence.id] = NotScheduled(sequence.id, sequence.request.id, cause, needed, available)

    def of(self, queue: WaitingQueue, budget: int, starved: list[NotScheduled]) -> tuple[tuple[NotScheduled, ...], int]:
        """Returns the reasons of the sequences examined and of those without tokens, and the number of others that wait."""
        if budget <= 0 and queue.ready:
            self.starve(queue.at(0), budget)
        waiting = self.all(queue)
        return (*waiting, *starved) if starved else waiting, len(queue) - len(waiting)

    def all(self, queue: WaitingQueue) -> tuple[NotScheduled, ...]:
        """Reasons of the sequences examined and of those parked; the same tuple as long as nothing changes."""
        if self._parked[0] != queue.parkings:
            parked = tuple(
                NotScheduled(
                    sequence.id,
                    sequence.request.id,
                    Cause.PREFIX_IN_FLIGHT if isinstance(claim, PrefixInFlight) else Cause.LOADING,
                    needed=sequence.length,
                )
                for sequence, claim in queue.parked
            )
            self._parked, self._all = (queue.parkings, parked), None
        if self._all is None:
            self._all = (*self._blocked.values(), *self._parked[1])
        return self._all
