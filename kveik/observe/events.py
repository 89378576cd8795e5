"""What the engine tells its readers, as frozen values. Knows neither who reads nor how; carries no text and no token.

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
    """Hold nothing that could be found."""

    cached: int
    """Held by nobody, but their content can be found again."""

    held: int
    """In use by running sequences."""

    @property
    def total(self) -> int:
        return self.free + self.cached + self.held


@dataclass(frozen=True, slots=True)
class Load:
    """How much the engine has in hand at one moment."""

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
    """A request left the queue for the first time, with its first choice. Once per request: neither coming back after a
    preemption nor the other choices, which share its prompt, are told again."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found by content; fewer than all, since the last one is always computed"""

    queue_seconds: float
    queried: bool = True
    """Whether the cache was asked at all; a request for prompt_logprobs does not ask."""

    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Of the cached ones, those that were loaded for it from below the pool, by the tier's name"""

    @property
    def pool_tokens(self) -> int:
        """Of the cached ones, those that were in the pool."""
        return self.cached_tokens - sum(self.loaded_tokens.values())


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The rest of an admitted request's prompt is computed, or its first choice ended before that. Once per request."""

    request_id: str
    computed_tokens: int
    """Computed by steps, each counted once though a preemption may have it computed again"""

    unreached_tokens: int
    """Neither found nor computed, because the choice ended"""


@dataclass(frozen=True, slots=True)
class RequestWaits:
    """A request that could not run in a step, and why. Told when the cause changes."""

    request_id: str
    cause: str
    """One of `schedule.reasons.Cause`"""

    needed: int
    """In the cause's unit"""

    available: int


LoadReason = Literal["load", "compute", "no blocks", "nothing stored"]
"""Reasons of a load decision: loading is sooner; computing is; the pool has no blocks for the load; no tier has anything."""

LOAD_REASONS: tuple[LoadReason, ...] = get_args(LoadReason)


@dataclass(frozen=True, slots=True)
class LoadDecided:
    """It was decided whether a waiting choice loads what lies below the pool or computes it. Once for an admission, so again
    after a preemption."""

    request_id: str
    reason: LoadReason
    tokens_in_pool: int
    tokens_below: int
    """Tokens that could be loaded"""

    tokens_chosen: int
    """Tokens that are loaded; 0: it computes all"""

    load_seconds: float
    """Predicted"""

    compute_seconds: float
    """Predicted for what is left"""

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
    """A running sequence lost its blocks and returned to the queue."""

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
    """Seconds between a new token and the one before it, for every choice that had one; all of a step's in one event,
    because a reader counts 256 at once as quickly as one."""


@dataclass(frozen=True, slots=True)
class LoadChanged:
    """Load that changed outside a step: an arrival or an abort while nothing else runs."""

    load: Load


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A choice ended, admitted or not. Once per choice."""

    request_id: str
    reason: FinishedReason
    prompt_tokens: int
    cached_tokens: int
    """Of the choice itself; 0 for one that was never admitted"""

    output_tokens: int
    seconds: float
    """Since the request arrived"""


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A request was not taken. Once per request."""

    reason: RefusedReason

    @classmethod
    def because_of(cls, error: Refused) -> RequestRefused:
        """From what the caller was told. Reasons are a closed set, so that they can be labels."""
        return cls(next((_REASONS[kind] for kind in type(error).__mro__ if kind in _REASONS), "other"))


@dataclass(frozen=True, slots=True)
class StreamOverrun:
    """A reader was too slow for its buffer; its request was aborted."""

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
    """A tier below the pool is in another state. Rare enough for a log: changes that follow quickly are one event."""

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
    """Records of a tier are not what was written there. At most once a minute for each tier, except at the end."""

    tier: str
    records: int
    """Records since the event before"""


@dataclass(frozen=True, slots=True)
class TierKept:
    """The engine has stopped, and this is what the next one finds in a tier that lasts."""

    tier: str
    records: int
    bytes: int
    """That the tier takes"""

    written: int
    """Of the records, at the end"""

    missing: int
    """That were worth keeping and could not be written"""

    late_seconds: float | None
    """The time there was, where it did not suffice"""


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
