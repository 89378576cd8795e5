"""Mailbox of the step thread: messages from any thread, and a nudge when a tier has completions."""

from __future__ import annotations

import contextlib
import queue
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Nudge:
    """A tier has completions."""


class Mailbox:
    """Queue on which the step thread sleeps. It exists before the threads that put into it."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._nudged = False

    def put(self, message: object) -> None:
        self._messages.put(message)

    def nudge(self) -> None:
        """Put a nudge, unless one waits. Two do no harm."""
        if not self._nudged:
            self._nudged = True
            self._messages.put(Nudge())

    def get(self, timeout: float | None = None) -> Any:
        """The next message; with a timeout of 0 only one that is there. Raises queue.Empty after the timeout."""
        message = self._messages.get(timeout != 0, timeout or None)
        if isinstance(message, Nudge):
            self._nudged = False
        return message

    def wait(self, seconds: float) -> None:
        """Sleep until a tier nudges, for so many seconds at most."""
        with contextlib.suppress(queue.Empty):
            self.get(timeout=max(seconds, 0.0))
