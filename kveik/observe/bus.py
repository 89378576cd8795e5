"""Hands events to listeners. A listener that raises harms nobody: not the engine, not the other listeners, not a request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kveik.observe.events import Event

Listener = Callable[[Event], None]

_logger = logging.getLogger(__name__)


class EventBus:
    """Calls its listeners in the order in which they subscribed, on the thread that publishes. Any thread may publish."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.Lock()
        self._failed: set[Listener] = set()
        self._errors = 0

    @property
    def errors(self) -> int:
        """How often a listener raised."""
        return self._errors

    def subscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def publish(self, event: Event) -> None:
        """Never raises what a listener raised."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                self._note(listener, event)

    def _note(self, listener: Listener, event: Event) -> None:
        with self._lock:
            self._errors += 1
            known = listener in self._failed
            self._failed.add(listener)
        # Once per listener: one that fails fails at every step, and the log has a bound too.
        if not known:
            name = getattr(listener, "__qualname__", type(listener).__qualname__)
            _logger.exception(
                "The listener %s failed on %s; further failures are counted, not logged.", name, type(event).__name__
            )
