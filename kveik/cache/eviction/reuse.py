"""Reuse: the likelihood that records of a kind are used again at a given age, and the worth of keeping them. NumPy only.

A *spell* is the time from one use of a segment to the next, or to its being forgotten. Spells are counted by the kind of
segment and by the bucket of age in which they ended:

    bucket     0        1       2       3      …      13             14
    age, s   [0,1)    [1,2)   [2,4)   [4,8)    …   [4096,8192)    [8192, ∞)

The rate at which a kind is used again, over age, is fitted as a product of factors (the shape over age, the turn, the new
tokens, the answer's tokens), because most kinds are too rare to be fitted alone; what a kind has seen itself pulls its rates
away from the product. From rates follows the index: the greatest ratio, over all horizons, of the probability of use until
then to the expected time it is kept until then (Gittins 1979, "Bandit processes and dynamic allocation indices").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

AGES = 15
TURNS, NEWS, OUTS = 4, 4, 3
SESSIONS = TURNS * NEWS * OUTS
KINDS = SESSIONS + TURNS
"""Sessions by turn, new tokens and answer; then shared segments by turn."""

LAST = AGES - 1
OLD = float(1 << (AGES - 2))
_STARTS = np.array([0.0] + [float(1 << place) for place in range(AGES - 1)])
_WIDTHS = np.append(np.diff(_STARTS), OLD)
# The shape starts from one event at rate 0.1 / age, which is the order of LRU.
_SHAPE_EXPOSURE = 10.0 * np.maximum(_STARTS, 0.5)

FACTOR_WEIGHT = 8.0
KIND_WEIGHT = 32.0
CELL_WEIGHT = 4.0
FADING = 0.99
"""Of what was counted, how much still counts after a lesson."""

_TURN_OF = (0, 1, 2, 2)


def bucket(age: float) -> int:
    """Of an age in seconds."""
    return int(age).bit_length() if age < OLD else LAST


def turn(uses: int) -> int:
    """Class of how often a session went on: 0, 1, 2 to 3, more."""
    return _TURN_OF[uses] if uses < 4 else 3


def session_kind(uses: int, tokens_new: int, tokens_out: int) -> int:
    """Of a segment that one session uses; the latest request brought so many new tokens and got so many."""
    new = 0 if tokens_new < 512 else 1 if tokens_new < 4 * 512 else 2 if tokens_new < 16 * 512 else 3
    out = 0 if tokens_out < 32 else 1 if tokens_out < 256 else 2
    return (turn(uses) * NEWS + new) * OUTS + out


def shared_kind(uses: int) -> int:
    """Of a segment after which sessions differ."""
    return SESSIONS + turn(uses)


def exposure(used: Array, unused: Array) -> Array:
    """Weight times seconds that spells spent in each bucket: its width, or half of it where they ended in it."""
    ended = used + unused
    passed = ended[:, ::-1].cumsum(axis=1)[:, ::-1] - ended
    return np.asarray(_WIDTHS * (passed + 0.5 * ended))


def fit(used: Array, time: Array) -> Array:
    """Rates per second, [KINDS, AGES], from uses and the exposure to them."""
    rates = np.empty((KINDS, AGES))
    sessions = (TURNS, NEWS, OUTS, AGES)
    rates[:SESSIONS] = _product(used[:SESSIONS].reshape(sessions), time[:SESSIONS].reshape(sessions)).reshape(SESSIONS, AGES)
    rates[SESSIONS:] = _product(used[SESSIONS:], time[SESSIONS:])
    expected = (rates * time).sum(axis=1)
    rates *= ((used.sum(axis=1) + KIND_WEIGHT) / (expected + KIND_WEIGHT))[:, None]
    return np.asarray((used + CELL_WEIGHT) / (time + CELL_WEIGHT / rates))


def _product(used: Array, time: Array) -> Array:
    """Rates as a product of one factor per axis, the last one over age, by three rounds of proportional fitting."""
    kinds = tuple(range(used.ndim - 1))
    factors = [
        np.ones([size if other == axis else 1 for other in range(used.ndim)]) for axis, size in enumerate(used.shape[:-1])
    ]
    shape = np.ones(AGES)
    for _ in range(3):
        shape = (used.sum(axis=kinds) + 1.0) / ((time * _times(factors)).sum(axis=kinds) + _SHAPE_EXPOSURE)
        for axis in kinds:
            rest = tuple(other for other in range(used.ndim) if other != axis)
            expected = (time * _times(factors) * shape).sum(axis=rest, keepdims=True)
            factors[axis] = factors[axis] * (used.sum(axis=rest, keepdims=True) + FACTOR_WEIGHT) / (expected + FACTOR_WEIGHT)
    return np.asarray(np.broadcast_to(_times(factors) * shape, used.shape))


def _times(factors: list[Array]) -> Array:
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
    return product


def index(rates: Array) -> Array:
    """The Gittins index per second, [KINDS, AGES], of a record half-way through each bucket of age."""
    stays = np.exp(-rates * _WIDTHS)
    # Expected seconds in a bucket of one that enters it: (1 - e^(-rate * width)) / rate.
    seconds = (1.0 - stays) / rates
    halves = np.sqrt(stays)
    best = np.empty_like(rates)
    for first in range(AGES):
        alive = halves[:, first]
        used, kept = 1.0 - alive, (1.0 - alive) / rates[:, first]
        best[:, first] = used / kept
        for last in range(first + 1, AGES):
            used = used + alive * (1.0 - stays[:, last])
            kept = kept + alive * seconds[:, last]
            alive = alive * stays[:, last]
            np.maximum(best[:, first], used / kept, out=best[:, first])
    return best
