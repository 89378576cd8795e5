"""Rates learnt while serving, seconds of loading, and the place where loading a hit stops and computing begins. Pure.

A duration is a sum of parts, and each part is a rate times a size that is known beforehand:

    a step of the model      one step   ·   its tokens   ·   pairs of a token and one that it reads
    a load from a tier       one load   ·   its bytes

The rates are learnt in their logarithms, so that they stay positive and a machine a hundred times as quick is as easy to learn;
and from the logarithm of actual / predicted, within bounds, so that one step that took a minute does not count for a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kveik.words import counted

FADING = 0.97
"""Of what an observation weighs, how much is left after the next one: some 33 observations count."""

DAMPING = 0.05
"""What no observation tells apart stays as it is: the weight, in observations, that each rate has of itself."""

SURPRISE = 3.0
"""An observation counts as if it were off by at most so many times the usual error."""

USUAL_ERROR, LEAST_ERROR = 0.5, 0.02
"""Error in the logarithm that is usual at first, and that is always granted."""

FIRST = 3
"""The first so many observations move all rates together: a machine is quicker or slower before it is different."""

RANGE = 9.0
"""A rate stays within e^±9 of where the first observations put it."""


class Rates:
    """seconds = sum of rate × size, over a few kinds of size; a filter of Kalman's kind over the logarithms of the rates."""

    def __init__(self, prior: Sequence[float]) -> None:
        """`prior`: the rates in seconds per unit, before anything was seen."""
        self._start = [math.log(rate) for rate in prior]
        self._logs = list(self._start)
        self._middle = list(self._start)
        """Where the first observations put them."""

        self._weights = [[0.0] * len(prior) for _ in prior]
        self._error = USUAL_ERROR
        self.count = 0

    @property
    def rates(self) -> list[float]:
        return [math.exp(log) for log in self._logs]

    def seconds(self, sizes: Sequence[float]) -> float:
        return sum(math.exp(log) * size for log, size in zip(self._logs, sizes, strict=True))

    def observe(self, sizes: Sequence[float], seconds: float) -> None:
        """Something of these sizes took so long."""
        parts = [math.exp(log) * size for log, size in zip(self._logs, sizes, strict=True)]
        predicted = sum(parts)
        if not (0.0 < seconds < math.inf and 0.0 < predicted < math.inf):
            return
        off = math.log(seconds / predicted)
        self.count += 1
        if self.count <= FIRST:
            self._rescale(off / self.count)
        else:
            self._follow([part / predicted for part in parts], off)

    def _rescale(self, off: float) -> None:
        """The mean of the first ones; the rates' proportions are the prior's."""
        self._logs = [log + off for log in self._logs]
        self._middle = list(self._logs)

    def _follow(self, shares: list[float], off: float) -> None:
        """`shares`: of each part in the prediction; the derivative of its logarithm by that of the rate."""
        most = SURPRISE * self._error
        self._error = max(LEAST_ERROR, self._error + 0.1 * (min(abs(off), most) - self._error))
        off = max(-most, min(most, off))
        places = range(len(shares))
        for row in places:
            for column in places:
                self._weights[row][column] = FADING * self._weights[row][column] + shares[row] * shares[column]
        damped = [[self._weights[row][column] + DAMPING * (row == column) for column in places] for row in places]
        for place, change in enumerate(_solve(damped, shares)):
            low, high = self._middle[place] - RANGE, self._middle[place] + RANGE
            self._logs[place] = max(low, min(high, self._logs[place] + change * off))

    def relax(self, share: float) -> None:
        """Rates that are slower than before anything was seen go that share of the way back: nothing was seen for long."""
        self._logs = [log - share * max(0.0, log - start) for log, start in zip(self._logs, self._start, strict=True)]

    def learnt(self) -> NDArray[np.float64]:
        return np.array(self._logs)

    def restore(self, logs: NDArray[np.float64]) -> None:
        """Raises ValueError, and changes nothing, where these are no rates of as many kinds."""
        if logs.shape != (len(self._logs),) or not np.isfinite(logs).all() or (np.abs(logs) > 50).any():
            raise ValueError(
                f"Expected the logarithms of {counted(len(self._logs), 'rate')}; got an array of shape {logs.shape}."
            )
        self._logs, self._middle, self.count = logs.tolist(), logs.tolist(), FIRST


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x with matrix · x = right, for a small positive definite matrix: elimination without pivots."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for pivot in range(size):
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [low - factor * high for low, high in zip(rows[below], rows[pivot], strict=True)]
    answer = [0.0] * size
    for place in reversed(range(size)):
        known = sum(rows[place][other] * answer[other] for other in range(place + 1, size))
        answer[place] = (rows[place][size] - known) / rows[place][place]
    return answer


