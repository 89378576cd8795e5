"""Uvicorn's HTTP protocol with what it leaves open: an error shape for broken HTTP, and an end for clients that do nothing."""

from __future__ import annotations

import logging

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kveik.server.envelope import json_bytes, shape
from kveik.server.sse import DROP

log = logging.getLogger(__name__)


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def on_message_begin(self) -> None:
        """Give the application a way to close the connection at once."""
        super().on_message_begin()
        self.scope["extensions"] = {DROP: {"abort": self.transport.abort}}

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP in the shape of every other error."""
        body = json_bytes(shape("The bytes received are not a valid HTTP request.", 400))
        head = (
            "HTTP/1.1 400 Bad Request\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
