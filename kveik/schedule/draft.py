"""A step while it is being decided; `StepPlan` is what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kveik.cache.layout import BlockCopy
from kveik.request.sequence import Sequence
from kveik.schedule.plan import Chunk, Decodes, StepPlan


@dataclass(slots=True)
class Draft:
    """Blocks are secured first and chunks written last, so a sequence that gives way in between leaves no chunk behind."""

    now: float
    """Seconds on the engine's clock."""

    budget: int
    """Prompt tokens that may still be given out."""

    counts: dict[Sequence, int] = field(default_factory=dict)
    """Tokens of each sequence that is catching up, in the order in which they were given out."""

    copies: list[BlockCopy] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    short: bool = False
    """Whether a running sequence had to give way because no block was left."""

    def give(self, sequence: Sequence, count: int) -> None:
        """This sequence computes `count` prompt tokens."""
        self.counts[sequence] = count
        self.budget -= count

    def take_back(self, sequence: Sequence) -> None:
        """The sequence gave way; its tokens are for others."""
        self.budget += self.counts.pop(sequence, 0)
        self.preempted.append(sequence.id)

    def plan(self, decoding: Decodes) -> StepPlan:
        """The decision, final: one token of every decode, then the chunks."""
        return StepPlan(decoding, self._chunks(), tuple(self.copies), tuple(self.admitted), tuple(self.preempted))

    def _chunks(self) -> tuple[Chunk, ...]:
        chunks = []
        for sequence, count in self.counts.items():
            start = sequence.computed
            chunks.append(Chunk(sequence.id, start, count, start + count == len(sequence.tokens)))
        return tuple(chunks)
