"""State that the routes share: the engine, the model, and the server's own counts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from kveik.config import ServerConfig
from kveik.engine.cache_stats import CacheStats, PromptTokens
from kveik.engine.stream import Door
from kveik.errors import Refused
from kveik.observe.tiers import TierSnapshot
from kveik.server.body import BodyBudget, Shape, read_body
from kveik.server.call_limits import THREAD_ABOVE_CHARACTERS, THREADS_FOR_TEXT
from kveik.server.prompts import Model
from kveik.server.request_fields import UnknownNames
from kveik.server.traffic import DoorGauges, Traffic
from kveik.text.chat_template import ChatTemplate
from kveik.text.tokenizer import Tokenizer

Result = TypeVar("Result")


async def _nothing() -> CacheStats:
    return CacheStats((), PromptTokens(0, 0), 0, (), {})


@dataclass(kw_only=True)
class ServerState:
    """State of the server. Created once at the start; the fields given then do not change."""

    door: Door
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    config: ServerConfig
    names: tuple[str, ...]
    """Names that the model is served under; the first is the default."""

    secret: bytes
    """From `auth.tenant_secret`; unused without API keys."""

    metrics: Callable[[], str | bytes]
    """The Prometheus page, in its text format."""

    counts: Callable[[], Mapping[str, int | float]]
    """Live numbers for the page at /, by name."""

    prompt_tokens: Callable[[], Mapping[str, int]] = dict
    """Prompt tokens by source, for the page at /."""

    tiers: Callable[[], Sequence[TierSnapshot]] = tuple
    """Tiers, for the page at /."""

    fingerprint: str
    """Digest of weights and settings, for answers (`system_fingerprint`)."""

    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts that do not change while the server runs, for the page at /, by name."""

    alive: Callable[[], bool] = lambda: True
    """True while the engine can still step."""

    refused: Callable[[Refused], None] = lambda error: None
    """Called with every refusal, for the engine's metrics."""

    cache_stats: Callable[[], Awaitable[CacheStats]] = _nothing
    """Contents and counts of the cache."""

    cache_reset: Callable[[], Awaitable[CacheStats]] = _nothing
    """Evict every block that no request holds; returns the statistics after it."""

    operator: bytes | None = None
    """The tenant that may reset the cache; None: every tenant."""

    now: Callable[[], float] = time.time
    """Seconds since the epoch, for `created`."""

    model: Model = field(init=False)
    traffic: Traffic = field(init=False)
    bodies: BodyBudget = field(init=False)
    unknown_names: UnknownNames = field(init=False)
    gauges: DoorGauges = field(init=False)
    created: int = field(init=False)
    text_threads: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.model = Model(
            names=self.names,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            max_model_len=self.max_model_len,
            special_tokens_in_content=self.config.special_tokens_in_content,
        )
        self.traffic = Traffic(max(1, math.ceil(self.config.drain_seconds)))
        self.bodies = BodyBudget(self.config.max_body_bytes, self.config.stall_seconds)
        self.unknown_names = UnknownNames()
        self.gauges = DoorGauges(self.door, self.traffic, self.bodies, self.unknown_names)
        self.created = int(self.now())
        self.text_threads = asyncio.Semaphore(THREADS_FOR_TEXT)

    async def read(self, request: Request, shape: type[Shape]) -> tuple[Shape, int]:
        """Returns the body of a request as a `shape`, and its size in bytes; raises as `read_body` does."""
        body, size = await read_body(request, shape, self.bodies)
        self.unknown_names.note(body)
        return body, size

    async def off_loop(self, work: Callable[[], Result], size: int) -> Result:
        """Process text of about `size` characters: here where it is short, else in one of a few threads."""
        if size <= THREAD_ABOVE_CHARACTERS:
            return work()
        async with self.text_threads:
            return await asyncio.to_thread(work)
