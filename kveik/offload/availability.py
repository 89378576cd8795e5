"""Availability of a tier: one state, made of two breakers and the store's own condition. Pure; time is passed in.

                    reads stopped, or the store cannot be read
        ┌────────────────────────────────────────────────────────────────┐
        │       writes stopped, disk full         the same               ▼
    available ──────────────────────────▶ degraded ────────────▶ unavailable
        ▲                                  │    ▲                     │  │
        └───────── recovered ──────────────┘    └──── reads again ────┘  │
        └───────────────────────────── recovered ────────────────────────┘

A change for the worse is published at once, a recovery after it has lasted for a second. Where changes are many, both wait.

Reads and writes have a breaker each, so that a server which can only be read is read:

    admits all ──failures in a row, or one try over the timeout──▶ stopped ──pause over, one try: success──▶ admits all
                                                                    ▲                      │
                                                                    └── failure: pause × 2 ┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kveik.observe.events import RecordsDamaged, TierState, TierStateChanged
from kveik.words import counted

RECOVERY_SECONDS = 1.0
"""Time for which a tier must be better before that is published: one that is tried again may seem better for a moment."""

EVENTS_MAX, EVENTS_SECONDS = 6, 60.0
"""Changes of one tier that are published in so much time."""

DAMAGED_SECONDS = 60.0
"""Least time between two events on damaged records of one tier."""

_ORDER = (TierState.AVAILABLE, TierState.DEGRADED, TierState.UNAVAILABLE)


class Availability(NamedTuple):
    """State of a store or a tier, and the reason in words for the log; empty where it is available."""

    state: TierState
    reason: str = ""


AVAILABLE = Availability(TierState.AVAILABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """Limits that stop a breaker, and for how long."""

    failures: int = 3
    """Failures in a row that stop it."""

    timeout: float = 2.0
    """Seconds after which one try stops it at once, even if it succeeds."""

    pause: float = 1.0
    """Seconds for which it is stopped at first."""

    pause_max: float = 60.0
    """Seconds for which it is stopped after many failed tries."""


class Breaker:
    """Judges one direction of a store by how tries end. Ask `admits`, then `begin`, then `end`. One thread tries."""

    def __init__(self, limits: BreakerLimits = BreakerLimits()) -> None:
        self.limits = limits
        self.stops = 0
        """Times that it has stopped."""

        self._reason: str | None = None
        self._since: float | None = None
        """Start of the try that is under way."""

        self._trial = False
        """The try that is under way decides whether it admits all again."""

        self._failures = 0
        self._pause = limits.pause
        self._until = 0.0
        self._proven = True
        """A try that was more than a check has succeeded since it was stopped."""

    def stopped(self, now: float) -> str | None:
        """Reason for which tries are refused, until one has succeeded; None: they are admitted."""
        return f"no answer for {self.limits.timeout:g} s" if self._is_stuck(now) else self._reason

    def admits(self, now: float) -> bool:
        """True where a try may begin: not stopped, or the pause is over and no other try is under way."""
        return not self._is_stuck(now) and (self._reason is None or (now >= self._until and not self._trial))

    def begin(self, now: float) -> None:
        """An admitted try begins."""
        self._trial, self._since = self._reason is not None, now

    def end(self, now: float, seconds: float, *, failed: bool, check: bool = False) -> None:
        """A try has ended after so many seconds. A check that succeeds lets others try, and proves nothing more."""
        trial, self._trial, self._since = self._trial, False, None
        self._failures = self._failures + 1 if failed else 0
        slow = seconds > self.limits.timeout
        if slow or (failed and (trial or self._failures >= self.limits.failures)):
            if not trial:
                why = f"a try took {seconds:.1f} s, more than {self.limits.timeout:g}"
                self._reason = why if slow else f"{counted(self._failures, 'failure')} in a row"
            self._stop(now, again=trial or not self._proven)
        elif trial:
            self._reason, self._proven = None, not check
        elif not failed and not check:
            self._proven = True

    def _is_stuck(self, now: float) -> bool:
        since = self._since
        return since is not None and now - since > self.limits.timeout

    def _stop(self, now: float, *, again: bool) -> None:
        self._pause = min(2 * self._pause, self.limits.pause_max) if again else self.limits.pause
        self._until, self._failures, self._proven = now + self._pause, 0, False
        self.stops += 1


class TierAvailability:
    """State machine of one tier. The tier's threads use its breakers; the step thread asks for events."""

    def __init__(self, tier: str, condition: Callable[[], Availability], limits: BreakerLimits, now: float) -> None:
        """`condition`: the store's own."""
        self.tier = tier
        self.reading, self.writing = Breaker(limits), Breaker(limits)
        self._condition = condition
        self._state = self._published = TierState.AVAILABLE
        self._changed_at = self._published_at = now
        self._changes = 0
        self._events: deque[float] = deque(maxlen=EVENTS_MAX)
        self._damaged_published, self._damaged_at = 0, float("-inf")

    def current(self, now: float) -> Availability:
        """The state at this moment. From any thread."""
        condition, reads, writes = self._condition(), self.reading.stopped(now), self.writing.stopped(now)
        reasons = [] if reads is None else [f"reads stopped: {reads}"]
        reasons += [] if writes is None else [f"writes stopped: {writes}"]
        state = condition.state
        if reads is not None:
            state = TierState.UNAVAILABLE
        elif writes is not None and state is TierState.AVAILABLE:
            state = TierState.DEGRADED
        return Availability(state, "; ".join([*reasons, *filter(None, [condition.reason])]))

    def unsettled(self, records_damaged: int) -> bool:
        """True while a change or damaged records wait to be published. `records_damaged`: since the start."""
        return self._state is not self._published or records_damaged > self._damaged_published

    def changed(self, now: float, *, last: bool = False) -> TierStateChanged | None:
        """The change to be published now. `last`: there is no later call, so nothing can wait."""
        state, reason = self.current(now)
        if state is not self._state:
            self._state, self._changed_at = state, now
            self._changes += 1
        if state is self._published:
            return None
        better = _ORDER.index(state) < _ORDER.index(self._published)
        recovering = better and now - self._changed_at < RECOVERY_SECONDS
        often = len(self._events) == EVENTS_MAX and now - self._events[0] < EVENTS_SECONDS
        if (recovering or often) and not last:
            return None
        event = TierStateChanged(self.tier, state, reason, now - self._published_at, self._changes)
        self._published, self._published_at, self._changes = state, now, 0
        self._events.append(now)
        return event

    def damaged(self, records: int, now: float, *, last: bool = False) -> RecordsDamaged | None:
        """The event on damaged records to be published now. `records`: damaged since the start."""
        new = records - self._damaged_published
        if not new or (now - self._damaged_at < DAMAGED_SECONDS and not last):
            return None
        self._damaged_published, self._damaged_at = records, now
        return RecordsDamaged(self.tier, new)
