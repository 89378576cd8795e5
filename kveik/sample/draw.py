"""Draws one token per row from the filtered distribution, by inverting its cumulative sum at one uniform number.

    temperature → top_k → min_p → top_p → draw

Every filter keeps a prefix of the order of tokens (see `tiles`). top_k and min_p are cuts on rank and on the ratio to the
likeliest token, so which of them comes first makes no difference; top_p then looks at what they left, renormalised.

    rows with top_k or min_p     only the head of the order is ever looked at
    rows with top_p alone        the head, and one pass for the mass of the whole vocabulary
    rows with neither            that pass, and the one tile in which the number falls

A row's token depends on that row alone: sums run over fixed tiles or in rank order, whatever else is in the batch. A chance is
at most 1 - 2^-53, and that times a mass is below the mass after rounding too: the draw never falls behind the last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kveik.sample.nucleus import draw_wide
from kveik.sample.passes import masses, shares_per_tile
from kveik.sample.tiles import TILE, Floats, Ints, Ranked, TiledLogits

Doubles = NDArray[np.float64]

_COLDEST = 1e-6
"""Temperatures below are raised to it: e^(-gap/1e-6) is 0 for any gap that float32 logits of usual size can have."""

_HEADS = (32, 256)
"""How many tokens top_p looks at, first and then, before it looks at them all."""


@dataclass(frozen=True, slots=True)
class Filters:
    """What to draw from, one entry per row. top_k 0: all; top_p 1: all; min_p 0: all."""

    temperature: Doubles
    top_k: Ints
    top_p: Doubles
    min_p: Doubles

    def __getitem__(self, rows: Ints) -> Filters:
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def draw(tiles: TiledLogits, rows: Ints, filters: Filters, chances: Doubles) -> Ints:
    """[n]: the tokens drawn for `rows` of the logits, whose peaks are finite; chances [n] in [0, 1)."""
    tokens = np.empty(len(rows), dtype=np.int64)
    headed = ((filters.top_k > 0) & (filters.top_k < tiles.real)) | (filters.min_p > 0)
    plain = ~headed & (filters.top_p >= 1)
    if headed.any():
        at = np.flatnonzero(headed)
        tokens[at] = _draw_headed(tiles, rows[at], filters[at], chances[at])
    if plain.any():
        at = np.flatnonzero(plain)
        shares = shares_per_tile(tiles, rows[at], np.maximum(filters.temperature[at], _COLDEST))
        tokens[at] = _draw_plain(tiles, rows[at], filters[at], chances[at], shares)
    at = np.flatnonzero(~headed & ~plain)
    if len(at):
        totals = masses(tiles, rows[at], np.maximum(filters.temperature[at], _COLDEST))
        tokens[at] = _draw_nucleus(tiles, rows[at], filters[at], chances[at], totals)
    return tokens


def _draw_headed(tiles: TiledLogits, rows: Ints, filters: Filters, chances: Doubles) -> Ints:
    """Rows whose head is bounded by rank or by ratio."""
    counts = np.where(filters.top_k > 0, np.minimum(filters.top_k, tiles.real), tiles.real)
    floors = np.maximum(tiles.floors(rows, counts), _ratio_floors(tiles.peaks[rows], filters))
    tokens = np.empty(len(rows), dtype=np.int64)
    for part in tiles.parts(rows, floors):
        ranked = tiles.rank(rows[part], floors[part])
        cut = _cut(ranked, filters[part], None)
        tokens[part] = cut.pick(ranked, chances[part])
    return tokens


def _ratio_floors(peaks: Floats, filters: Filters) -> Floats:
    """Values below which a token's share of the likeliest one's probability is below min_p; a little low for safety."""
    with np.errstate(divide="ignore"):
        floors = peaks + np.maximum(filters.temperature, _COLDEST) * np.log(filters.min_p)
    # Rounding to float32 must not lose a token; `_cut` decides exactly.
    lowered: Floats = np.nextafter(floors.astype(np.float32), np.float32(-np.inf))
    return lowered


def _draw_nucleus(tiles: TiledLogits, rows: Ints, filters: Filters, chances: Doubles, totals: Doubles) -> Ints:
    """Rows with top_p alone: look at a longer head until it holds the mass asked for. totals [n]: mass of the whole row."""
    tokens = np.empty(len(rows), dtype=np.int64)
    left = np.arange(len(rows))
    # A head that takes more than half of the tiles would be sorted whole; `draw_wide` sorts less.
    for count in (count for count in _HEADS if 2 * count <= tiles.maxima.shape[1]):
        floors = tiles.floors(rows[left], np.full(len(left), count))
        longer = []
        for part in tiles.parts(rows[left], floors):
            here = left[part]
            ranked = tiles.rank(rows[here], floors[part])
            cut = _cut(ranked, filters[here], totals[here])
            tokens[here] = cut.pick(ranked, chances[here])
            longer.append(here[~cut.complete])
        left = np.concatenate([left[:0], *longer])
    for at in left.tolist():
        heat = max(float(filters.temperature[at]), _COLDEST)
        tokens[at] = draw_wide(tiles.row(int(rows[at])), heat, float(filters.top_p[at]), float(chances[at]))
    return tokens


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where the filters end each row's prefix."""

    sums: Doubles
    """[n, width]: cumulative weights in rank order, in units of the likeliest token's"""

    kept: Ints
    """[n]: how many tokens are kept, at least 1"""

    complete: NDArray[np.bool_]
    """[n]: whether the head held the mass that top_p asked for"""

    def pick(self, ranked: Ranked, chances: Doubles) -> Ints:
        """[n]: the first kept token whose cumulative weight exceeds the chance's share of the kept mass."""
        row = np.arange(len(self.kept))
        mass = self.sums[row, self.kept - 1]
        column = np.count_nonzero(self.sums <= (chances * mass)[:, None], axis=1)
        picked: Ints = ranked.ids[row, column]
        return picked


