"""Reasons why a sequence is not in a step, as a closed set with the numbers of each case."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Cause(enum.Enum):
    """Causes that keep a sequence out of a step."""

    BUDGET = "budget"
    """No token of the step is left for it. `needed`: its pending tokens; `available`: those left."""

    BLOCKS = "blocks"
    """It needs more KV blocks than are free. `needed` and `available`: blocks of the group that is short."""

    ROWS = "rows"
    """The largest allowed number of sequences runs. `available`: --max-num-seqs."""

    QUEUE_POSITION = "queue position"
    """Others before it wait too. `needed`: number examined in the step; `available`: its position at least."""

    PREFIX_IN_FLIGHT = "waits for a prefix in flight"
    """A running sequence is about to compute the same blocks."""

    LOADING = "waits for a load"
    """Its blocks are looked up in a tier, or loaded from it."""

    POLICY = "policy"
    """The policy admits others first: it was preempted in this step, or another sequence was passed over often enough."""


@dataclass(frozen=True, slots=True)
class PrefixInFlight:
    """A claim to wait for: the key of content that a running sequence is about to compute."""

    key: bytes


@dataclass(frozen=True, slots=True)
class NotScheduled:
    """Reason why one sequence is not in a step."""

    sequence_id: int
    request_id: str
    cause: Cause
    needed: int = 0
    available: int = 0


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running sequence whose blocks were freed for others in a step."""

    sequence_id: int
    request_id: str
    cause: Cause
    """BLOCKS: a running sequence needed them; POLICY: a more urgent one was admitted in its place."""

    needed: int
    """Tokens that it had computed, and that must be hit or computed again."""
