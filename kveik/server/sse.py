"""Answers as server-sent events: one chunk per event, then `[DONE]`, or an error as the last event."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kveik.engine.stream import Stream
from kveik.errors import KveikError
from kveik.server.answer import AnswerShape, ChoiceParts
from kveik.server.envelope import INTERNAL, envelope, json_bytes
from kveik.server.reading import read_parts, while_connected
from kveik.server.translate import Call

log = logging.getLogger(__name__)

DROP = "kveik.drop"
"""ASGI extension of `HttpProtocol`: {"abort": a function that closes the connection at once and discards unsent bytes}."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Without it nginx delays events until its buffer is full.
    (b"x-accel-buffering", b"no"),
]


class ReaderStalled(Exception):
    """The client has not read within the timeout, so writing stops."""


def event(content: object) -> bytes:
    """Returns one event. `json_bytes` has no line break of any kind, so one `data:` line is enough."""
    return b"data: " + json_bytes(content) + b"\n\n"


class Writer:
    """Sends messages, and measures how long the client has read nothing.

    One clock reading per event: a timeout around each would cost as much as writing the event.
    """

    def __init__(self, send: Send, stall_seconds: float) -> None:
        self._send = send
        self._stall_seconds = stall_seconds
        self._waiting = 0
        self._moved = 0.0

    async def send(self, message: Message) -> None:
        """Send one ASGI message; waits while the client is behind. Several tasks may wait at once."""
        if not self._waiting:
            self._moved = time.monotonic()
        self._waiting += 1
        try:
            await self._send(message)
        finally:
            self._waiting -= 1
            self._moved = time.monotonic()

    async def body(self, part: bytes, *, more: bool = True) -> None:
        """Send a part of the body."""
        await self.send({"type": "http.response.body", "body": part, "more_body": more})

    async def guard(self) -> NoReturn:
        """Raises `ReaderStalled` once a message has waited for `stall_seconds`, give or take a quarter."""
        while True:
            await asyncio.sleep(self._stall_seconds / 4)
            if self._waiting and time.monotonic() - self._moved >= self._stall_seconds:
                raise ReaderStalled


class EventStream(Response):
    """The streamed answer of one call. Its status is 200 from the start: refusals come before it.

    A client that disconnects, or that reads nothing for `stall_seconds`, ends the call. `close` is called exactly once, with
    whether the answer was sent to its end.
    """

    def __init__(
        self,
        call: Call,
        shape: AnswerShape,
        streams: Sequence[Stream],
        *,
        stall_seconds: float,
        close: Callable[[bool], None],
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._call = call
        self._shape = shape
        self._streams = streams
        self._stall_seconds = stall_seconds
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer while the client reads."""
        finished = False
        writer = Writer(send, self._stall_seconds)
        try:
            # An HTTP/1.0 client does not support chunks and reads to the connection's end.
            headers = [*HEADERS, (b"connection", b"close")] if scope["http_version"] == "1.0" else HEADERS
            finished = await while_connected(receive, self._write(writer, headers), writer.guard())
        except ClientDisconnect:
            log.debug("client disconnected: call=%s", self._call.id)
        except ReaderStalled:
            log.info("client stalled, connection closed: call=%s stall_seconds=%g", self._call.id, self._stall_seconds)
            drop = (scope.get("extensions") or {}).get(DROP)
            if drop is not None:
                drop["abort"]()
        finally:
            self._close(finished)

    async def _write(self, writer: Writer, headers: list[tuple[bytes, bytes]]) -> bool:
        """Write the whole answer. Returns True when every choice came to its end."""
        await writer.send({"type": "http.response.start", "status": 200, "headers": headers})
        failure = await self._write_chunks(writer)
        if failure is not None:
            await writer.body(event(envelope(failure)), more=False)
            return False
        ending = b"data: [DONE]\n\n"
        if self._call.include_usage:
            ending = event(self._shape.usage_chunk(self._streams)) + ending
        await writer.body(ending, more=False)
        return True

    async def _write_chunks(self, writer: Writer) -> KveikError | None:
        """Write the chunks of every choice. Returns the error that ended one early, if any."""

        async def take(parts: ChoiceParts) -> None:
            chunks = self._shape.chunks(parts, self._streams)
            if chunks:
                await writer.body(b"".join(map(event, chunks)))

        try:
            await read_parts(self._call, self._streams, take)
        except KveikError as error:
            return error
        except Exception:
            log.exception("stream failed: call=%s", self._call.id)
            return INTERNAL
        return None
