"""Running batch: columns of running sequences, updated as tokens come and never rebuilt. Independent of blocks.

    row          0     1     2     3
    sequences  [ a  |  b  |  –  |  d  ]        –: a gap; b and d keep their rows until the next plan closes it
    computed   [ 40 | 17  | 99  | 61  ]        numbers in a gap mean nothing
    pending    [ 12 |  5  |  0  | 30  ]        the newest token

A sequence's row is its row in the block tables too. Progress is kept here alone: `Sequence.computed` is a view of the column.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kveik.request.sampling_rows import RowDetail, SamplingRows, TokenHistory, needs_detail, seed_words
from kveik.request.sequence import Sequence

Ints = NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max


class RunningBatch:
    """Running sequences, by row."""

    def __init__(self, rows: int) -> None:
        self.sequences: list[Sequence | None] = []
        """Sequences by row; None in a gap."""

        self.computed: Ints = np.zeros(rows, dtype=np.int64)
        """[rows]: tokens whose keys and values are in the cache"""

        self.lengths: Ints = np.zeros(rows, dtype=np.int64)
        """[rows]: length in tokens"""

        self.capacity: Ints = np.zeros(rows, dtype=np.int64)
        """[rows]: positions that the sequence's blocks hold"""

        self.changes = 0
        """Incremented by every addition, removal and exchange: values derived from the rows are valid until then."""

        self._pending: Ints = np.zeros(rows, dtype=np.int64)
        self._prompts: Ints = np.zeros(rows, dtype=np.int64)
        self._ends: Ints = np.zeros(rows, dtype=np.int64)
        self._admissions: Ints = np.zeros(rows, dtype=np.int64)
        self._lasts = np.full(rows, np.nan)
        self._filters = np.zeros((rows, 3))
        self._top_k: Ints = np.zeros(rows, dtype=np.int64)
        self._choices: Ints = np.zeros(rows, dtype=np.int64)
        self._seeds = np.zeros((rows, 3), dtype=np.uint64)
        self._columns = (
            self.computed, self.lengths, self.capacity, self._pending, self._prompts, self._ends, self._admissions,
            self._lasts, self._filters, self._top_k, self._choices, self._seeds,
        )  # fmt: skip
        self._gaps: set[int] = set()
        self._stops: dict[frozenset[int], int] = {}
        self._any_stop: frozenset[int] = frozenset()
        self._known: tuple[int, int] = (-1, 0)
        self._sampling: SamplingRows | None = None
        self._ids_known: tuple[int, int] = (-1, 0)
        self._ids: tuple[tuple[int, ...], tuple[str, ...]] = ((), ())
        self._detail_rows: tuple[tuple[int, int], list[int]] = ((-1, 0), [])

    def __len__(self) -> int:
        return len(self.sequences) - len(self._gaps)

    def __iter__(self) -> Iterator[Sequence]:
        """Sequences in order of row."""
        return (sequence for sequence in self.sequences if sequence is not None)

    # Addition and removal.

    def add(self, sequence: Sequence, row: int, computed: int) -> None:
        """The sequence runs in this row, which is free."""
        while len(self.sequences) <= row:
            self._gaps.add(len(self.sequences))
            self.sequences.append(None)
        self._gaps.remove(row)
        self.sequences[row] = sequence
        sequence.batch, sequence.row = self, row
        sampling = sequence.sampling
        self.computed[row], self.lengths[row], self.capacity[row] = computed, len(sequence.tokens), 0
        self._pending[row] = sequence.tokens[-1]
        self._prompts[row], self._ends[row] = sequence.prompt_length, sequence.end_length
        self._admissions[row] = sequence.admission
        self._lasts[row] = np.nan if sequence.last_token is None else sequence.last_token
        self._filters[row] = sampling.temperature, sampling.top_p, sampling.min_p
        self._top_k[row], self._choices[row] = sampling.top_k, sequence.choice
        self._seeds[row] = seed_words(sequence.seed)
        self._count_stops(sequence.stop_ids, 1)
        self.changes += 1

    def remove(self, sequence: Sequence) -> None:
        """The sequence runs no more; its row is a gap until rows are arranged anew."""
        row = sequence.row
        assert row is not None, f"sequence {sequence.id} does not run"
        last = float(self._lasts[row])
        sequence.last_token = None if np.isnan(last) else last
        sequence.reached = max(sequence.reached, min(int(self.computed[row]), sequence.prompt_length))
        sequence.batch = sequence.row = None
        self.sequences[row] = None
        self._gaps.add(row)
        # A gap never needs a block.
        self.capacity[row] = _NEVER
        self._count_stops(sequence.stop_ids, -1)
        self.changes += 1

    def _count_stops(self, stops: frozenset[int], change: int) -> None:
        """Count stop tokens of all sequences: most have the same, so a token in any of the sets is checked more closely."""
        count = self._stops.get(stops, 0) + change
        if count:
            self._stops[stops] = count
        else:
            del self._stops[stops]
        if count == 0 or (count == 1 and change == 1):
            self._any_stop = frozenset().union(*self._stops)

    def arrange(self, counts: Ints) -> list[tuple[int, int]]:
        """Rows with one token first, then those with several, then those without any; gaps last. Returns the exchanges of rows
        in order, for the block tables. counts [rows]: tokens in the step; they are exchanged in the same way.
        """
        size = len(self.sequences)
        kinds = np.where(counts[:size] == 1, 0, np.where(counts[:size] > 1, 1, 2))
        kinds[list(self._gaps)] = 3
        wanted = np.repeat(np.arange(4), np.bincount(kinds, minlength=4))
        exchanges = []
        for row in np.flatnonzero(kinds != wanted).tolist():
            if kinds[row] == wanted[row]:
                continue  # An earlier exchange has put this row in its place.
            # Best is a place of its own kind, so that one exchange serves both rows; else the last one.
            others = row + 1 + np.flatnonzero((kinds[row + 1 :] == wanted[row]) & (wanted[row + 1 :] != wanted[row]))
            fitting = others[wanted[others] == kinds[row]]
            other = int((fitting if len(fitting) else others)[-1])
            self._exchange(row, other)
            for array in (kinds, counts):
                array[[row, other]] = array[[other, row]]
            exchanges.append((row, other))
        while self.sequences and self.sequences[-1] is None:
            self.sequences.pop()
        self._gaps.clear()
        if exchanges:
            self.changes += 1
        return exchanges

    def _exchange(self, one: int, other: int) -> None:
        sequences = self.sequences
        sequences[one], sequences[other] = sequences[other], sequences[one]
        for row in (one, other):
            if (sequence := sequences[row]) is not None:
                sequence.row = row
        for column in self._columns:
            column[[one, other]] = column[[other, one]]

    # Queries.

    @property
    def gapless(self) -> bool:
        """True if every row has a sequence."""
        return not self._gaps

    def behind(self) -> list[Sequence]:
        """Sequences with more to compute than their newest output token, in order of admission."""
        size = len(self.sequences)
        outputs = self.lengths[:size] - self._prompts[:size]
        rows = np.flatnonzero((self.lengths[:size] - self.computed[:size] > 1) | (outputs == 0))
        if not len(rows):
            return []
        rows = rows[np.argsort(self._admissions[rows], kind="stable")]
        return [sequence for row in rows.tolist() if (sequence := self.sequences[row]) is not None]

    def due(self) -> list[int]:
        """Rows of decodes that need a block for their newest token."""
        size = len(self.sequences)
        computed, lengths = self.computed[:size], self.lengths[:size]
        due = (computed >= self.capacity[:size]) & (lengths - computed == 1) & (lengths > self._prompts[:size])
        return np.flatnonzero(due).tolist()

    def single(self) -> NDArray[np.bool_]:
        """[rows in use]: True where a row's only pending token is its newest output token."""
        size = len(self.sequences)
        lengths = self.lengths[:size]
        single: NDArray[np.bool_] = (lengths - self.computed[:size] == 1) & (lengths > self._prompts[:size])
        single[list(self._gaps)] = False
        return single

    def sequence_ids(self, count: int) -> tuple[int, ...]:
        """Sequence ids of the first `count` rows; the same tuple as long as the rows are the same."""
        return self._identify(count)[0]

    def request_ids(self, count: int) -> tuple[str, ...]:
        """Request ids of the first `count` rows; the same tuple as long as the rows are the same."""
        return self._identify(count)[1]

    def _identify(self, count: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        if self._ids_known != (self.changes, count):
            rows = [one for one in self.sequences[:count] if one is not None]
            self._ids = tuple([one.id for one in rows]), tuple([one.request.id for one in rows])
            self._ids_known = (self.changes, count)
        return self._ids

    def newest(self, count: int) -> Ints:
        """[count]: the newest tokens of the first rows; a copy."""
        return self._pending[:count].copy()

    def sampling(self, count: int) -> SamplingRows:
        """Sampling parameters of the first `count` rows. The arrays that do not change are shared from step to step."""
        outputs = self.lengths[:count] - self._prompts[:count]
        if self._sampling is None or self._known != (self.changes, count):
            self._known = (self.changes, count)
            temperature, top_p, min_p = self._filters[:count].T.copy()
            self._sampling = SamplingRows(
                temperature, self._top_k[:count].copy(), top_p, min_p, self._seeds[:count].copy(),
                self._choices[:count].copy(), outputs,
            )  # fmt: skip
        kept = self._sampling
        return SamplingRows(
            kept.temperature, kept.top_k, kept.top_p, kept.min_p, kept.seeds, kept.choices, outputs, self._details(count)
        )

    def _details(self, count: int) -> dict[int, RowDetail]:
        found = {}
        for row in self._detailed(count):
            sequence = self.sequences[row]
            assert sequence is not None
            history = TokenHistory(sequence.tokens, len(sequence.tokens), sequence.prompt_length)
            found[row] = RowDetail(sequence.id, sequence.sampling, history)
        return found

    def _detailed(self, count: int) -> list[int]:
        if self._detail_rows[0] != (self.changes, count):
            rows = [row for row, one in enumerate(self.sequences[:count]) if one is not None and needs_detail(one.sampling)]
            self._detail_rows = ((self.changes, count), rows)
        return self._detail_rows[1]

    # The step.

    def until_end(self, tokens: Ints, offsets: Ints) -> tuple[Ints, Ints]:
        """Tokens and offsets without what follows a sequence's last token."""
        if len(tokens) < len(offsets) and not np.any(offsets[1:] - offsets[:-1] > 1):
            return tokens, offsets
        given = np.diff(offsets)
        kept = given.copy()
        for row in np.flatnonzero(given > 1).tolist():
            if (sequence := self.sequences[row]) is not None:
                kept[row] = sequence.count_until_end(tokens[offsets[row] : offsets[row + 1]].tolist())
        if (kept == given).all():
            return tokens, offsets
        bounds = np.concatenate(([0], np.cumsum(kept)))
        places = np.arange(bounds[-1]) + np.repeat(offsets[:-1] - bounds[:-1], kept)
        return tokens[places], bounds

    def advance(self, computed: Ints, tokens: Ints, offsets: Ints, now: float) -> list[float]:
        """Set the first rows' computed tokens to `computed` [rows], and append tokens[offsets[i] : offsets[i + 1]].

        Returns seconds per new token since the one before it, of every sequence that had one.
        """
        count = len(computed)
        self.computed[:count] = computed
        given = np.diff(offsets)
        self._append(tokens, offsets, given)
        some = given > 0
        self.lengths[:count] += given
        if len(tokens) == count and some.all():
            self._pending[:count] = tokens
        else:
            self._pending[:count][some] = tokens[offsets[1:][some] - 1]
        if self._gaps:
            given = given.copy()
            given[[row for row in self._gaps if row < count]] = 0
        every: NDArray[np.float64] = np.repeat((now - self._lasts[:count]) / np.maximum(given, 1), given)
        self._lasts[:count][some] = now
        seconds: list[float] = every[~np.isnan(every)].tolist()
        return seconds

    def _append(self, tokens: Ints, offsets: Ints, given: Ints) -> None:
        values = tokens.tolist()
        if (given == 1).all():
            for sequence, token in zip(self.sequences, values, strict=False):
                if sequence is not None:
                    sequence.tokens.append(token)
            return
        bounds = offsets.tolist()
        for row in np.flatnonzero(given).tolist():
            if (sequence := self.sequences[row]) is not None:
                sequence.tokens.extend(values[bounds[row] : bounds[row + 1]])

    def first_tokens(self, given: Ints, now: float) -> list[Sequence]:
        """Sequences that get their first token, where `given` [rows] tokens come; before `advance`."""
        rows = np.flatnonzero((given > 0) & np.isnan(self._lasts[: len(given)])).tolist()
        begun = [sequence for row in rows if (sequence := self.sequences[row]) is not None]
        for sequence in begun:
            sequence.first_token = now
        return begun

    def ending(self, given: Ints) -> list[int]:
        """Rows whose newest token may be the last, after `advance`: the length is reached, or it is some row's stop token."""
        count = len(given)
        ending = (self.lengths[:count] >= self._ends[:count]) & (given > 0)
        newest = self._pending[:count]
        if not self._any_stop.isdisjoint(newest.tolist()):
            ending |= np.isin(newest, list(self._any_stop)) & (given > 0)
        return np.flatnonzero(ending).tolist()

    def check(self) -> None:
        """The columns agree with the sequences. Raises AssertionError."""
        assert self._gaps == {row for row, one in enumerate(self.sequences) if one is None}, "the set of gaps is wrong"
        for row, sequence in enumerate(self.sequences):
            if sequence is None:
                continue
            assert (sequence.row, sequence.batch) == (row, self), "a sequence has another row than the batch"
            assert self.lengths[row] == len(sequence.tokens), "the length column differs from the sequence"
            assert self._pending[row] == sequence.tokens[-1], "the newest token's column differs from the sequence"
            assert self._prompts[row] == sequence.prompt_length, "the prompt's column differs from the sequence"
            assert self._ends[row] == sequence.end_length, "the end's column differs from the sequence"
            assert self._top_k[row] == sequence.sampling.top_k, "a sampling column differs from the sequence"
            assert tuple(self._seeds[row].tolist()) == seed_words(sequence.seed), "the seed's column differs from the sequence"
            assert 0 <= self.computed[row] < self.lengths[row], "a sequence is computed beyond its end"
            assert self.computed[row] <= self.capacity[row], "a sequence is computed beyond its blocks"
            assert sequence.stop_ids <= self._any_stop, "a stop token is not checked"
        assert sum(self._stops.values()) == len(self), "stop tokens of a sequence are counted that does not run"
