"""HTTP/1 connections: uvicorn's protocol with bounds on what a client may send or leave undone."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kveik.server.envelope import json_bytes, shape
from kveik.server.sse import DROP

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers of one request together."""

LINGER_SECONDS = 2.0
"""Seconds for which the rest of a body is still read after the answer. A close with unread bytes would reset the connection,
and the client might lose the answer."""

_HEAD_TOO_LARGE = f"The request line and headers have more than {MAX_HEAD_BYTES} bytes. Send fewer."
_NO_HTTP = "The bytes received are not a valid HTTP request."
_NO_HOST = "An HTTP/1.1 request must have exactly one Host header."
_NO_TUNNEL = "This server is not a proxy. Use another method than CONNECT."

_OFFER = (b"upgrade", b"http2-settings")
"""Headers of an offer to switch protocols, and their names in `Connection`."""


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    connected ─▶ head arrives ─▶ body, answer (the application's timeouts) ─▶ idle (uvicorn's keep-alive) ─▶ closed
        └ at most stall_seconds ┘       an answer that is not read: as long as the rest shrinks ┘
                                        a body that goes on after the answer: LINGER_SECONDS, linger_bytes ┘
    """

    stall_seconds = 60.0
    """Timeout in seconds for a request's head, and for reading the rest of a whole answer."""

    linger_bytes = 1 << 20
    """Bytes of a body that are read and discarded after the answer."""

    _head_due: asyncio.TimerHandle | None = None
    _linger_until: asyncio.TimerHandle | None = None
    _dropped_bytes = 0
    _held_bytes = 0
    """Received since the parser last gave anything on: of a head, or of what may follow a chunked body."""

    _fault = _NO_HTTP
    """The message of a 400."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Start the timeout for the first request."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._head_arrived()
        self._stop_lingering()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass the bytes to the parser in pieces, so that it never buffers more of a head than allowed."""
        while data and not self.transport.is_closing():
            room = MAX_HEAD_BYTES - self._held_bytes
            if room <= 0:
                self._refuse(431, _HEAD_TOO_LARGE)
                return
            piece, data = data[:room], data[room:]
            self._held_bytes += len(piece)
            self._feed(piece)

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, self._fault)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its offer of another protocol: the parser takes what follows for that protocol."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(405, _NO_TUNNEL)
            return
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            options = [option for option in value.split(b",") if option.strip().lower() not in _OFFER]
            if name == b"connection" and options:
                lines.append(b"connection:" + b",".join(options))
            elif name != b"connection" and name not in _OFFER:
                lines.append(name + b":" + value)
        log.debug("declined an upgrade: method=%s", method.decode())
        # A new one: the old one remembers the offer. The leniency is uvicorn's, for answers before a pipelined request's end.
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"\r\n".join((*lines, b"", b"")) + rest)

    def on_message_begin(self) -> None:
        """Offer the application a function that closes the connection at once."""
        super().on_message_begin()
        self.scope["extensions"] = {DROP: {"abort": self.transport.abort}}
        self._await_head()

    def on_headers_complete(self) -> None:
        """The application takes over, with timeouts of its own."""
        if self.parser.should_upgrade():
            return
        self._held_bytes = 0
        self._head_arrived()
        if self.url.startswith(b"//"):
            # Read as a URL, the first segment would be a host.
            self.url = b"/" + self.url.lstrip(b"/")
        if self.parser.get_http_version() == "1.1" and [name for name, _ in self.headers].count(b"host") != 1:
            self._fault = _NO_HOST
            # The parser stops at an exception, and uvicorn answers 400 then.
            raise ValueError(_NO_HOST)
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0" and self.parser.should_keep_alive():
            # Uvicorn closes after every answer to HTTP/1.0; such a client goes on only where the answer says so.
            self.cycle.keep_alive = True
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"keep-alive")]

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body, or discard it where the answer is complete."""
        self._held_bytes = 0
        if self._linger_until is not None:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > self.linger_bytes:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next byte begins a head."""
        if self.parser.should_upgrade():
            return
        self._held_bytes = 0
        if self._linger_until is not None and not self.transport.is_closing():
            # The whole body has arrived after all, so the connection is idle like any other.
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self._stop_lingering()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Continue with the next request; where this one's body has not ended, read it for a short time only."""
        super().on_response_complete()
        if self.transport.is_closing() or not (self.cycle.response_complete and self.cycle.more_body):
            return
        # A client that waits for 100 Continue may keep its body back, and what it sends next would be taken for the body.
        seconds = 0.0 if self.expect_100_continue else LINGER_SECONDS
        self._dropped_bytes = 0
        self._linger_until = self.loop.call_later(seconds, self.transport.close)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; where an answer is still unread, as soon as its reader stalls."""
        super().timeout_keep_alive_handler()
        self._cut_when_stuck(None)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP in the shape of every other error."""
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

    def _stop_lingering(self) -> None:
        if self._linger_until is not None:
            self._linger_until.cancel()
            self._linger_until = None

    def _cut_when_stuck(self, unread_before: int | None) -> None:
        # `close` waits until everything is sent, which never happens with a client that does not read.
        unread = self.transport.get_write_buffer_size()
        if unread and unread == unread_before:
            self.transport.abort()
        elif unread:
            self.loop.call_later(self.stall_seconds, self._cut_when_stuck, unread)
