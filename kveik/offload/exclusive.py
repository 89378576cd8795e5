"""What one thread at a time may do: a second one is told so, by both names, before it has done harm. Nobody waits."""

from __future__ import annotations

import threading


class TwoThreads(RuntimeError):
    """A mistake of ours: whoever enters second must wait for the first by other means."""

    def __init__(self, what: str, inside: str, entering: str) -> None:
        super().__init__(
            f"Thread '{entering}' enters {what} while thread '{inside}' is there. One at a time may; waiting is up to them."
        )


class Alone:
    """A context that is entered by one thread at a time, and never again from inside."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._free = threading.Lock()
        self._inside = ""

    def __enter__(self) -> None:
        me = threading.current_thread().name
        if not self._free.acquire(blocking=False):
            raise TwoThreads(self._what, self._inside, me)
        self._inside = me

    def __exit__(self, *error: object) -> None:
        self._free.release()
