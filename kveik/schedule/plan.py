"""What a step computes, as values: decided once, never edited; they can be printed, costed, recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kveik.cache.layout import BlockCopy as BlockCopy
from kveik.request.request import TokenLogprob
from kveik.request.sequence import FinishReason


def _nobody() -> NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


class Chunk(NamedTuple):
    """Tokens [start, start + count) of one sequence. A named tuple, because a plan may be asked for a thousand of them."""

    sequence_id: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a chunk
    samples: bool
    """Whether the chunk reaches the sequence's end, so that its last logits choose a token."""


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """The sequences that compute their one pending token, as flat arrays: a step may have a thousand of them."""

    ids: tuple[int, ...] = ()
    """The very same tuple as in the plan before where nobody came or went: whoever keeps something per row can tell by `is`."""

    starts: NDArray[np.int64] = field(default_factory=_nobody)
    """[decodes]: position of the pending token. A copy of the scheduler's own, never written again."""

    tokens: NDArray[np.int64] = field(default_factory=_nobody)
    """[decodes]: the pending token. A copy too."""

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decodes):
            return NotImplemented
        return self.ids == other.ids and all(map(np.array_equal, (self.starts, self.tokens), (other.starts, other.tokens)))

    def __hash__(self) -> int:
        return hash(self.ids)

    def chunks(self) -> Iterable[Chunk]:
        """The same, one by one."""
        for sequence_id, start in zip(self.ids, self.starts.tolist(), strict=True):
            yield Chunk(sequence_id, start, 1, True)


@dataclass(frozen=True, slots=True, repr=False)
class StepPlan:
    """What the next step computes: decodes first, then prefill chunks. The i-th of all has row i in the block tables."""

    decoding: Decodes = field(default_factory=Decodes)
    """One new token each."""

    prefills: tuple[Chunk, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    admitted: tuple[int, ...] = ()
    """Sequence ids that left the queue in this plan."""

    preempted: tuple[int, ...] = ()
    """Sequence ids whose blocks were taken away in this plan."""

    @property
    def decodes(self) -> int:
        """How many leading chunks are decodes."""
        return len(self.decoding.ids)

    @property
    def rows(self) -> int:
        """Chunks in all, which is sequences in all."""
        return len(self.decoding.ids) + len(self.prefills)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks, made anew for whoever asks: for reading and for replaying, not for every step."""
        return (*self.decoding.chunks(), *self.prefills)

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.count for chunk in self.prefills)

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefill_tokens

    @property
    def sampling_ids(self) -> tuple[int, ...]:
        """Sequences that get a token in this step, in order; the decodes' own tuple where there is nobody else."""
        later = tuple(chunk.sequence_id for chunk in self.prefills if chunk.samples)
        return self.decoding.ids + later if later else self.decoding.ids

    @property
    def empty(self) -> bool:
        return not self.decoding.ids and not self.prefills

    def __repr__(self) -> str:
        return (
            f"StepPlan(chunks={self.chunks}, decodes={self.decodes}, copies={self.copies}, "
            f"admitted={self.admitted}, preempted={self.preempted})"
        )


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


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """What the executor brought back for a plan, for every chunk that samples, in the plan's order."""

    tokens: NDArray[np.int64] = field(default_factory=_nobody)
    """[chunks that sample]: the chosen tokens; meaningless where `failed`."""

    failed: frozenset[int] = frozenset()
    """Places in `tokens` whose logits were not finite."""

    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    """Place in `tokens` -> log-probability, where the request asked for it."""

    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    @classmethod
    def of(cls, sampled: Iterable[Sampled]) -> StepOutcome:
        """From one value per sequence."""
        items = tuple(sampled)
        return cls(
            tokens=np.array([item.token for item in items], dtype=np.int64),
            failed=frozenset(place for place, item in enumerate(items) if item.failed),
            logprobs={place: item.logprob for place, item in enumerate(items) if item.logprob is not None},
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that ended in a step."""

    sequence_id: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Settled:
    """What settling a step changed, as facts for the engine to publish."""

    finished: tuple[Finished, ...] = ()
    places: tuple[int, ...] = ()
    """Which of the outcome's tokens are the last ones of those that finished, in the same order."""

    begun: tuple[int, ...] = ()
    """Sequence ids that got their first token."""

    gaps: tuple[float, ...] = ()
    """Seconds between a new token and the one before it, of every sequence that had one; in no promised order."""
