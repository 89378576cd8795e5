"""A step while it is being settled; `Settled` is what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kveik.request.sequence import FinishReason, Sequence
from kveik.schedule.plan import Finished, Settled


@dataclass(slots=True)
class Tally:
    """What has changed so far."""

    now: float
    """When the step was over, seconds."""

    finished: dict[int, Finished] = field(default_factory=dict)
    """By place in the outcome."""

    begun: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def give(self, sequence: Sequence, token: int) -> None:
        """One more token for a sequence that was catching up."""
        if sequence.last_token is None:
            sequence.first_token = self.now
            self.begun.append(sequence.id)
        else:
            self.gaps.append(self.now - sequence.last_token)
        sequence.tokens.append(token)
        sequence.last_token = self.now

    def end(self, place: int, sequence: Sequence, reason: FinishReason) -> None:
        """The token at this place was the sequence's last, or was none."""
        self.finished[place] = Finished(sequence.id, reason)

    def settled(self) -> Settled:
        """All of it, final."""
        return Settled(tuple(self.finished.values()), tuple(self.finished), tuple(self.begun), tuple(self.gaps))
