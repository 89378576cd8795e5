"""Chance without a state: every draw is a function of (seed, choice, position), so batching and preemption change nothing.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): a block cipher cut
down to what statistics need. The seed is its key, the place of the draw its counter; GPUs use the same function.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_ROUNDS = 10


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10. counter [4, n], key [2, n] -> [4, n]; every number holds one 32-bit word."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _WORD_BITS) ^ c1 ^ k0, right & _WORD, (left >> _WORD_BITS) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return np.stack([c0, c1, c2, c3])


def uniforms(seeds: NDArray[np.uint64], choices: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """[n]: one number in [0, 1) for each (seed, choice, position).

    seeds [n, 3]: words, as `request.sampling_rows.seed_words` makes them; choices, positions [n]: in [0, 2^32).
    """
    counter = np.zeros((4, len(seeds)), dtype=np.uint64)
    counter[0], counter[1], counter[2] = positions, choices, seeds[:, 2]
    high, low, _, _ = philox(counter, np.ascontiguousarray(seeds[:, :2].T))
    # 53 bits, as many as a float64 below 1 can hold evenly.
    mixed = (high << _WORD_BITS | low) >> np.uint64(11)
    numbers: NDArray[np.float64] = mixed.astype(np.float64) * 2.0**-53
    return numbers
