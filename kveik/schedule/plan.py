"""Step plan and step outcome, as columns. Decided once, never edited.

row          0        1        2          3
request    "r7"     "r9"     "r9"       "r12"
start       40       17       99          0        position of the row's first token
count        1        1        3         64        tokens computed: one, one and two guesses, a chunk of a prompt
logits       1        1        3          0        number of its last tokens that need logits
token_ids  [ a |      b  |  c g g | p p p … p ]    row after row
outcome    [ x |      y  |  z w   |           ]    0 to `logits` tokens per row; `offsets` has the first of each

A plan has everything that an executor needs: pickled, another process can run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kveik.cache.block_table import TableView
from kveik.cache.layout import BlockCopy as BlockCopy
from kveik.request.request import TokenLogprob
from kveik.request.sampling_rows import SamplingRows, no_rows
from kveik.request.sequence import FinishReason
from kveik.schedule.reasons import Cause, NotScheduled, Preemption

Ints = NDArray[np.int64]


def _none() -> Ints:
    return np.empty(0, dtype=np.int64)


class PromptTargets(NamedTuple):
    """Prompt tokens whose log-probabilities a row reports: those that follow its first tokens."""

    tokens: tuple[int, ...]
    """For each of the row's first tokens, the token behind it."""

    top: int
    """Number of likeliest tokens to report with each."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Rows and tokens that the next step computes."""

    request_ids: tuple[str, ...] = ()
    """[rows]"""

    sequence_ids: tuple[int, ...] = ()
    """[rows]: the same tuple object as in the plan before where the rows are the same, so that `is` compares them."""

    starts: Ints = field(default_factory=_none)
    """[rows]: position of the first token"""

    counts: Ints = field(default_factory=_none)
    """[rows]: tokens computed, at least one"""

    logits: Ints = field(default_factory=_none)
    """[rows]: number of last tokens that need logits and sample; 0 where more of the prompt follows"""

    token_ids: Ints = field(default_factory=_none)
    """[tokens]: row after row; the last `logits - 1` of a row are guesses"""

    tables: TableView = field(default_factory=TableView)
    """Per layer group, the rows' block tables."""

    sampling: SamplingRows = field(default_factory=no_rows)
    """[rows]"""

    prompt_targets: Mapping[int, PromptTargets] = field(default_factory=dict)
    """By row, where the request reports its prompt's log-probabilities."""

    copies: tuple[BlockCopy, ...] = ()
    """Blocks that are copied before anything is written."""

    admitted: tuple[int, ...] = ()
    """Sequence ids admitted in this plan."""

    preempted: tuple[Preemption, ...] = ()
    not_scheduled: tuple[NotScheduled, ...] = ()
    """Reasons of the sequences that were examined and do not run; `reason` covers the others."""

    unexamined: int = 0
    """Number of sequences that wait behind those examined."""

    ended: tuple[int, ...] = ()
    """Sequence ids that have ended since the plan before; an executor can free their state."""

    @property
    def rows(self) -> int:
        """Sequences in the step."""
        return len(self.sequence_ids)

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.token_ids)

    @property
    def empty(self) -> bool:
        """True if there is nothing to compute."""
        return not self.sequence_ids

    @property
    def decoding(self) -> NDArray[np.bool_]:
        """[rows]: True where a row computes only its newest output token and guesses behind it."""
        decoding: NDArray[np.bool_] = (self.counts == self.logits) & (self.sampling.outputs > 0)
        return decoding

    @property
    def catch_up_tokens(self) -> int:
        """Tokens of all rows that are further behind: prompts, and tokens computed again after a preemption."""
        return int(self.counts[~self.decoding].sum())

    @property
    def pairs(self) -> float:
        """Pairs of a new token and one that it reads: the cost of attention."""
        return float((self.counts * self.starts + self.counts * (self.counts + 1) / 2).sum())

    @property
    def guesses(self) -> dict[int, list[int]]:
        """Guesses behind the certain tokens, by row."""
        ends = np.cumsum(self.counts)
        rows = np.flatnonzero(self.logits > 1).tolist()
        return {row: self.token_ids[ends[row] - self.logits[row] + 1 : ends[row]].tolist() for row in rows}

    def reason(self, sequence_id: int, request_id: str) -> NotScheduled | None:
        """Returns the reason why a live sequence is not in this step; None if it is."""
        if sequence_id in self.sequence_ids:
            return None
        for one in self.not_scheduled:
            if one.sequence_id == sequence_id:
                return one
        examined = len(self.not_scheduled)
        return NotScheduled(
            sequence_id, request_id, Cause.QUEUE_POSITION, needed=examined, available=examined + self.unexamined
        )

    def __repr__(self) -> str:
        rows = zip(
            self.request_ids, self.sequence_ids, self.starts.tolist(), self.counts.tolist(), self.logits.tolist(), strict=True
        )
        table = ", ".join(f"{request}/{id_}: {start}+{count} logits={logits}" for request, id_, start, count, logits in rows)
        return (
            f"StepPlan([{table}], copies={self.copies}, admitted={self.admitted}, preempted={self.preempted}, "
            f"not_scheduled={self.not_scheduled}, unexamined={self.unexamined})"
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens [start, start + len(entries)) of one sequence; the token at 0 has none."""

    sequence_id: int
    start: int
    entries: tuple[TokenLogprob, ...]


def _no_offsets() -> Ints:
    return np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """Result of an executor for a plan."""

    tokens: Ints = field(default_factory=_none)
    """[n]: the chosen tokens, row after row"""

    offsets: Ints = field(default_factory=_no_offsets)
    """[rows + 1]: row i has tokens[offsets[i] : offsets[i + 1]]"""

    failed: frozenset[int] = frozenset()
    """Rows whose logits were not finite; their tokens before that stand."""

    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    """Place in `tokens` -> log-probability, where the request asked for it."""

    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that ended in a step."""

    sequence_id: int
    reason: FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """Changes that settling a step made, for the engine to publish."""

    kept: Ints = field(default_factory=_none)
    """[rows]: number of a row's tokens that became part of its sequence; those behind a stop token do not"""

    finished: Mapping[int, Finished] = field(default_factory=dict)
    """Sequences that ended, by row."""

    begun: tuple[int, ...] = ()
    """Sequence ids that got their first token."""

    gaps: tuple[float, ...] = ()
    """Seconds per new token since the one before it, of every sequence that had one, in any order. Tokens that came together
    share the time evenly."""
