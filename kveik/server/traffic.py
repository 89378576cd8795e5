"""The calls that are open, and whether new ones may come."""

from __future__ import annotations

from collections.abc import Iterable

from kveik.engine.stream import Door, Stream
from kveik.errors import Overloaded
from kveik.request.request import Request


class Traffic:
    """Used by the event loop's thread only.

    open → draining (new calls are refused with 503, open ones go on) → aborted (their streams end at once).
    """

    def __init__(self, retry_after: int) -> None:
        self.draining = False
        self.calls = 0
        """HTTP calls between their first byte and their last, those on open paths left out."""

        self._retry_after = retry_after
        self._streams: set[Stream] = set()

    @property
    def streams(self) -> int:
        """Requests that the engine has not ended, or whose answers are not written yet."""
        return len(self._streams)

    def check_open(self) -> None:
        """Raises `Overloaded` (503) once the server drains."""
        if self.draining:
            raise Overloaded("The server is stopping; it takes no new requests.", retry_after=self._retry_after, status=503)

    def submit(self, door: Door, requests: Iterable[Request]) -> list[Stream]:
        """All requests, or none: where the queue refuses one, those before it are taken back.

        Raises:
            Overloaded: the queue is full, or the server drains.
        """
        self.check_open()
        streams: list[Stream] = []
        try:
            for request in requests:
                streams.append(door.submit(request))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        self._streams.update(streams)
        return streams

    def close(self, streams: Iterable[Stream], finished: bool) -> None:
        """Forget the streams of one call; abort them unless they were read to their end."""
        for stream in streams:
            self._streams.discard(stream)
            if not finished:
                stream.abort()

    def abort(self) -> None:
        """End everything that still runs. Its readers see the finish reason 'abort'."""
        for stream in self._streams:
            stream.abort()
