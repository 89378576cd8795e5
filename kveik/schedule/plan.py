"""What a step computes, as values: decided once, never edited; they can be printed, costed, recorded and replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kveik.cache.layout import BlockCopy as BlockCopy
from kveik.request.request import TokenLogprob
from kveik.request.sequence import FinishReason


class Chunk(NamedTuple):
    """Tokens [start, start + count) of one sequence. A named tuple, because a step makes hundreds of them."""

    sequence_id: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a chunk
    samples: bool
    """Whether the chunk reaches the sequence's end, so that its last logits choose a token."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step computes. Decodes come first in `chunks`, then prefill chunks."""

    chunks: tuple[Chunk, ...] = ()
    decodes: int = 0
    """How many leading chunks are decodes (one new token each)."""

    copies: tuple[BlockCopy, ...] = ()
    admitted: tuple[int, ...] = ()
    """Sequence ids that left the queue in this plan."""

    preempted: tuple[int, ...] = ()
    """Sequence ids whose blocks were taken away in this plan."""

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def empty(self) -> bool:
        return not self.chunks


class Sampled(NamedTuple):
    """The token chosen for one sequence; `failed` instead of a token where its logits were not finite."""

    sequence_id: int
    token: int
    logprob: TokenLogprob | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens [start, start + len(entries)) of one sequence; the token at 0 has none."""

    sequence_id: int
    start: int
    entries: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the executor brought back for a plan: one `Sampled` for every chunk that samples, in the plan's order."""

    sampled: tuple[Sampled, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that ended in a step."""

    sequence_id: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Settled:
    """What settling a step changed, as facts for the engine to publish."""

    finished: tuple[Finished, ...] = field(default=())
