"""Scheduling policies: order of sequences, prompt tokens per step, and choice of the victim."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kveik.config import ScheduleConfig
from kveik.request.sequence import Sequence

Rank = tuple[float, int]
"""A smaller rank comes earlier; the second part is the sequence's id, so no two are equal."""


class Policy(Protocol):
    """An order of sequences. The first of all by rank must stay first until it finishes, so that sequences surely finish."""

    changes: bool
    """True if ranks change as time passes: the waiting queue is then sorted anew before every plan."""

    def rank(self, sequence: Sequence, now: float) -> Rank:
        """Place in the waiting queue, and among running sequences that get prompt tokens."""
        ...

    def budget(self, now: float) -> int:
        """Prompt tokens that a step computes at most."""
        ...

    def victim(self, candidates: Iterable[Sequence], now: float) -> Sequence:
        """Returns the running sequence that is preempted when no block is left."""
        ...

    def may_preempt(self, waiting: Sequence, running: Sequence, now: float) -> bool:
        """True if the waiting sequence is so much more urgent that the running one is preempted."""
        ...


class FirstCome:
    """First come, first served; the newest admitted is preempted."""

    changes = False

    def __init__(self, limits: ScheduleConfig) -> None:
        self._chunk = limits.prefill_chunk_size

    def rank(self, sequence: Sequence, now: float) -> Rank:
        return (0.0, sequence.admission if sequence.row is not None else sequence.id)

    def budget(self, now: float) -> int:
        return self._chunk

    def victim(self, candidates: Iterable[Sequence], now: float) -> Sequence:
        return max(candidates, key=lambda sequence: sequence.admission)

    def may_preempt(self, waiting: Sequence, running: Sequence, now: float) -> bool:
        return False


class PriorityWithAging:
    """Lower `priority` first; every `aging` seconds of age count as one level.

    A sequence's urgency at time t is priority - (t - arrived) / aging. The difference of two urgencies does not change with
    t, so priority + arrived / aging is a fixed order, and nothing needs sorting again. A sequence of priority p is passed by
    one of priority q < p only if that one comes less than (p - q) * aging seconds later: so its wait is bounded.
    """

    changes = False

    def __init__(self, limits: ScheduleConfig) -> None:
        self._aging = limits.priority_aging_seconds
        self._chunk = limits.prefill_chunk_size

    def rank(self, sequence: Sequence, now: float) -> Rank:
        return (sequence.request.priority + sequence.arrived / self._aging, sequence.id)

    def budget(self, now: float) -> int:
        return self._chunk

    def victim(self, candidates: Iterable[Sequence], now: float) -> Sequence:
        return max(candidates, key=lambda sequence: self.rank(sequence, now))

    def may_preempt(self, waiting: Sequence, running: Sequence, now: float) -> bool:
        """Only a better priority preempts, and not a sequence whose age outweighs it."""
        return waiting.request.priority < running.request.priority and self.rank(waiting, now) < self.rank(running, now)


def policy_for(limits: ScheduleConfig) -> Policy:
    """Returns the policy that the configuration names."""
    return PriorityWithAging(limits) if limits.scheduling_policy == "priority" else FirstCome(limits)
