"""Log-probabilities of the model's own distribution: before bias, penalties, temperature and filters, over the ids that exist.

Always finite, because JSON has no infinity: what is impossible, or below it, is reported as FLOOR.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveik.request.request import TokenLogprob
from kveik.sample.passes import log_norms
from kveik.sample.tiles import Floats, Ints, TiledLogits

FLOOR = -9999.0
"""The least log-probability that is reported."""


@dataclass(frozen=True, slots=True)
class RawRows:
    """What the model said about some rows, noted before anything changes their logits."""

    values: list[Floats]
    """Per row [real]: the logits, as they were"""

    norms: NDArray[np.float64]
    """[n]: log of the sum of the exponentials"""

    top: list[tuple[tuple[int, float], ...]]
    """Per row: the likeliest tokens, best first, equal ones by lower id"""

    @classmethod
    def note(cls, tiles: TiledLogits, rows: Ints, tops: Sequence[int], *, copied: Sequence[bool]) -> RawRows:
        """rows [n], ascending; tops: how many of the likeliest, per row; copied: whether the logits will change afterwards."""
        norms = log_norms(tiles, rows)
        views = [tiles.row(row) for row in rows.tolist()]
        values = [view.copy() if copy else view for view, copy in zip(views, copied, strict=True)]
        return cls(values, norms, _tops(tiles, rows, norms, tops))

    def of(self, row: int, token: int) -> TokenLogprob:
        """The log-probability of a token in the row-th of these rows; the floor for a token that does not exist."""
        values = self.values[row]
        value = float(values[token]) if 0 <= token < len(values) else -math.inf
        return TokenLogprob(token, _finite(value - float(self.norms[row])), self.top[row])


def prompt_logprobs(logits: Tensor, targets: Sequence[int], top: int, *, tokens_real: int | None = None) -> list[TokenLogprob]:
    """What the model thought of a prompt's tokens.

    logits: float32 [rows, vocab], row i foretells targets[i]; top: how many of the likeliest to name with each.
    tokens_real: ids from there on are padding and have no probability. Values that are not finite come out as FLOOR.
    """
    tiles = TiledLogits.over(as_rows(logits), tokens_real or logits.shape[1])
    rows = np.arange(len(targets))
    raw = RawRows.note(tiles, rows, [top] * len(rows), copied=[False] * len(rows))
    return [raw.of(row, target) for row, target in enumerate(targets)]


def as_rows(logits: Tensor) -> Tensor:
    """Logits of any device as contiguous float32 in the host's memory; the same memory where they are that already."""
    return logits.detach().to("cpu", torch.float32).contiguous()


def _tops(
    tiles: TiledLogits, rows: Ints, norms: NDArray[np.float64], tops: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    """The likeliest of each row; a row that is not finite names none, since it has no order."""
    named: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
    sound = np.flatnonzero(np.isfinite(tiles.peaks[rows]))
    if not len(sound) or not any(tops):
        return named
    ranked = tiles.rank_all(rows[sound], max(tops))
    shares = ranked.values.astype(np.float64) - norms[sound, None]
    for place, at in enumerate(sound.tolist()):
        count = tops[at]
        pairs = zip(ranked.ids[place, :count].tolist(), shares[place, :count].tolist(), strict=True)
        named[at] = tuple((token, _finite(value)) for token, value in pairs)
    return named


def _finite(value: float) -> float:
    # Written so that NaN becomes the floor too.
    return min(value, 0.0) if value > FLOOR else FLOOR
