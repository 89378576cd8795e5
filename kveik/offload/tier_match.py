"""Match below the pool: sources of one chain's blocks, places where loading them may stop, and the bytes of each.

block            0    1    2    3    4    5         start = 2: the pool's hit
full group       p    p    d    d    r    –         reach = 5: no tier has block 5
windowed group   –    p    –    –    d    –         window of 1 block: a cut at 5 needs block 4 alone, one at 3 or 4 has none
cuts                       2              5
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kveik.cache.eviction.policy import Key
from kveik.cache.layout import LayerGroup
from kveik.offload.cost import Prospect
from kveik.offload.tier import Tier
from kveik.offload.transfer import RecordLoad

InPool = Callable[[int, Key], bool]
"""True where the pool has a group's full block with this content."""

_POOL, _MISSING = -1, -2


@dataclass(frozen=True, slots=True, eq=False)
class Below:
    """Loadable blocks of one chain. Block numbers count from the sequence's first."""

    keys: Sequence[Key]
    first: int
    """Block of the first column of `sources`."""

    sources: NDArray[np.int64]
    """[groups, blocks]: number of the tier that has it first; -1: the pool; -2: none."""

    cuts: NDArray[np.int64]
    """Whole blocks known where loading stops there; the first is the pool's own hit."""

    starts: NDArray[np.int64]
    """[groups, cuts]: the first block that a query behind the cut reads."""

    prospect: Prospect

    def __bool__(self) -> bool:
        """True where anything could be loaded."""
        return len(self.cuts) > 1

    def records(self, cut: int) -> tuple[RecordLoad, ...]:
        """Returns the loads that a cut needs, beginnings first."""
        wanted = []
        for group, sources in enumerate(self.sources.tolist()):
            for place in range(int(self.starts[group, cut]), int(self.cuts[cut])):
                tier = sources[place - self.first] if place >= self.first else _POOL
                if tier >= 0:
                    wanted.append(RecordLoad(self.keys[place], group, place, tier))
        wanted.sort(key=lambda record: record.place)
        return tuple(wanted)


def find_below(
    groups: Sequence[LayerGroup],
    tiers: Sequence[Tier],
    keys: Sequence[Key],
    hit: tuple[int, int],
    block_size: int,
    in_pool: InPool,
) -> Below:
    """`keys`: of the whole blocks that could be of use. `hit`: tokens that the pool has, and whole blocks among them.

    Time O(tiers · new blocks), where new are those behind the pool's hit, and those of a window before it.
    """
    tokens, start = hit
    if len(groups) == 1 and groups[0].window is None:
        return _find_in_one(tiers, keys, hit, block_size, in_pool)
    windowed = [group.first_needed(tokens, block_size) for group in groups if group.window is not None]
    first = min([start, *windowed])
    sources = _sources(groups, tiers, keys, first, start, in_pool)
    if sources is None:
        return _nothing(len(groups), len(tiers), keys, hit)
    cuts = np.arange(start, first + sources.shape[1] + 1, dtype=np.int64)
    starts = np.stack([group.first_needed(cuts * block_size, block_size) for group in groups])
    if windowed:
        valid = _valid(sources, first, cuts, starts)
        # The pool's own hit, which may end within a block, needs nothing. A cut that ends before it is no gain.
        valid &= cuts * block_size > tokens
        valid[0] = True
        cuts, starts = cuts[valid], starts[:, valid]
    known = np.maximum(cuts * block_size, tokens)
    return Below(keys, first, sources, cuts, starts, Prospect(known, _sizes(tiers, sources, first, cuts, starts)))


def _find_in_one(tiers: Sequence[Tier], keys: Sequence[Key], hit: tuple[int, int], block_size: int, in_pool: InPool) -> Below:
    """The same for one group without a window, which is most frequent: up to the first gap."""
    (tokens, start), row = hit, list[int]()
    for place in range(start, len(keys)):
        key = keys[place]
        source = _POOL if in_pool(0, key) else next((number for number, tier in enumerate(tiers) if tier.stored(key)), _MISSING)
        if source == _MISSING:
            break
        row.append(source)
    if not row or max(row) < 0:
        return _nothing(1, len(tiers), keys, hit)
    sources, cuts = np.array([row]), np.arange(start, start + len(row) + 1)
    sizes = np.zeros((len(tiers), len(cuts)), dtype=np.int64)
    for number, tier in enumerate(tiers):
        sizes[number, 1:] = (sources[0] == number).cumsum() * tier.spec.record_bytes[0]
    known = np.maximum(cuts * block_size, tokens)
    return Below(keys, start, sources, cuts, np.zeros((1, len(cuts)), dtype=np.int64), Prospect(known, sizes))


def _nothing(groups: int, tiers: int, keys: Sequence[Key], hit: tuple[int, int]) -> Below:
    """A match of nothing below, the most frequent case: the pool's own hit is all there is."""
    tokens, start = hit
    none = np.empty((groups, 0), dtype=np.int64)
    cuts, starts = np.array([start]), np.array([[start]] * groups)
    return Below(keys, start, none, cuts, starts, Prospect(np.array([tokens]), np.zeros((tiers, 1), dtype=np.int64)))


def _valid(sources: NDArray[np.int64], first: int, cuts: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Cuts behind which no query reads what is missing."""
    valid = np.ones(len(cuts), dtype=np.bool_)
    for row, begins in zip(sources, starts, strict=True):
        missing = _counts(row == _MISSING)
        valid &= missing[cuts - first] == missing[np.maximum(begins, first) - first]
    return valid


def _sources(
    groups: Sequence[LayerGroup], tiers: Sequence[Tier], keys: Sequence[Key], first: int, start: int, in_pool: InPool
) -> NDArray[np.int64] | None:
    """Sources from block `first` on, up to where a group without a window has a gap behind the pool's hit. Where all
    have windows, a hit may well begin behind a gap. None: no tier has anything of it.
    """
    columns: list[list[int]] = []
    below = False
    needed = [number for number, group in enumerate(groups) if group.window is None]
    for place in range(first, len(keys)):
        key = keys[place]
        column = [_POOL if in_pool(group, key) else _MISSING for group in range(len(groups))]
        if _MISSING in column:
            _look_below(column, [tier.stored(key) for tier in tiers])
            if place >= start and any(column[group] == _MISSING for group in needed):
                break
            below = below or max(column) >= 0
        columns.append(column)
    return np.array(columns, dtype=np.int64).reshape(len(columns), len(groups)).T if below else None


def _look_below(column: list[int], stored: Sequence[int]) -> None:
    """Fill in the first tier that has what the pool lacks. `stored`: per tier, the groups that it has, as bits."""
    for group, source in enumerate(column):
        if source == _MISSING:
            column[group] = next((tier for tier, groups in enumerate(stored) if groups >> group & 1), _MISSING)


def _counts(marked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number of marked ones before each place, and before the end."""
    counts = np.zeros(len(marked) + 1, dtype=np.int64)
    marked.cumsum(out=counts[1:])
    return counts


def _sizes(
    tiers: Sequence[Tier], sources: NDArray[np.int64], first: int, cuts: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Bytes to load from each tier for each cut, [tiers, cuts]."""
    sizes = np.zeros((len(tiers), len(cuts)), dtype=np.int64)
    for number, tier in enumerate(tiers):
        for group, (row, begins) in enumerate(zip(sources, starts, strict=True)):
            counts = _counts(row == number)
            loaded = counts[cuts - first] - counts[np.maximum(begins, first) - first]
            sizes[number] += loaded * tier.spec.record_bytes[group]
    sizes[:, 0] = 0
    return sizes