class ComputeCost(Protocol):
    """A model of what computing takes."""

    def prefill_seconds(self, tokens: NDArray[np.int64], context: NDArray[np.int64], chunk: int) -> NDArray[np.float64]:
        """Seconds of computing `tokens` of one sequence after `context` others, `chunk` per step; for many at once."""
        ...


class LoadCost:
    """Seconds of loading bytes from one tier, from asking until they are in the pool."""

    PRIOR = (1e-3, 1e-9)
    """Seconds per load and per byte: a quick disk."""

    MEMORY = 300.0
    """Seconds without a load in which half of its slowness is forgotten, so that a tier which had a bad hour is tried again."""

    def __init__(self, prior: Sequence[float] = PRIOR) -> None:
        self.rates = Rates(prior)
        self._seen = 0.0
        self._waiting = 0

    def observe(self, size: int, seconds: float, now: float) -> None:
        """A load of so many bytes took so long, without its wait for other loads."""
        self._age(now)
        self.rates.observe((1.0, size), seconds)

    def late(self, size: int, seconds: float, now: float) -> None:
        """A load was given up after so long. Nothing is learnt where that is less than what was predicted."""
        if seconds > self.rates.seconds((1.0, size)):
            self.observe(size, seconds, now)

    def queued(self, size: int) -> None:
        """So many bytes more (or less) wait to be loaded."""
        self._waiting += size

    def seconds_each(self, sizes: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Of loading that many bytes behind what waits already; nothing takes no time."""
        self._age(now)
        load, byte = self.rates.rates
        return np.where(sizes > 0, load + byte * (sizes + float(self._waiting)), 0.0)

    def _age(self, now: float) -> None:
        if now > self._seen:
            self.rates.relax(1.0 - 0.5 ** ((now - self._seen) / self.MEMORY))
            self._seen = now


@dataclass(frozen=True, slots=True, eq=False)
class Prospect:
    """What could be loaded of one hit: the places at which loading may stop, and what each costs.

    cut       0      1      2      3
    tokens   64     80     96    128      known once loading has stopped there; the first: those in the pool
    sizes     0   1000   2000   2000      bytes, [tiers, cuts], from the first tier
              0      0      0   2000      from the second
    """

    tokens: NDArray[np.int64]
    sizes: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """Where loading stops, and what was predicted."""

    cut: int
    """Of the prospect; 0: loading does not pay."""

    tokens: int
    """Known when loading is done."""

    load_seconds: float
    compute_seconds: float
    """Of what is left to compute after it."""

    recompute_seconds: float
    """Of computing everything, without loading."""

    @property
    def seconds(self) -> float:
        return self.load_seconds + self.compute_seconds

    @property
    def timeout(self) -> float:
        """Seconds after which waiting for the load has cost more than it saves."""
        return self.recompute_seconds - self.compute_seconds


def best_split(
    prospect: Prospect, length: int, compute: ComputeCost, chunk: int, tiers: Sequence[LoadCost], now: float
) -> Split:
    """Load up to one of the cuts and compute the rest of `length` tokens: which cut finishes earliest; the least of equals.

    Tiers load side by side. O(cuts), in NumPy.
    """
    computing = compute.prefill_seconds(length - prospect.tokens, prospect.tokens, chunk)
    loading = np.zeros(len(prospect.tokens))
    for tier, sizes in zip(tiers, prospect.sizes, strict=True):
        np.maximum(loading, tier.seconds_each(sizes, now), out=loading)
    both = computing + loading
    cut = int(both.argmin())
    return Split(cut, int(prospect.tokens[cut]), float(loading[cut]), float(computing[cut]), float(computing[0]))
