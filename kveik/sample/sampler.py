"""Chooses the next token of every row of a batch.

    raw log-probabilities → bias → penalties → impossible tokens → temperature → top_k → min_p → top_p → draw

A row's token depends on its logits, its sequence's tokens and parameters, and (seed, choice, output position); on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kveik.request.request import TokenLogprob
from kveik.request.sampling_rows import RowDetail, SamplingRows
from kveik.sample.chance import uniforms
from kveik.sample.draw import Filters, draw
from kveik.sample.edits import LogitEdits, edited
from kveik.sample.logprobs import RawRows, as_rows, prompt_logprobs
from kveik.sample.tiles import Ints, TiledLogits
from kveik.words import counted

__all__ = ["Choices", "Sampler", "prompt_logprobs"]


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The tokens chosen for all rows of logits."""

    tokens: Ints
    """[rows]: meaningless where `failed`"""

    failed: frozenset[int]
    """Rows that held NaN or +Inf, or left no token possible. Other rows are not touched by that."""

    logprobs: Mapping[int, TokenLogprob]
    """By row, where the request asked for it: of the raw distribution, always finite."""


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

    def choose(self, logits: Tensor, rows: SamplingRows) -> Choices:
        """One choice per row. logits: float32 [rows, vocab]; its values may be changed."""
        assert logits.shape == (len(rows), self.vocab), f"logits {tuple(logits.shape)} for {counted(len(rows), 'row')}"
        if not len(rows):
            return Choices(np.empty(0, dtype=np.int64), frozenset(), {})
        logits = as_rows(logits)
        changed = _edited(rows)
        raw = self._note_raw(logits, rows, {row for row, _, _ in changed})
        broken = self._edits.apply(logits.numpy().reshape(-1), self.vocab, changed) if changed else np.empty(0, np.int64)
        tiles = TiledLogits.over(logits, self.tokens_real)
        # An edit may hide a value that is not finite, but it has met it then.
        sound = np.isfinite(tiles.peaks)
        sound[broken] = False
        tokens = _pick(tiles, rows, sound)
        failed = frozenset(np.flatnonzero(~sound).tolist())
        logprobs = {row: noted.of(at, int(tokens[row])) for row, (noted, at) in raw.items() if row not in failed}
        return Choices(tokens, failed, logprobs)

    def _note_raw(self, logits: Tensor, rows: SamplingRows, changed: Set[int]) -> _Noted:
        """The raw distributions of the rows that report log-probabilities, taken before any edit."""
        tops = {row: top for row, detail in rows.details.items() if (top := detail.sampling.logprobs) is not None}
        if not tops:
            return {}
        tiles = TiledLogits.over(logits, self.tokens_real)
        raw = RawRows.note(tiles, np.array(list(tops)), list(tops.values()), copied=[row in changed for row in tops])
        return {row: (raw, at) for at, row in enumerate(tops)}


def _edited(rows: SamplingRows) -> list[tuple[int, int, RowDetail]]:
    """(row, output tokens before it, detail) of the rows whose logits are changed before the draw."""
    counts = ((row, int(rows.outputs[row]), detail) for row, detail in rows.details.items())
    return [one for one in counts if edited(one[2].sampling, one[1])]


def _pick(tiles: TiledLogits, rows: SamplingRows, sound: NDArray[np.bool_]) -> Ints:
    """[rows]: the tokens; 0 where a row is not sound."""
    tokens = np.zeros(len(rows), dtype=np.int64)
    greedy = rows.temperature == 0
    greedy_rows, random_rows = np.flatnonzero(greedy & sound), np.flatnonzero(~greedy & sound)
    if len(greedy_rows):
        tokens[greedy_rows] = tiles.best(greedy_rows)
    if len(random_rows):
        at = random_rows
        chances = uniforms(rows.seeds[at], rows.choices[at], rows.outputs[at])
        filters = Filters(rows.temperature[at], rows.top_k[at], rows.top_p[at], rows.min_p[at])
        tokens[at] = draw(tiles, at, filters, chances)
    return tokens
