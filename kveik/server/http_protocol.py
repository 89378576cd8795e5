"""Uvicorn's HTTP protocol with what it leaves open: an error shape for broken HTTP, and an end for clients that do nothing."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kveik.server.envelope import json_bytes, shape
from kveik.server.sse import DROP

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers of one request together."""

_HEAD_TOO_LARGE = f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes."
_NO_HTTP = "The bytes received are not a valid HTTP request."
_NO_HOST = "An HTTP/1.1 request must have exactly one Host header."


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    connected ─▶ head arrives ─▶ body, answer (the application's timeouts) ─▶ idle (uvicorn's keep-alive) ─▶ closed
        └ at most stall_seconds ┘                                                └ the unread rest: as long as it shrinks
    """

    stall_seconds = 60.0
    """How long a client may take over a request's head, or leave the rest of a whole answer untouched."""

    _head_due: asyncio.TimerHandle | None = None
    _held_bytes = 0
    """Received since the parser last gave anything on: of a head, or of what may follow a chunked body."""

    _fault = _NO_HTTP
    """What a 400 says."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Wait for the first request, but not for ever."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave no timer behind."""
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand the bytes to the parser in pieces, so that it never holds more of a head than is allowed."""
        while data and not self.transport.is_closing():
            room = MAX_HEAD_BYTES - self._held_bytes
            if room <= 0:
                self._refuse(431, _HEAD_TOO_LARGE)
                return
            piece, data = data[:room], data[room:]
            self._held_bytes += len(piece)
            super().data_received(piece)

    def on_message_begin(self) -> None:
        """Give the application a way to close the connection at once."""
        super().on_message_begin()
        self.scope["extensions"] = {DROP: {"abort": self.transport.abort}}
        self._await_head()

    def on_headers_complete(self) -> None:
        """The application takes over, with timeouts of its own."""
        self._held_bytes = 0
        self._head_arrived()
        if self.parser.get_http_version() == "1.1" and [name for name, _ in self.headers].count(b"host") != 1:
            self._fault = _NO_HOST
            # The parser stops at an exception, and uvicorn answers 400 then.
            raise ValueError(_NO_HOST)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """What has been given on is the application's to count."""
        self._held_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next byte begins a head."""
        self._held_bytes = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """HTTP/1.0 knows no chunks: an answer without a length ends with its connection."""
        super()._start_asgi_task(cycle, _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; where an answer is still unread, as soon as its reader gets no further."""
        super().timeout_keep_alive_handler()
        self._cut_when_stuck(None)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP in the shape of every other error."""
        self._refuse(400, self._fault)

    def _refuse(self, status: int, message: str) -> None:
        body = json_bytes(shape(message, status))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _await_head(self) -> None:
        self._head_arrived()
        self._head_due = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def _head_arrived(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _cut_when_stuck(self, unread_before: int | None) -> None:
        # `close` waits until everything is sent, which a client that never reads would make for ever.
        unread = self.transport.get_write_buffer_size()
        if unread and unread == unread_before:
            self.transport.abort()
        elif unread:
            self.loop.call_later(self.stall_seconds, self._cut_when_stuck, unread)


def _unchunked(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """The application, whose answers the cycle writes as they are. It closes the connection after each of HTTP/1.0 anyway."""

    async def plain(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        bare = False

        async def sending(message: ASGISendEvent) -> None:
            nonlocal bare
            if message["type"] == "http.response.start":
                bare = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                # None lets the cycle choose chunks.
                cycle.chunked_encoding = False if bare else None
            elif message["type"] == "http.response.body" and bare:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sending)

    return plain
