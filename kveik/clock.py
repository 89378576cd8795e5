"""Time as a value that is passed in. Nothing below `engine/loop.py` reads a clock by itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Source of time for the engine."""

    def now(self) -> float:
        """Seconds, monotonic, from an arbitrary start."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


@dataclass
class StepClock:
    """Time that moves only by `advance`."""

    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
