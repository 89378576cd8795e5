"""Event bus. A listener that raises affects neither the engine nor other listeners nor requests."""

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
        """Number of exceptions that listeners raised."""
        return self._errors

    def subscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def publish(self, event: Event) -> None:
        """Call every listener. Exceptions of listeners are counted, not raised."""
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
        # Once per listener: one that fails would fail at every step and fill the log.
        if not known:
            name = getattr(listener, "__qualname__", type(listener).__qualname__)
            _logger.exception(
                "event listener failed, further failures are only counted: listener=%s event=%s", name, type(event).__name__
            )
