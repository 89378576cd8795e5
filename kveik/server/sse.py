"""Answers as server-sent events: one chunk per event, an error as the last event, `[DONE]` where all went well."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

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
"""ASGI extension of our HTTP protocol: {"abort": a function that closes the connection at once, unsent bytes and all}."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise hold events back until its buffer is full.
    (b"x-accel-buffering", b"no"),
]


class ReaderStalled(Exception):
    """The client has not read for so long that we stop writing."""


def event(content: object) -> bytes:
    """One event. JSON holds no raw line breaks, so one `data:` line is enough."""
    return b"data: " + json_bytes(content) + b"\n\n"


class EventStream(Response):
    """The streamed answer of one call. Its status is 200 from the start: whatever can be refused has been refused before.

    A client that leaves, or that stops reading for `stall_seconds`, ends the call; `close` is told whether it was read
    to its end, exactly once.
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
        finished = False
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": HEADERS})
            finished = await while_connected(receive, self._write(send))
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            log.debug("The client of %s went away.", self._call.id)
        except ReaderStalled:
            log.info("The client of %s has read nothing for %g s; dropped.", self._call.id, self._stall_seconds)
            drop = (scope.get("extensions") or {}).get(DROP)
            if drop is not None:
                drop["abort"]()
        finally:
            self._close(finished)

    async def _write(self, send: Send) -> bool:
        """All events; True when every choice came to its end."""

        async def take(parts: ChoiceParts) -> None:
            chunks = self._shape.chunks(parts)
            if chunks:
                await self._send_body(send, b"".join(map(event, chunks)))

        try:
            await read_parts(self._call, self._streams, take)
        except ReaderStalled:
            raise
        except KveikError as error:
            await self._send_body(send, event(envelope(error)))
            return False
        except Exception:
            log.exception("The stream of %s failed.", self._call.id)
            await self._send_body(send, event(envelope(INTERNAL)))
            return False
        ending = b"data: [DONE]\n\n"
        if self._call.include_usage:
            ending = event(self._shape.usage_chunk(self._streams)) + ending
        await self._send_body(send, ending)
        return True

    async def _send_body(self, send: Send, body: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send(message)
        except TimeoutError as error:
            raise ReaderStalled from error
