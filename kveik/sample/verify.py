"""Acceptance of guessed tokens: a guess stands where the sampler chose the same token.

The sampler's draw is a function of (logits, seed, choice, position), so what comes out is exactly what one token a step gives;
Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (ICML 2023), with equality in place of
the ratio test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray


def accepted(
    tokens: NDArray[np.int64], starts: NDArray[np.int64], guesses: Mapping[int, Sequence[int]], failed: Set[int]
) -> tuple[NDArray[np.int64], frozenset[int]]:
    """How many of each row's chosen tokens stand, and the rows that failed before their end.

    tokens [n]: chosen, row after row; starts [rows + 1]: the first of each row; guesses: by row, the tokens that were computed
    behind the certain ones, one fewer than chosen; failed: places in `tokens` without one.
    """
    counts = np.diff(starts)
    broken = set()
    for row in {*guesses, *(int(np.searchsorted(starts, place, side="right")) - 1 for place in failed)}:
        first, guessed = int(starts[row]), guesses.get(row, ())
        kept = 0
        while kept < counts[row]:
            if first + kept in failed:
                broken.add(row)
                break
            kept += 1
            if kept > len(guessed) or tokens[first + kept - 1] != guessed[kept - 1]:
                break
        counts[row] = kept
    return counts, frozenset(broken)