def _cut(ranked: Ranked, filters: Filters, totals: Doubles | None) -> _Cut:
    """Apply top_k, min_p and top_p. totals: mass that top_p refers to; None: what top_k and min_p leave."""
    weights = _weights(ranked.values, ranked.values[:, :1], filters.temperature[:, None])
    weights *= weights >= filters.min_p[:, None]
    limited = filters.top_k > 0
    weights *= ~limited[:, None] | (np.arange(weights.shape[1]) < filters.top_k[:, None])
    # A cumulative sum adds in rank order; `sum` would add in an order that depends on the padding.
    sums = np.cumsum(weights, axis=1)
    targets = filters.top_p * (sums[:, -1] if totals is None else totals)
    kept = 1 + np.count_nonzero(sums[:, :-1] < targets[:, None], axis=1)
    return _Cut(sums, kept, sums[:, -1] >= targets)


def _weights(values: Floats, peaks: Floats, temperature: Doubles) -> Doubles:
    """Probabilities after temperature, in units of the likeliest token's."""
    weights: Doubles = np.exp((values.astype(np.float64) - peaks) / np.maximum(temperature, _COLDEST))
    return weights


def _draw_plain(tiles: TiledLogits, rows: Ints, filters: Filters, chances: Doubles, shares: Doubles) -> Ints:
    """Rows without filters: find the tile by its mass, then the token in it."""
    tile, rest = _invert(shares, chances)
    values = tiles.read(rows, tile, beyond=-np.inf)
    inside, _ = _invert(_weights(values, tiles.peaks[rows][:, None], filters.temperature[:, None]), rest)
    return tile * TILE + inside


def _invert(weights: Doubles, chances: Doubles) -> tuple[Ints, Doubles]:
    """[n]: the columns in which the chances fall, and how far inside them, in [0, 1). A weightless column is never hit."""
    row = np.arange(len(weights))
    sums = np.cumsum(weights, axis=1)
    targets = chances * sums[:, -1]
    column = np.count_nonzero(sums <= targets[:, None], axis=1)
    weight = weights[row, column]
    rest = (targets - (sums[row, column] - weight)) / weight
    return column, np.clip(rest, 0.0, np.nextafter(1.0, 0.0))
