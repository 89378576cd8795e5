"""Counts of a sequence's distinct tokens, kept token by token: a step costs only what is new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of one sequence.

    ids     [ p p p p p | o o o · · · ]     distinct tokens, in order of first sight; the arrays grow by doubling
    counts  [ 0 0 2 0 0 | 1 4 1 · · · ]     occurrences in the output

    Bounded by the vocabulary and by the sequence's length.
    """

    def __init__(self, prompt: Sequence[int], *, real: int, with_prompt: bool) -> None:
        """real: ids from there on are not tokens and are left out. with_prompt: whether the prompt's tokens are wanted too."""
        distinct = np.unique(np.asarray(prompt, dtype=np.int64)) if with_prompt else np.empty(0, np.int64)
        distinct = distinct[(distinct >= 0) & (distinct < real)]
        self._real = real
        self._places: dict[int, int] = {token: place for place, token in enumerate(distinct.tolist())}
        self._ids = distinct
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        self.seen = len(prompt)
        """Tokens of the sequence, prompt included, that are counted."""

    @property
    def ids(self) -> NDArray[np.int64]:
        """[n]: distinct tokens"""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """[n]: occurrences of each in the output"""
        return self._counts[: len(self._places)]

    def add(self, tokens: Sequence[int]) -> None:
        """Count tokens that follow those seen so far."""
        for token in tokens:
            if 0 <= token < self._real:
                place = self._place(token)
                self._counts[place] += 1
        self.seen += len(tokens)

    def with_guesses(self, guesses: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The same ids and counts with a few uncertain tokens added; nothing here changes."""
        if not guesses:
            return self.ids, self.counts
        counts = dict(zip(self.ids.tolist(), self.counts.tolist(), strict=True))
        for token in guesses:
            if 0 <= token < self._real:
                counts[token] = counts.get(token, 0.0) + 1.0
        return np.array(list(counts), dtype=np.int64), np.array(list(counts.values()), dtype=np.float32)

    def _place(self, token: int) -> int:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._ids):
                room = max(16, 2 * place)
                self._ids = np.resize(self._ids, room) if place else np.zeros(room, np.int64)
                self._counts = np.concatenate([self._counts, np.zeros(room - place, np.float32)])
            self._ids[place] = token
        return place
