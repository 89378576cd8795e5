"""What the server's routes share: the door to the engine, what they must know of the model, and the calls that are open."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kveik.config import ServerConfig
from kveik.engine.stream import Door, Stream
from kveik.errors import Overloaded
from kveik.request.request import Request
from kveik.server.body import BodyBudget
from kveik.server.limits import THREAD_ABOVE_CHARACTERS, THREADS_FOR_TEXT
from kveik.server.prompts import Model
from kveik.text.chat import ChatTemplate
from kveik.text.tokenizer import Tokenizer

Result = TypeVar("Result")


class Traffic:
    """The calls that are open, and whether new ones may come. Used by the event loop's thread only.

    open → draining (new calls are refused with 503, open ones go on) → aborted (their streams end at once).
    """

    def __init__(self, retry_after: int) -> None:
        self.draining = False
        self.calls = 0
        """HTTP calls between their first byte and their last, those on open paths left out."""

        self._retry_after = retry_after
        self._streams: set[Stream] = set()

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


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """Made once by whoever starts the server."""

    door: Door
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    config: ServerConfig
    names: tuple[str, ...]
    """Names that the model is served under; the first is the default."""

    secret: bytes
    """From `auth.tenant_secret`; unused while no API keys are configured."""

    metrics: Callable[[], str | bytes]
    """The Prometheus page, in its text format."""

    counts: Callable[[], Mapping[str, int | float]]
    """Live numbers for the page at /, by name."""

    fingerprint: str
    """Stands for weights and settings in answers (`system_fingerprint`)."""

    alive: Callable[[], bool] = lambda: True
    """Whether the engine can still step."""

    now: Callable[[], float] = time.time
    """Seconds since the epoch, for `created`."""

    model: Model = field(init=False)
    traffic: Traffic = field(init=False)
    bodies: BodyBudget = field(init=False)
    created: int = field(init=False)
    text_threads: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        model = Model(
            names=self.names,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            max_model_len=self.max_model_len,
            special_tokens_in_content=self.config.special_tokens_in_content,
        )
        # A frozen value derives these once; `object.__setattr__` is how dataclasses do that.
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "traffic", Traffic(max(1, math.ceil(self.config.drain_seconds))))
        object.__setattr__(self, "bodies", BodyBudget(self.config.max_body_bytes, self.config.stall_seconds))
        object.__setattr__(self, "created", int(self.now()))
        object.__setattr__(self, "text_threads", asyncio.Semaphore(THREADS_FOR_TEXT))

    async def off_loop(self, work: Callable[[], Result], size: int) -> Result:
        """Do text work of about `size` characters: here where it is short, else in one of a few threads."""
        if size <= THREAD_ABOVE_CHARACTERS:
            return work()
        async with self.text_threads:
            return await asyncio.to_thread(work)
