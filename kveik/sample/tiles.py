"""Logits seen as tiles of neighbouring token ids: finds the likeliest tokens without sorting a vocabulary.

    row     [ 0 … 127 | 128 … 255 | … | … real-1 ]        values, one per token id that exists
    maxima  [    a    |     b     | … |    z     ]        the largest value of each tile

One quick pass gives every tile's maximum. The c-th largest of those maxima is a value that at least c tokens reach, and every
token that reaches it lies in a tile whose maximum does. So the c likeliest tokens are found by reading about c tiles, exactly.

The order of tokens is total: larger values first, equal values by lower id. Filters keep a prefix of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

TILE = 128

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_PART_ELEMENTS = 1 << 20
"""Values that one ranking looks at together; bounds its memory at about 30 MB."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """The head of each row's order; the rest of a short row is padded with -inf."""

    ids: Ints
    """[rows, width]"""

    values: Floats
    """[rows, width], descending"""


@dataclass(frozen=True, slots=True)
class TiledLogits:
    """Logits of a step. Ids from `real` on are padding and invisible here. Made after the last change to the logits."""

    logits: Tensor
    """float32 [rows, vocab], contiguous"""

    flat: Floats
    """The same memory, [rows * vocab]"""

    real: int
    maxima: Floats
    """[rows, tiles]; NaN where the tile holds one"""

    peaks: Floats
    """[rows]: each row's largest value; not finite where the row has NaN, +Inf or nothing but -Inf"""

    @classmethod
    def over(cls, logits: Tensor, real: int) -> TiledLogits:
        """Reads the logits once. logits: float32 [rows, vocab], contiguous, on the CPU."""
        maxima = per_tile(logits[:, :real], torch.amax).numpy()
        return cls(logits, logits.numpy().reshape(-1), real, maxima, maxima.max(axis=1))

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    def best(self, rows: Ints) -> Ints:
        """[n]: the first token in the order of each row."""
        tiles: Ints = self.maxima[rows].argmax(axis=1)
        inside: Ints = self.read(rows, tiles, beyond=-np.inf).argmax(axis=1)
        return tiles * TILE + inside

    def row(self, row: int) -> Floats:
        """[real]: one row's values, in place."""
        start = row * self.vocab
        return self.flat[start : start + self.real]

    def at(self, rows: Ints, ids: Ints) -> Floats:
        """The values of single tokens; rows and ids are broadcast."""
        values: Floats = self.flat[rows * self.vocab + ids]
        return values

    def read(self, rows: Ints, tiles: Ints, *, beyond: float) -> Floats:
        """[n, TILE]: the values of whole tiles; `beyond` stands for ids that do not exist."""
        whole, rest = divmod(self.real, TILE)
        values = np.empty((len(rows), TILE), dtype=np.float32)
        if whole:
            shape, strides = (len(self.logits), whole, TILE), (4 * self.vocab, 4 * TILE, 4)
            values = as_strided(self.flat, shape, strides, writeable=False)[rows, np.minimum(tiles, whole - 1)]
        if rest:
            short = np.flatnonzero(tiles == whole)
            values[short, :rest] = self.at(rows[short, None], whole * TILE + np.arange(rest))
            values[short, rest:] = beyond
        return values

    def floors(self, rows: Ints, counts: Ints) -> Floats:
        """[n]: a value that at least counts[i] tokens of the row reach; -inf where there are too few tiles to tell."""
        tiles = self.maxima.shape[1]
        floors = np.full(len(rows), -np.inf, dtype=np.float32)
        # With more than half of the tiles to read, reading them all costs the same.
        few = np.flatnonzero(counts <= tiles // 2)
        if len(few):
            places = tiles - counts[few]
            ordered = np.partition(self.maxima[rows[few]], np.unique(places), axis=1)
            floors[few] = ordered[np.arange(len(few)), places]
        return floors

    def parts(self, rows: Ints, floors: Floats) -> list[Ints]:
        """Positions in `rows`, in groups that are cheap to rank together: of like size and bounded in all."""
        sizes = np.count_nonzero(self.maxima[rows] >= floors[:, None], axis=1) * TILE
        groups: list[Ints] = []
        order = np.argsort(sizes, kind="stable")
        start = 0
        for stop in range(1, len(order) + 1):
            if stop == len(order) or (stop + 1 - start) * sizes[order[stop]] > _PART_ELEMENTS:
                groups.append(order[start:stop])
                start = stop
        return groups

    def rank(self, rows: Ints, floors: Floats) -> Ranked:
        """Every token whose value reaches its row's floor (which the row's peak must do), in order."""
        # picked: (row, tile) pairs that hold such tokens; found: the tokens, by row and then id.
        picked_row, picked_tile = np.nonzero(self.maxima[rows] >= floors[:, None])
        values = self.read(rows[picked_row], picked_tile, beyond=np.nan)
        found, offset = np.nonzero(values >= floors[picked_row, None])
        row = picked_row[found]
        counts = np.bincount(row, minlength=len(rows))
        column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        keys = np.full((len(rows), counts.max()), _LAST)
        keys[row, column] = _keys(values[found, offset], picked_tile[found] * TILE + offset)
        keys.sort(axis=1)
        return Ranked(np.minimum(keys & _ID_MASK, self.real - 1), _values(keys))

    def rank_all(self, rows: Ints, width: int) -> Ranked:
        """The first `width` tokens of each row, or all that exist."""
        width = min(width, self.real)
        ids = np.empty((len(rows), width), dtype=np.int64)
        values = np.empty((len(rows), width), dtype=np.float32)
        if width:
            floors = self.floors(rows, np.full(len(rows), width))
            for part in self.parts(rows, floors):
                ranked = self.rank(rows[part], floors[part])
                ids[part], values[part] = ranked.ids[:, :width], ranked.values[:, :width]
        return Ranked(ids, values)


def per_tile(values: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """[rows, n] -> [rows, tiles]: each tile reduced on its own; the last may be short."""
    whole = values.shape[1] // TILE * TILE
    parts = []
    if whole:
        parts.append(reduce(values.as_strided((len(values), whole // TILE, TILE), (values.stride(0), TILE, 1)), -1))
    if whole < values.shape[1]:
        parts.append(reduce(values[:, whole:], -1)[:, None])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def in_order(values: Floats, ids: Ints) -> Ints:
    """[n]: the same ids, best value first."""
    return np.sort(_keys(values, ids)) & _ID_MASK


def _keys(values: Floats, ids: Ints) -> Ints:
    """One integer per token that sorts like the order: larger value first, then lower id.

    A float's bits, with the lower 31 flipped where the sign is set, compare as the floats do; ~ turns the order round.
    """
    # Adding zero makes -0.0 and 0.0, which are equal, the same bits.
    bits = (values + np.float32(0)).view(np.int32)
    return (~_flip(bits)).astype(np.int64) << _ID_BITS | ids


def _values(keys: Ints) -> Floats:
    return _flip(~(keys >> _ID_BITS).astype(np.int32)).view(np.float32)


def _flip(bits: NDArray[np.int32]) -> NDArray[np.int32]:
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


_LAST = _keys(np.array([-np.inf], dtype=np.float32), np.array([_ID_MASK]))[0]
"""Sorts behind every token."""
