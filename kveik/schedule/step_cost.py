"""Step cost: predicted seconds of a step, learnt from every step. Pure.

    a step                     reads weights for        rates of its own for
    of decodes alone           one token per sequence   the step · its tokens · pairs of a token and one that it reads
    with a prefill among them  many tokens at once      the same three

Decodes are bound by memory and prefills by arithmetic, so neither distorts the rates of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kveik.cache.eviction.policy import Learnt
from kveik.offload.cost import Rates

PRIOR = (5e-3, 5e-4, 1e-8)
"""Seconds per step, token and pair: a model of some 10^8 parameters on a few cores. Right to a factor of ten or so."""

DECODES_TOGETHER = 8
"""Steps of decodes alone that are one observation: they come by the thousand and are much alike."""


class StepCost:
    """Seconds of a step with so many rows, new tokens and pairs."""

    def __init__(self, prior: Sequence[float] = PRIOR) -> None:
        self.prefills = Rates(prior)
        self.decodes = Rates(prior)
        self._steps, self._tokens, self._pairs, self._seconds = 0, 0, 0.0, 0.0
        """Sums over the decodes that are not observed yet."""

    def observe(self, rows: int, tokens: int, pairs: float, seconds: float) -> None:
        """Learn from a step. `rows`: sequences in it; `pairs`: of a new token and one that it reads."""
        if tokens > rows:
            self.prefills.observe((1.0, tokens, pairs), seconds)
            return
        self._steps += 1
        self._tokens += tokens
        self._pairs += pairs
        self._seconds += seconds
        if self._steps == DECODES_TOGETHER:
            self.decodes.observe((self._steps, self._tokens, self._pairs), self._seconds)
            self._steps, self._tokens, self._pairs, self._seconds = 0, 0, 0.0, 0.0

    def seconds(self, rows: int, tokens: int, pairs: float) -> float:
        """Predicted seconds of one step."""
        return (self.prefills if tokens > rows else self.decodes).seconds((1.0, tokens, pairs))

    def prefill_seconds(self, tokens: NDArray[np.int64], context: NDArray[np.int64], chunk: int) -> NDArray[np.float64]:
        """Predicted seconds for `tokens` of one sequence after `context` others, `chunk` per step; for many at once."""
        step, token, pair = self.prefills.rates
        many = tokens.astype(np.float64)
        return np.asarray(step * -(-tokens // chunk) + token * many + pair * (many * context + many * (many + 1) / 2))

    def learnt(self) -> Learnt:
        """The rates, by name."""
        return {name: rates.learnt() for name, rates in self._named.items()}

    def restore(self, learnt: Learnt) -> None:
        """Restore the rates that are in the tables. Raises ValueError where a table is malformed."""
        for name, rates in self._named.items():
            if name in learnt:
                rates.restore(np.asarray(learnt[name], dtype=np.float64))

    @property
    def _named(self) -> dict[str, Rates]:
        return {"seconds of prefill steps": self.prefills, "seconds of decode steps": self.decodes}
