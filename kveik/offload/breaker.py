"""Whether a store is worth asking: closed after success, open after failures, half open to find out. Pure; time is passed in.

closed ──failures in a row, or one that took too long──▶ open ──pause over──▶ half open ──success──▶ closed
                                                          ▲                      │
                                                          └──failure: pause × 2──┘
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kveik.words import counted


class BreakerState(StrEnum):
    """What a breaker does with who asks."""

    CLOSED = "closed"
    """Everybody may try."""

    OPEN = "open"
    """Nobody may try."""

    HALF_OPEN = "half open"
    """One tries for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """When a breaker opens, and for how long."""

    failures: int = 3
    """In a row that open it."""

    seconds: float = 2.0
    """One try that takes longer opens it at once, even if it succeeds."""

    pause: float = 1.0
    """Seconds that it stays open at first."""

    pause_most: float = 60.0
    """Seconds that it stays open after many probes have failed."""


class Breaker:
    """Counts how tries end. Ask `admits`, then `begin`, then say how it went."""

    def __init__(self, limits: BreakerLimits = BreakerLimits()) -> None:
        self.limits = limits
        self.opened = 0
        """How often it has opened."""
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pause = limits.pause
        self._proven = True
        """Something has gone well since it was open, that was more than a check."""
        self._until = 0.0
        self._why = ""

    def state(self, now: float) -> BreakerState:
        """What it is at this time."""
        if self._state is BreakerState.OPEN and now >= self._until:
            return BreakerState.HALF_OPEN
        return self._state

    @property
    def hindrance(self) -> str | None:
        """Why not everybody may try, in words; None: it is closed. It stands until a try has gone well, however long ago the
        pause was over."""
        return None if self._state is BreakerState.CLOSED else self._why

    def admits(self, now: float) -> bool:
        """Whether a try may begin: closed, or half open and nobody is trying."""
        return self._state is not BreakerState.HALF_OPEN and self.state(now) is not BreakerState.OPEN

    def begin(self, now: float) -> None:
        """A try begins, which was admitted."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._state = BreakerState.HALF_OPEN

    def end(self, now: float, seconds: float, *, failed: bool, check: bool = False) -> None:
        """A try has ended after so many seconds. A check that goes well closes it, and proves nothing more."""
        probing = self._state is BreakerState.HALF_OPEN
        self._failures = self._failures + 1 if failed else 0
        if seconds > self.limits.seconds or (failed and (probing or self._failures >= self.limits.failures)):
            if not probing:
                slow = f"a try took {seconds:.1f} s, more than {self.limits.seconds:g}"
                self._why = slow if seconds > self.limits.seconds else f"{counted(self._failures, 'failure')} in a row"
            self._open(now, again=probing or not self._proven)
        elif probing:
            self._state, self._proven = BreakerState.CLOSED, not check
        elif not failed and not check:
            self._proven = True

    def _open(self, now: float, *, again: bool) -> None:
        self._pause = min(2 * self._pause, self.limits.pause_most) if again else self.limits.pause
        self._state, self._until, self._failures, self._proven = BreakerState.OPEN, now + self._pause, 0, False
        self.opened += 1
