"""Chooses the next token of every row of a batch.

    raw log-probabilities → bias → penalties → impossible tokens → temperature → top_k → min_p → top_p → draw

A row's token depends on its logits, its sequence's tokens and parameters, and (seed, choice, output position); on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kveik.request.request import TokenLogprob
from kveik.request.sequence import Sequence as RequestSequence
from kveik.sample.chance import uniforms
from kveik.sample.draw import Filters, draw
from kveik.sample.edits import LogitEdits, edited
from kveik.sample.logprobs import RawRows, as_rows, prompt_logprobs
from kveik.sample.tiles import Ints, TiledLogits
from kveik.words import counted

__all__ = ["Choice", "Sampler", "prompt_logprobs"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The token chosen for one row."""

    token: int
    """Meaningless where `failed`."""

    logprob: TokenLogprob | None
    """Where the request asked for it; of the raw distribution, always finite."""

    failed: bool
    """The row held NaN or +Inf, or left no token possible. Other rows are not touched by that."""


@dataclass(frozen=True, slots=True, eq=False)
class Choices(Sequence[Choice]):
    """The choices of all rows as flat values; a sequence of `Choice` to whoever looks at them one by one."""

    tokens: Ints
    """[rows]: meaningless where `failed`"""

    failed: frozenset[int]
    """Rows that held NaN or +Inf, or left no token possible."""

    logprobs: Mapping[int, TokenLogprob]
    """By row, where they were asked for."""

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, row: int) -> Choice: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Choice]: ...
    def __getitem__(self, row: int | slice) -> Choice | Sequence[Choice]:
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        row = range(len(self))[row]
        return Choice(int(self.tokens[row]), self.logprobs.get(row), row in self.failed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none either


_Noted = dict[int, tuple[RawRows, int]]
"""Row → where its raw log-probabilities are."""


class Sampler:
    """Samples steps of one model. What it keeps between steps is bounded, and dropped by `forget`."""

    def __init__(self, vocab: int, tokens_real: int, eos_ids: frozenset[int] = frozenset()) -> None:
        """vocab: columns of the logits. tokens_real: ids from there on are padding and never sampled; a tokenizer may also
        know more ids than the model has columns.

        eos_ids: with a request's stop_token_ids, the tokens that cannot come before its min_tokens.
        """
        assert vocab > 0
        assert tokens_real > 0
        self.vocab = vocab
        self.tokens_real = min(tokens_real, vocab)
        self._edits = LogitEdits(self.tokens_real, eos_ids)

    @property
    def remembered(self) -> int:
        """Sequences of which something is kept between steps."""
        return len(self._edits)

    def forget(self, sequence_id: int) -> None:
        """The sequence is gone: drop what is kept of it. Harmless for one that is not known."""
        self._edits.forget(sequence_id)

    def choose(self, logits: Tensor, sequences: Sequence[RequestSequence]) -> Choices:
        """One choice per row. logits: float32 [rows, vocab], row i for sequences[i]; its values may be changed."""
        assert logits.shape == (len(sequences), self.vocab), (
            f"logits {tuple(logits.shape)} for {counted(len(sequences), 'sequence')}"
        )
        if not sequences:
            return Choices(np.empty(0, dtype=np.int64), frozenset(), {})
        logits = as_rows(logits)
        changed = [edited(sequence.sampling, sequence.output_count) for sequence in sequences]
        raw = self._note_raw(logits, sequences, changed)
        rows = [(row, sequence) for row, sequence in enumerate(sequences) if changed[row]]
        broken = self._edits.apply(logits.numpy().reshape(-1), self.vocab, rows) if rows else np.empty(0, np.int64)
        tiles = TiledLogits.over(logits, self.tokens_real)
        # An edit may hide a value that is not finite, but it has met it then.
        sound = np.isfinite(tiles.peaks)
        sound[broken] = False
        tokens = _pick(tiles, sequences, sound)
        failed = frozenset(np.flatnonzero(~sound).tolist())
        logprobs = {row: noted.of(at, int(tokens[row])) for row, (noted, at) in raw.items() if row not in failed}
        return Choices(tokens, failed, logprobs)

    def _note_raw(self, logits: Tensor, sequences: Sequence[RequestSequence], changed: Sequence[bool]) -> _Noted:
        """The raw distributions of the rows that report log-probabilities, taken before any edit."""
        tops = {row: top for row, sequence in enumerate(sequences) if (top := sequence.sampling.logprobs) is not None}
        if not tops:
            return {}
        tiles = TiledLogits.over(logits, self.tokens_real)
        raw = RawRows.note(tiles, np.array(list(tops)), list(tops.values()), copied=[changed[row] for row in tops])
        return {row: (raw, at) for at, row in enumerate(tops)}


def _pick(tiles: TiledLogits, sequences: Sequence[RequestSequence], sound: NDArray[np.bool_]) -> Ints:
    """[rows]: the tokens; 0 where a row is not sound."""
    tokens = np.zeros(len(sequences), dtype=np.int64)
    random = np.array([not sequence.sampling.greedy for sequence in sequences])
    greedy_rows, random_rows = np.flatnonzero(~random & sound), np.flatnonzero(random & sound)
    if len(greedy_rows):
        tokens[greedy_rows] = tiles.best(greedy_rows)
    if len(random_rows):
        drawn = [sequences[row] for row in random_rows.tolist()]
        chances = uniforms((sequence.seed, sequence.choice, sequence.output_count) for sequence in drawn)
        tokens[random_rows] = draw(tiles, random_rows, _filters(drawn), chances)
    return tokens


def _filters(sequences: Sequence[RequestSequence]) -> Filters:
    sampling = [sequence.sampling for sequence in sequences]
    return Filters(
        temperature=np.array([params.temperature for params in sampling], dtype=np.float64),
        top_k=np.array([params.top_k for params in sampling], dtype=np.int64),
        top_p=np.array([params.top_p for params in sampling], dtype=np.float64),
        min_p=np.array([params.min_p for params in sampling], dtype=np.float64),
    )
