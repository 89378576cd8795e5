"""Which tokens a sequence holds, and how often in its output. Kept token by token: a step costs only what is new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenHistory:
    """The distinct tokens of one sequence.

    ids     [ p p p p p | o o o · · · ]     distinct tokens, in order of first sight; the arrays grow by doubling
    counts  [ 0 0 2 0 0 | 1 4 1 · · · ]     occurrences in the output

    Bounded by the vocabulary and by the sequence's length.
    """

    def __init__(self, tokens: Sequence[int], prompt_length: int, *, real: int, with_prompt: bool) -> None:
        """real: ids from there on are not tokens and are left out. with_prompt: whether the prompt's tokens are wanted too."""
        prompt = np.unique(np.asarray(tokens[:prompt_length], dtype=np.int64)) if with_prompt else np.empty(0, np.int64)
        prompt = prompt[(prompt >= 0) & (prompt < real)]
        self._real = real
        self._places: dict[int, int] = {token: place for place, token in enumerate(prompt.tolist())}
        self._ids = prompt
        self._counts = np.zeros(len(prompt), dtype=np.float32)
        self.seen = prompt_length
        """Tokens of the sequence, prompt included, that are counted."""

    @property
    def ids(self) -> NDArray[np.int64]:
        """[n]: distinct tokens"""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """[n]: occurrences of each in the output"""
        return self._counts[: len(self._places)]

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Count the tokens that were appended since the last time."""
        for token in tokens[self.seen :]:
            if 0 <= token < self._real:
                place = self._place(token)
                self._counts[place] += 1
        self.seen = len(tokens)

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
