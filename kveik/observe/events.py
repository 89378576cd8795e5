"""Events of the engine, as frozen values without text or tokens.

arrived → admitted → first token → finished          once per request or choice, as each says
    ↘ refused         ↑ preempted                    stepped: once per step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, get_args

from kveik.errors import (
    BadValue,
    BodyTooLarge,
    DoesNotFit,
    ModelNotFound,
    NotAuthorized,
    Overloaded,
    PromptTooLong,
    Refused,
    Unsupported,
)

FinishedReason = Literal["stop", "length", "abort", "error"]
FINISHED_REASONS: tuple[FinishedReason, ...] = get_args(FinishedReason)

RefusedReason = Literal[
    "bad_value",
    "body_too_large",
    "does_not_fit",
    "model_not_found",
    "not_authorized",
    "overloaded",
    "prompt_too_long",
    "unsupported",
    "other",
]
REFUSED_REASONS: tuple[RefusedReason, ...] = get_args(RefusedReason)

_REASONS: dict[type[Refused], RefusedReason] = {
    BadValue: "bad_value",
    BodyTooLarge: "body_too_large",
    DoesNotFit: "does_not_fit",
    ModelNotFound: "model_not_found",
    NotAuthorized: "not_authorized",
    Overloaded: "overloaded",
    PromptTooLong: "prompt_too_long",
    Unsupported: "unsupported",
}


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """A layer group's blocks by state; they sum to the pool."""

    free: int
    """Without cached content"""

    cached: int
    """Not in use, with content that a prefix match can hit"""

    held: int
    """In use by running sequences."""

    @property
    def total(self) -> int:
        return self.free + self.cached + self.held


@dataclass(frozen=True, slots=True)
class Load:
    """Load of the engine at one moment."""

    running: int
    """Sequences that hold blocks"""

    waiting: int
    """Sequences in the queue"""

    blocks: tuple[BlockCounts, ...]
    """One per layer group"""


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request was queued. Once per request."""

    request_id: str
    prompt_tokens: int
    choices: int


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """A request was admitted for the first time, with its first choice. Once per request: resuming after a preemption and
    other choices of the same prompt publish nothing."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens hit in the cache; fewer than all, since the last one is always computed"""

    queue_seconds: float
    queried: bool = True
    """True if the cache was looked up; a request for prompt_logprobs is not."""

    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Cached tokens that were loaded from tiers, by the tier's name"""

    @property
    def pool_tokens(self) -> int:
        """Cached tokens that were in the pool."""
        return self.cached_tokens - sum(self.loaded_tokens.values())


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """An admitted request's prompt is computed, or its first choice ended before that. Once per request."""

    request_id: str
    computed_tokens: int
    """Prompt tokens computed by steps; each counts once, also where a preemption has it computed again"""

    unreached_tokens: int
    """Prompt tokens neither hit nor computed, because the choice ended"""


@dataclass(frozen=True, slots=True)
class RequestWaits:
    """A request could not run in a step. Published when the cause changes."""

    request_id: str
    cause: str
    """One of `schedule.reasons.Cause`"""

    needed: int
    """In the cause's unit"""

    available: int


LoadReason = Literal["load", "compute", "no blocks", "nothing stored"]
"""Reasons of a load decision: loading is faster; computing is faster; the pool has no blocks for the load; no tier has any."""

LOAD_REASONS: tuple[LoadReason, ...] = get_args(LoadReason)


@dataclass(frozen=True, slots=True)
class LoadDecided:
    """A waiting choice loads blocks from tiers, or computes them. Once per admission, so again after a preemption."""

    request_id: str
    reason: LoadReason
    tokens_in_pool: int
    tokens_below: int
    """Tokens that could be loaded"""

    tokens_chosen: int
    """Tokens that are loaded; 0: all are computed"""

    load_seconds: float
    """Predicted"""

    compute_seconds: float
    """Predicted for the rest"""

    recompute_seconds: float
    """Predicted for everything, without loading"""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A choice has its first token. Once per choice."""

    request_id: str
    seconds: float
    """Since the request arrived"""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running sequence was preempted: its blocks were freed, and it returned to the queue."""

    request_id: str
    cause: str
    """"blocks": a running sequence needed them; "policy": a more urgent one was admitted"""

    computed_tokens: int
    """Tokens that it had computed"""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step is over. Once per step that computed something."""

    prefill_tokens: int
    """Prompt tokens computed, and tokens computed again after a preemption"""

    decode_tokens: int
    """Sampled tokens computed"""

    new_tokens: int
    """Tokens sampled"""

    rows: int
    """Sequences in the step"""

    seconds: float
    load: Load
    """After the step"""

    gaps: tuple[float, ...] = ()
    """Seconds between a new token and the one before it, for every choice that had one. All of a step are in one event,
    because a listener counts 256 at once as fast as one."""


@dataclass(frozen=True, slots=True)
class LoadChanged:
    """The load changed outside a step: an arrival or an abort while nothing else runs."""

    load: Load


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A choice ended, admitted or not. Once per choice."""

    request_id: str
    reason: FinishedReason
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens of this choice hit in the cache; 0 for one that was never admitted"""

    output_tokens: int
    seconds: float
    """Since the request arrived"""


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A request was refused. Once per request."""

    reason: RefusedReason

    @classmethod
    def because_of(cls, error: Refused) -> RequestRefused:
        """Returns the event for an error. Reasons are a closed set, so that they can be labels."""
        return cls(next((_REASONS[kind] for kind in type(error).__mro__ if kind in _REASONS), "other"))


@dataclass(frozen=True, slots=True)
class StreamOverrun:
    """A reader was too slow and its buffer ran full; its request was aborted."""

    request_id: str


class TierState(StrEnum):
    """State of a tier below the pool."""

    AVAILABLE = "available"
    """Records are read and written."""

    DEGRADED = "degraded"
    """Records are read; writing is stopped or limited."""

    UNAVAILABLE = "unavailable"
    """Nothing is read."""


@dataclass(frozen=True, slots=True)
class TierStateChanged:
    """A tier changed its state. Changes in quick succession are one event, so that the log stays short."""

    tier: str
    state: TierState
    reason: str
    """Reason in words; empty where it is available"""

    seconds: float
    """Time in the state before"""

    changes: int
    """Changes since the event before, this one included"""


@dataclass(frozen=True, slots=True)
class RecordsDamaged:
    """Records of a tier failed their checksums. At most once a minute for each tier, except at the end."""

    tier: str
    records: int
    """Records since the event before"""


@dataclass(frozen=True, slots=True)
class TierKept:
    """The engine has stopped; the event counts the records that stay in a persistent tier."""

    tier: str
    records: int
    bytes: int
    """Bytes that the tier takes"""

    written: int
    """Records written at the end"""

    missing: int
    """Records that were worth keeping and were not written"""

    late_seconds: float | None
    """Time limit in seconds, where it did not suffice"""


Event = (
    RequestArrived
    | RequestAdmitted
    | PromptComputed
    | RequestWaits
    | LoadDecided
    | FirstToken
    | Preempted
    | Stepped
    | LoadChanged
    | RequestFinished
    | RequestRefused
    | StreamOverrun
    | TierStateChanged
    | RecordsDamaged
    | TierKept
)
