"""Reasons why a sequence is not in a step, as a closed set with the numbers of each case."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Cause(enum.Enum):
    """Everything that can keep a sequence out of a step."""

    BUDGET = "budget"
    """No token of the step is left for it. `needed`: tokens that it wants; `available`: those left."""

    BLOCKS = "blocks"
    """It needs more KV blocks than are free. `needed` and `available`: blocks of the group that is short."""

    ROWS = "rows"
    """As many sequences run as may. `available`: --max-num-seqs."""

    QUEUE_POSITION = "queue position"
    """Others before it wait too. `needed`: how many are examined in a step at most; `available`: its position at least."""

    PREFIX_IN_FLIGHT = "waits for a prefix in flight"
    """A running sequence is about to compute the same blocks."""

    LOADING = "waits for a load"
    """A tier is asked for its blocks, or loads them."""

    POLICY = "policy"
    """The policy puts others first: it gave way in this step, or somebody was passed over often enough."""


@dataclass(frozen=True, slots=True)
class PrefixInFlight:
    """A claim to wait for: content that a running sequence is about to compute, by its key."""

    key: bytes


@dataclass(frozen=True, slots=True)
class NotScheduled:
    """Why one sequence is not in a step."""

    sequence_id: int
    request_id: str
    cause: Cause
    needed: int = 0
    available: int = 0


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running sequence whose blocks were taken away in a step."""

    sequence_id: int
    request_id: str
    cause: Cause
    """BLOCKS: a running sequence needed them; POLICY: a more urgent one was admitted in its place."""

    needed: int
    """Tokens that it had computed, and which have to be found or computed again."""
