"""Sampling parameters of a step's rows as flat arrays, with details of those rows that need more. No logits, no blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kveik.request.request import SamplingParams

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]
Words = NDArray[np.uint64]


class TokenHistory:
    """The tokens of one sequence as they were when a step was planned: a handle on its own list, which only grows.

    Pickled, it holds exactly these tokens, so that another process needs nothing else.
    """

    __slots__ = ("_tokens", "guesses", "length", "prompt_length")

    def __init__(self, tokens: list[int], length: int, prompt_length: int, guesses: tuple[int, ...] = ()) -> None:
        """`guesses`: follow the first `length` tokens, and are not certain."""
        self._tokens = tokens
        self.length = length
        self.prompt_length = prompt_length
        self.guesses = guesses

    def __reduce__(self) -> tuple[type[TokenHistory], tuple[object, ...]]:
        return TokenHistory, (self._tokens[: self.length], self.length, self.prompt_length, self.guesses)

    def tokens(self, start: int = 0) -> list[int]:
        """Returns the certain tokens from this position on."""
        return self._tokens[start : self.length]

    def ahead(self, guesses: Sequence[int]) -> TokenHistory:
        """Returns the same sequence with these guesses behind it."""
        return TokenHistory(self._tokens, self.length, self.prompt_length, tuple(guesses))


@dataclass(frozen=True, slots=True)
class RowDetail:
    """Parameters of a row whose logits are edited, or whose log-probabilities are reported."""

    sequence_id: int
    sampling: SamplingParams
    history: TokenHistory


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """One entry per row of a step."""

    temperature: Doubles
    """[rows]; 0: the likeliest token"""

    top_k: Ints
    """[rows]; 0: all"""

    top_p: Doubles
    """[rows]; 1: all"""

    min_p: Doubles
    """[rows]; 0: all"""

    seeds: Words
    """[rows, 3]: low word, high word, and 1 for a negative seed; see `seed_words`"""

    choices: Ints
    """[rows]: index of the choice in its request"""

    outputs: Ints
    """[rows]: number of output tokens before the one to be sampled"""

    details: Mapping[int, RowDetail] = field(default_factory=dict)
    """By row."""

    def __len__(self) -> int:
        return len(self.temperature)

    def take(self, rows: Ints, ahead: Ints, guesses: Mapping[int, Sequence[int]]) -> SamplingRows:
        """Returns entries for `rows` [n], each `ahead` [n] tokens further; `guesses`: by row, the tokens assumed before."""
        details = {}
        for place, row in enumerate(rows.tolist()) if self.details else ():
            if (detail := self.details.get(row)) is not None:
                if ahead[place]:
                    history = detail.history.ahead(guesses[row][: int(ahead[place])])
                    detail = RowDetail(detail.sequence_id, detail.sampling, history)
                details[place] = detail
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seeds[rows],
            self.choices[rows],
            self.outputs[rows] + ahead,
            details,
        )


def seed_words(seed: int) -> tuple[int, int, int]:
    """Returns a seed in [-2^63, 2^64) as three words; the sign has one of its own, so that -1 and 2^64 - 1 differ."""
    return seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, int(seed < 0)


def needs_detail(sampling: SamplingParams) -> bool:
    """True if the parameters need more than the arrays."""
    return bool(sampling.logit_bias) or sampling.min_tokens > 0 or sampling.logprobs is not None or penalised(sampling)


def penalised(sampling: SamplingParams) -> bool:
    """True if earlier tokens change the logits."""
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def no_rows() -> SamplingRows:
    """Returns the parameters of a step without rows."""
    none, nothing = np.empty(0, dtype=np.float64), np.empty(0, dtype=np.int64)
    return SamplingRows(none, nothing, none, none, np.empty((0, 3), dtype=np.uint64), nothing, nothing)
