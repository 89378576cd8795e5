"""Who comes first, who gives way, and who may take another's place. Facts about sequences in, decisions out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kveik.config import ScheduleConfig
from kveik.request.sequence import Sequence
from kveik.schedule.waiting_queue import Order


class Policy(Protocol):
    """An order that never changes while a sequence lives: so the first of all always is first, and finishes."""

    def order(self, sequence: Sequence) -> Order:
        """Place in the queue; smaller is earlier."""
        ...

    def feeding_order(self, prefills: Iterable[Sequence]) -> list[Sequence]:
        """Running sequences that are behind (given in order of admission), in the order in which they get prompt tokens."""
        ...

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Which of these gives its blocks up when there is none left."""
        ...

    def may_displace(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether the waiting one is so much more important that the running one must give way."""
        ...


class FirstCome:
    """First come, first served; the newest admitted gives way."""

    def order(self, sequence: Sequence) -> Order:
        return (0.0, sequence.id)

    def feeding_order(self, prefills: Iterable[Sequence]) -> list[Sequence]:
        return list(prefills)

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=lambda sequence: sequence.admission)

    def may_displace(self, waiting: Sequence, running: Sequence) -> bool:
        return False


class PriorityWithAging:
    """Lower `priority` first; every `aging` seconds of age count as one level.

    A sequence's urgency at time t is priority - (t - arrived) / aging. The difference of two urgencies does not change with
    t, so priority + arrived / aging is a fixed order, and nothing needs sorting again. A sequence of priority p is passed by
    one of priority q < p only if that one comes less than (p - q) * aging seconds later: so its wait is bounded.
    """

    def __init__(self, aging: float) -> None:
        self._aging = aging

    def order(self, sequence: Sequence) -> Order:
        return (sequence.request.priority + sequence.arrived / self._aging, sequence.id)

    def feeding_order(self, prefills: Iterable[Sequence]) -> list[Sequence]:
        return sorted(prefills, key=self.order)

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=self.order)

    def may_displace(self, waiting: Sequence, running: Sequence) -> bool:
        """Only a better priority takes another's place, and not that of one whose age outweighs it."""
        return waiting.request.priority < running.request.priority and self.order(waiting) < self.order(running)


def policy_for(limits: ScheduleConfig) -> Policy:
    """The policy that the configuration names."""
    if limits.scheduling_policy == "priority":
        return PriorityWithAging(limits.priority_aging_seconds)
    return FirstCome()
