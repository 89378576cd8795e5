"""A bell that any thread may ring and one thread sleeps by."""

from __future__ import annotations

import threading


class Wake:
    """Rung before it is waited for, it wakes at once."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def __call__(self) -> None:
        """Ring."""
        self._rung.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Sleep until it is rung, at most so long; whether it was."""
        rung = self._rung.wait(None if seconds is None else max(seconds, 0.0))
        self._rung.clear()
        return rung
