"""One waiting sequence's load from the tiers, from the question to the end. A value without bytes, threads or blocks.

A sequence waits in ASKING and LOADING; others with the same beginning wait for its load too.

    new ──begin──> ASKING ──answers, or deadline──> UNDECIDED          only where a tier is shared with others
     │                                                 │
     └────────────begin, begin again──────────────────>┤
                                                       ├──nothing stored, compute, no blocks──> DECLINED
                                                       └──load──> LOADING                          ^
                                                                     │ all arrived, a gap,         │ plan_made:
                                                                     v deadline, blocks needed     │ blocks are freed
                                                                   OVER ───────────────────────────┘
Admitted or dropped, it is gone from any state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kveik.offload.transfer import RecordLoad


class State(Enum):
    """A load's state; sequences wait for it in the first two."""

    ASKING = auto()
    LOADING = auto()
    OVER = auto()
    UNDECIDED = auto()
    DECLINED = auto()


@dataclass(frozen=True, slots=True)
class LoadWait:
    """A waiting sequence's claim: it waits for this load, its own or another's."""

    load: int


@dataclass(slots=True, eq=False)
class SequenceLoad:
    """State of one sequence's load. `records`, `blocks`, `remaining` are those of the records that it loads."""

    number: int
    """Never used twice."""

    sequence_id: int
    state: State = State.UNDECIDED
    deadline: float = 0.0
    """Seconds on the engine's clock, after which nothing waits for it."""

    began: float = 0.0
    asked: bool = False
    """True once shared tiers were asked."""

    answers: int = 0
    """Answers that are still to come."""

    joined: bool = False
    """True once the sequence has waited for another's load."""

    records: tuple[RecordLoad, ...] = ()
    remaining: set[int] = field(default_factory=set)
    """Numbers of records that have not ended."""

    gap: int | None = None
    """The first block that will not come: what lies behind it is of no use."""

    landed: dict[int, int] = field(default_factory=dict)
    """Block of the leading group -> number of the tier that it came from."""

    @property
    def waited_for(self) -> bool:
        return self.state in (State.ASKING, State.LOADING)

    @property
    def holds_blocks(self) -> bool:
        return self.state in (State.LOADING, State.OVER)

    @property
    def useful(self) -> bool:
        """True while something of use may still come."""
        return any(self.gap is None or self.records[number].place < self.gap for number in self.remaining)

    def miss(self, place: int) -> None:
        """This block will not come."""
        self.gap = place if self.gap is None else min(self.gap, place)
