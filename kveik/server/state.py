"""What the routes share: the door to the engine, what they must know of the model, and the books of the door itself."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kveik.config import ServerConfig
from kveik.engine.cache_stats import CacheStats, PromptTokens
from kveik.engine.stream import Door
from kveik.errors import Refused
from kveik.observe.tiers import TierSnapshot
from kveik.server.body import BodyBudget
from kveik.server.gauges import DoorGauges
from kveik.server.limits import THREAD_ABOVE_CHARACTERS, THREADS_FOR_TEXT
from kveik.server.prompts import Model
from kveik.server.traffic import Traffic
from kveik.text.chat import ChatTemplate
from kveik.text.tokenizer import Tokenizer

Result = TypeVar("Result")


async def _nothing() -> CacheStats:
    return CacheStats((), PromptTokens(0, 0), 0, (), {})


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

    prompt_tokens: Callable[[], Mapping[str, int]] = dict
    """Those of prompts by where they came from, for the page at /."""

    tiers: Callable[[], Sequence[TierSnapshot]] = tuple
    """Those below the pool, as `protocol.TierStatus` has them, for the page at /."""

    fingerprint: str
    """Stands for weights and settings in answers (`system_fingerprint`)."""

    facts: Mapping[str, str] = field(default_factory=dict)
    """What does not change while the server runs, for the page at /, by name."""

    alive: Callable[[], bool] = lambda: True
    """Whether the engine can still step."""

    refused: Callable[[Refused], None] = lambda error: None
    """Told of every refusal, with its reason; for the engine's metrics."""

    cache_stats: Callable[[], Awaitable[CacheStats]] = _nothing
    """What the cache holds and has done."""

    cache_reset: Callable[[], Awaitable[CacheStats]] = _nothing
    """Forget what nobody holds; what is left then."""

    operator: bytes | None = None
    """The tenant that may reset the cache; None: everybody."""

    now: Callable[[], float] = time.time
    """Seconds since the epoch, for `created`."""

    model: Model = field(init=False)
    traffic: Traffic = field(init=False)
    bodies: BodyBudget = field(init=False)
    gauges: DoorGauges = field(init=False)
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
        object.__setattr__(self, "gauges", DoorGauges(self.traffic, self.bodies))
        object.__setattr__(self, "created", int(self.now()))
        object.__setattr__(self, "text_threads", asyncio.Semaphore(THREADS_FOR_TEXT))

    async def off_loop(self, work: Callable[[], Result], size: int) -> Result:
        """Do text work of about `size` characters: here where it is short, else in one of a few threads."""
        if size <= THREAD_ABOVE_CHARACTERS:
            return work()
        async with self.text_threads:
            return await asyncio.to_thread(work)
