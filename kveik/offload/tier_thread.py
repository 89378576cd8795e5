"""Thread of one direction of a tier: takes work in order, does it, and lets a breaker judge the store."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from kveik.clock import Clock
from kveik.offload.availability import Breaker
from kveik.offload.counts import Checked, Tally, ThreadCompletion
from kveik.offload.stores.encode import Codec
from kveik.offload.stores.store import Reachable, Store

log = logging.getLogger(__name__)

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """Work in order, bounded by weight. One thread takes, any thread puts."""

    def __init__(self, weight_max: int) -> None:
        self.weight = 0
        """Weight of everything that waits or is being done."""
        self._weight_max = weight_max
        self._waiting: deque[tuple[T, int]] = deque()
        self._taken = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, one: T, weight: int) -> bool:
        """False: it is too much, or the queue is closed."""
        with self._changed:
            if self._closed or (self.weight and self.weight + weight > self._weight_max):
                return False
            self._waiting.append((one, weight))
            self.weight += weight
            self._changed.notify_all()
            return True

    def take(self, *, wait: bool) -> T | None:
        """The next, to be followed by `done`; None: there is none, or the queue is closed."""
        with self._changed:
            while wait and not self._waiting and not self._closed:
                self._changed.wait()
            return self._pop() if self._waiting else None

    def take_more(self, kind: type[T]) -> T | None:
        """The next, if it is of this kind, to be done with the one taken before."""
        with self._changed:
            return self._pop() if self._waiting and isinstance(self._waiting[0][0], kind) else None

    def done(self) -> None:
        """Everything that was taken is done."""
        with self._changed:
            self.weight -= self._taken
            self._taken = 0
            self._changed.notify_all()

    def wait_until_empty(self, seconds: float) -> bool:
        """True once everything is done, at the latest after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._taken, max(seconds, 0.0))

    def close(self) -> list[T]:
        """Take nothing more; the work that had waited."""
        with self._changed:
            self._closed = True
            waiting = [one for one, _ in self._waiting]
            self._waiting.clear()
            self._changed.notify_all()
            return waiting

    def _pop(self) -> T:
        one, weight = self._waiting.popleft()
        self._taken += weight
        return one


@dataclass(frozen=True, slots=True)
class Check:
    """Ask a remote store how it is."""


@dataclass(frozen=True, slots=True)
class TierParts:
    """Everything that the two threads of a tier share."""

    store: Store
    codecs: Sequence[Codec]
    """Per group, of the store's formats."""

    tally: Tally
    clock: Clock
    tell: Callable[[ThreadCompletion], None]


@dataclass(slots=True)
class Attempt:
    """One try of the store: failed until its end says otherwise."""

    failed: bool = True
    seconds: float = 0.0


class TierThread(ABC, Generic[T]):
    """One direction of one tier. Any thread may give it work."""

    def __init__(self, parts: TierParts, breaker: Breaker, weight_max: int, *, writing: bool) -> None:
        self.store = parts.store
        self.breaker = breaker
        self.work: WorkQueue[T | Check] = WorkQueue(weight_max)
        self._formats = parts.store.formats
        self._codecs = parts.codecs
        self._tally = parts.tally
        self._clock = parts.clock
        self._tell = parts.tell
        self._writing = writing
        title = f"kveik {parts.store.name} {'writer' if writing else 'reader'}"
        self._thread = threading.Thread(target=self._run, name=title, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait for its end; False: it does not come back in time."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def check(self) -> None:
        """Ask a remote store how it is, where it is not asked for anything else."""
        if not self.work.weight and self.breaker.admits(self._clock.now()):
            self.work.put(Check(), 1)

    def step(self, *, wait: bool) -> bool:
        """Do the next; False: there was nothing to do, or the queue is closed."""
        one = self.work.take(wait=wait)
        if one is None:
            return False
        try:
            if isinstance(one, Check):
                self._check()
            else:
                self._do(one)
        finally:
            self.work.done()
        return True

    def close(self) -> None:
        """Refuse everything that waits, and end."""
        for one in self.work.close():
            if not isinstance(one, Check):
                self._refuse(one)

    @abstractmethod
    def _do(self, one: T) -> None: ...

    @abstractmethod
    def _refuse(self, one: T) -> None: ...

    def _admits(self) -> bool:
        return self.breaker.admits(self._clock.now())

    @contextmanager
    def _attempt(self, *, check: bool = False) -> Iterator[Attempt]:
        """Around one try of the store. A store does not raise; one that does has failed, and its thread goes on."""
        attempt, start = Attempt(), self._clock.now()
        self.breaker.begin(start)
        try:
            yield attempt
        except Exception:
            attempt.failed = True
            self._tally.erred()
        now = self._clock.now()
        attempt.seconds = now - start
        self.breaker.end(now, attempt.seconds, failed=attempt.failed, check=check)

    def _check(self) -> None:
        if isinstance(self.store, Reachable) and self._admits():
            with self._attempt(check=True) as attempt:
                attempt.failed = not self.store.serves(writing=self._writing)
            self._tell(Checked(self.store.name))

    def _run(self) -> None:
        while True:
            try:
                if not self.step(wait=True):
                    return
            except Exception:
                log.exception("tier thread failed: thread=%s; it goes on.", self._thread.name)
