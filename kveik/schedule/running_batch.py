"""The running decodes in flat arrays that are updated as tokens come, and never rebuilt. Knows no blocks.

    place        0     1     2     3
    sequences  [ a  |  b  |  –  |  d  ]        –: a gap; b and d keep their places until the next plan closes it
    computed   [ 40 | 17  | 99  | 61  ]        numbers in a gap mean nothing
    tokens     [ 12 |  5  |  0  | 30  ]        the pending token

Whoever leaves makes a gap, and whoever is last moves into it: a step costs a few operations on arrays, and a change one move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kveik.request.sequence import Sequence
from kveik.schedule.plan import Decodes

_NEVER = np.iinfo(np.int64).max


class RunningBatch:
    """Sequences with one pending token each. As a mapping: their ids, in order of place."""

    def __init__(self, rows: int) -> None:
        self.sequences: list[Sequence | None] = []
        """By place; None in a gap."""

        self._places: dict[int, int] = {}
        self._gaps: list[int] = []
        self._moved: list[int] = []
        self._ids: tuple[int, ...] | None = ()
        self._stops: dict[frozenset[int], int] = {}
        self._any_stop: frozenset[int] = frozenset()
        self._computed = np.zeros(rows, dtype=np.int64)
        self._capacity = np.zeros(rows, dtype=np.int64)
        self._tokens = np.zeros(rows, dtype=np.int64)
        self._ends = np.zeros(rows, dtype=np.int64)
        self._lasts = np.zeros(rows, dtype=np.float64)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._places))

    def values(self) -> list[Sequence]:
        """Everybody, in order of place."""
        return [sequence for sequence in self.sequences if sequence is not None]

    # Coming and going.

    def add(self, sequence: Sequence) -> None:
        """It computes one token per step from now on."""
        place = len(self.sequences)
        self.sequences.append(sequence)
        self._places[sequence.id] = place
        self._moved.append(place)
        self._ids = None
        self._computed[place] = sequence.computed
        self._capacity[place] = sequence.capacity
        self._tokens[place] = sequence.tokens[-1]
        self._ends[place] = sequence.end_length
        assert sequence.last_token is not None, "a decode has a token already"
        self._lasts[place] = sequence.last_token
        self._count_stops(sequence.stop_ids, 1)

    def pop(self, sequence_id: int) -> Sequence:
        """It leaves; its place is a gap until `close_gaps`."""
        place = self._places.pop(sequence_id)
        sequence = self.sequences[place]
        assert sequence is not None
        self.sequences[place] = None
        self._gaps.append(place)
        self._ids = None
        # Nothing becomes due in a gap.
        self._capacity[place] = _NEVER
        self._count_stops(sequence.stop_ids, -1)
        return sequence

    def close_gaps(self) -> list[int]:
        """Move the last ones into the gaps. Returns the places, ascending, that somebody came into since the last time."""
        for gap in sorted(self._gaps, reverse=True):
            last = self.sequences.pop()
            if gap < len(self.sequences):
                assert last is not None
                self._move(last, len(self.sequences), gap)
        moved = sorted({place for place in self._moved if place < len(self.sequences)})
        self._gaps.clear()
        self._moved.clear()
        return moved

    def _move(self, sequence: Sequence, source: int, target: int) -> None:
        self.sequences[target] = sequence
        self._places[sequence.id] = target
        self._moved.append(target)
        for array in (self._computed, self._capacity, self._tokens, self._ends, self._lasts):
            array[target] = array[source]

    def _count_stops(self, stops: frozenset[int], change: int) -> None:
        """Nearly everybody has the same stop tokens: what is in anybody's is looked at more closely."""
        count = self._stops.get(stops, 0) + change
        if count:
            self._stops[stops] = count
        else:
            del self._stops[stops]
        if count == 0 or (count == 1 and change == 1):
            self._any_stop = frozenset().union(*self._stops)

    # The step.

    def due(self) -> list[int]:
        """Places of those that need a block for their pending token."""
        count = len(self.sequences)
        return np.flatnonzero(self._computed[:count] >= self._capacity[:count]).tolist()

    def give_room(self, place: int, capacity: int) -> None:
        """Its blocks now have room for so many tokens."""
        self._capacity[place] = capacity

    def decodes(self) -> Decodes:
        """What everybody computes next. There are no gaps."""
        count = len(self.sequences)
        if self._ids is None:
            self._ids = tuple([sequence.id for sequence in self.sequences if sequence is not None])
        return Decodes(self._ids, self._computed[:count].copy(), self._tokens[:count].copy())

    def advance(self, tokens: NDArray[np.int64], failed: frozenset[int], now: float) -> NDArray[np.float64]:
        """Those in the first places have computed their pending tokens, and get the next ones; who failed gets none.

        tokens [n], one for each place from the first on; failed: places. Returns [at most n]: seconds since the token before,
        of all that got one.
        """
        count = len(tokens)
        skipped = failed.union(self._gaps)
        if skipped:
            self._advance_some(tokens, skipped, now)
        else:
            # There is no gap; those behind the first places have come in this very step.
            for sequence, token in zip(cast(list[Sequence], self.sequences), tokens.tolist(), strict=False):
                sequence.tokens.append(token)
                sequence.computed += 1
                sequence.last_token = now
        self._computed[:count] += 1
        self._tokens[:count] = tokens
        seconds = now - self._lasts[:count]
        self._lasts[:count] = now
        return np.delete(seconds, [place for place in skipped if place < count]) if skipped else seconds

    def _advance_some(self, tokens: NDArray[np.int64], skipped: Collection[int], now: float) -> None:
        for place, token in enumerate(tokens.tolist()):
            sequence = self.sequences[place]
            if sequence is not None:
                sequence.computed += 1
                if place not in skipped:
                    sequence.tokens.append(token)
                    sequence.last_token = now

    def whole(self, count: int, block_size: int) -> list[int]:
        """Which of the first places have just filled a block; a gap may be among them."""
        return np.flatnonzero(self._computed[:count] % block_size == 0).tolist()

    def ending(self, tokens: NDArray[np.int64]) -> list[int]:
        """Places whose new token may be the last: the length is reached, or it is anybody's stop token; or a gap."""
        count = len(tokens)
        ending = self._computed[:count] + 1 >= self._ends[:count]
        if not self._any_stop.isdisjoint(tokens.tolist()):
            ending |= np.isin(tokens, list(self._any_stop))
        return np.flatnonzero(ending).tolist() if ending.any() else []

    def check(self) -> None:
        """The arrays say what the sequences say. Raises AssertionError."""
        assert len(self.sequences) == len(self._places) + len(self._gaps), "a place is neither taken nor a gap"
        for sequence_id, place in self._places.items():
            sequence = self.sequences[place]
            assert sequence is not None
            assert sequence.id == sequence_id
            assert sequence.decoding, "a sequence among the decodes is behind"
            assert self._computed[place] == sequence.computed, "a computed count differs from its sequence's"
            assert self._capacity[place] == sequence.capacity, "a capacity differs from its sequence's"
            assert self._tokens[place] == sequence.tokens[-1], "a pending token differs from its sequence's"
            assert self._ends[place] == sequence.end_length, "an end differs from its sequence's"
            assert self._lasts[place] == sequence.last_token, "a time differs from its sequence's"
            assert sequence.stop_ids <= self._any_stop, "a stop token is not looked for"
        assert sum(self._stops.values()) == len(self._places), "stop tokens are miscounted"
