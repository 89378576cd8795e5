"""Passes over whole rows: the exponentials of every token, summed tile by tile.

A few rows at a time, so that they stay in the outer cache between the operations. What comes out for a row does not
depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveik.sample.tiles import Ints, TiledLogits, per_tile

_ELEMENTS = 1 << 21
"""Numbers in one workspace: 8 MB. Fewer would stay nearer, but every operation makes all threads wait for each other."""


def shares_per_tile(tiles: TiledLogits, rows: Ints, temperature: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n, tiles]: every tile's probability after temperature, in units of the likeliest token's.

    rows [n], ascending, with finite peaks; temperature [n] > 0. Good to about 6e-6: torch's softmax trades digits for speed.
    """
    shares = np.empty((len(rows), tiles.maxima.shape[1]), dtype=np.float64)
    for part, share, best in _softmax(tiles, rows, temperature):
        shares[part] = (per_tile(share, torch.sum) / best).numpy()
    return shares


def masses(tiles: TiledLogits, rows: Ints, temperature: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n]: the same for whole rows: 1 over the likeliest token's probability. Half as much to read as tile by tile."""
    found = np.empty(len(rows), dtype=np.float64)
    for part, _, best in _softmax(tiles, rows, temperature):
        found[part] = 1.0 / best[:, 0].numpy().astype(np.float64)
    return found


def _softmax(tiles: TiledLogits, rows: Ints, temperature: NDArray[np.float64]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """A few rows at a time: which ones, their probabilities [few, real], and those of the likeliest tokens [few, 1]."""
    likeliest = torch.from_numpy(tiles.best(rows))[:, None]
    heat = torch.from_numpy(temperature.astype(np.float32))[:, None]
    out = torch.empty(min(_step(tiles), len(rows)), tiles.real)
    for part, shifted in _shifted(tiles, rows):
        if not bool((heat[part] == 1).all()):
            shifted.div_(heat[part])
        # softmax reads each row on one thread in one order; its own pass for the maximum finds zero.
        share = torch.softmax(shifted, dim=-1, out=out[: len(shifted)])
        yield part, share, share.gather(1, likeliest[part])


def log_norms(tiles: TiledLogits, rows: Ints) -> NDArray[np.float64]:
    """[n]: log of the sum of the exponentials of each row, to about 1e-6; not finite where the row's peak is not.

    rows [n], ascending.
    """
    norms = np.empty(len(rows), dtype=np.float64)
    for part, shifted in _shifted(tiles, rows):
        norms[part] = np.log(per_tile(shifted.exp_(), torch.sum).numpy().sum(axis=1, dtype=np.float64))
    return norms + tiles.peaks[rows]


def _shifted(tiles: TiledLogits, rows: Ints) -> Iterator[tuple[slice, Tensor]]:
    """A few rows at a time, less their peaks: which ones, and float32 [few, real], overwritten by the next."""
    step = _step(tiles)
    peaks = torch.from_numpy(tiles.peaks[rows])[:, None]
    workspace = torch.empty(min(step, len(rows)), tiles.real)
    for start in range(0, len(rows), step):
        part = slice(start, min(start + step, len(rows)))
        shifted = workspace[: part.stop - start]
        yield part, torch.sub(_take(tiles, rows[part]), peaks[part], out=shifted)


def _step(tiles: TiledLogits) -> int:
    # Two at least: softmax gives each row to one thread.
    return max(2, _ELEMENTS // tiles.real)


def _take(tiles: TiledLogits, rows: Ints) -> Tensor:
    """Some rows without the padding; a view where they lie together."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return tiles.logits[first : last + 1, : tiles.real]
    return tiles.logits[torch.from_numpy(rows), : tiles.real]
