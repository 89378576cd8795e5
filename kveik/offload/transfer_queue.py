"""What waits for a thread: in order, bounded by weight, and known to be empty only when the last of it is done."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """One thread takes, any thread puts."""

    def __init__(self, weight_most: int) -> None:
        self.weight_most = weight_most
        self.weight = 0
        """Of all that waits or is being done."""
        self._waiting: deque[T] = deque()
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, one: T, weight: int) -> bool:
        """False: it is too much, or nobody takes any more."""
        with self._changed:
            if self._closed or (self.weight and self.weight + weight > self.weight_most):
                return False
            self._waiting.append(one)
            self.weight += weight
            self._changed.notify_all()
            return True

    def take(self, *, wait: bool) -> T | None:
        """The next, to be followed by `done`; None: there is none, or it is closed."""
        with self._changed:
            while wait and not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting:
                return None
            self._busy = True
            return self._waiting.popleft()

    def take_more(self, kind: type[T]) -> T | None:
        """The next, where it is of this kind, to be done with the one taken before."""
        with self._changed:
            if not self._waiting or not isinstance(self._waiting[0], kind):
                return None
            return self._waiting.popleft()

    def done(self, weight: int) -> None:
        """What was taken is done; all of it that was taken weighs so much."""
        with self._changed:
            self._busy = False
            self.weight -= weight
            self._changed.notify_all()

    def wait_until_empty(self, seconds: float) -> bool:
        """Whether all is done, at the latest after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, max(seconds, 0.0))

    def close(self) -> list[T]:
        """Take nothing more; what had waited."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
            return waiting
