"""Changes to single logits before anything is drawn: bias, penalties, and tokens that may not come yet.

    bias → repetition penalty → frequency and presence penalty → impossible tokens

The order of the penalties is that of vLLM and of the papers they come from. Rows without edits cost nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kveik.request.request import SamplingParams
from kveik.request.sampling_rows import RowDetail, penalised
from kveik.sample.tiles import Floats, Ints
from kveik.sample.token_counts import TokenCounts

REMEMBERED = 4096
"""Sequences whose edits are kept between steps; one that falls out is rebuilt from its tokens when it comes again."""

_IMPOSSIBLE = -100.0
"""The logit bias that, as OpenAI has it, makes a token impossible."""

_LARGEST = np.finfo(np.float32).max

_LEAST_PENALTY = 1e-30
"""Smaller repetition penalties would be 0 in float32, and 0 times -inf is no number."""


def edited(sampling: SamplingParams, output_count: int) -> bool:
    """Whether this row's logits are changed before the draw."""
    return bool(sampling.logit_bias) or output_count < sampling.min_tokens or penalised(sampling)


@dataclass(slots=True)
class _Kept:
    """What is remembered of one sequence."""

    bias_ids: Ints
    bias: Floats
    banned: Ints
    """Tokens that a bias of -100 makes impossible."""

    ends: Ints
    """Tokens that may not come before `min_tokens`."""

    counts: TokenCounts | None


class LogitEdits:
    """Edits logits in place. Holds state per sequence, bounded by `REMEMBERED`; `forget` drops it."""

    def __init__(self, real: int, eos_ids: frozenset[int]) -> None:
        self._real = real
        self._eos_ids = eos_ids
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    def forget(self, sequence_id: int) -> None:
        """Drop what is kept of a sequence; harmless where nothing is."""
        self._kept.pop(sequence_id, None)

    def __len__(self) -> int:
        return len(self._kept)

    def apply(self, flat: Floats, vocab: int, rows: Sequence[tuple[int, int, RowDetail]]) -> Ints:
        """Edit rows, given as (row, output tokens before it, detail). flat [all rows * vocab].

        Returns the rows where an edit met NaN or +Inf.
        """
        plan = _Plan()
        for row, output_count, detail in rows:
            self._plan_row(plan, row * vocab, output_count, detail)
        broken = [
            _edit(flat, plan.biased, lambda values, bias: values + bias),
            _edit(flat, plan.penalised, _penalise),
            _edit(flat, plan.barred, lambda values: np.full_like(values, -np.inf)),
        ]
        return np.unique(np.concatenate(broken) // vocab)

    def _plan_row(self, plan: _Plan, start: int, output_count: int, detail: RowDetail) -> None:
        sampling, kept = detail.sampling, self._recall(detail)
        plan.biased.add(start + kept.bias_ids, kept.bias)
        plan.barred.add(start + kept.banned)
        if output_count < sampling.min_tokens:
            plan.barred.add(start + kept.ends)
        if kept.counts is not None:
            kept.counts.add(detail.history.tokens(kept.counts.seen))
            ids, counts = kept.counts.with_guesses(detail.history.guesses)
            penalty = max(sampling.repetition_penalty, _LEAST_PENALTY)
            amounts = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
            plan.penalised.add(start + ids, np.full(len(counts), penalty, np.float32), amounts.astype(np.float32))

    def _recall(self, detail: RowDetail) -> _Kept:
        kept = self._kept.get(detail.sequence_id)
        if kept is None:
            kept = self._kept[detail.sequence_id] = self._learn(detail)
            if len(self._kept) > REMEMBERED:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(detail.sequence_id)
        return kept

    def _learn(self, detail: RowDetail) -> _Kept:
        sampling = detail.sampling
        bias = {token: value for token, value in sampling.logit_bias if 0 <= token < self._real}
        soft = {token: value for token, value in bias.items() if value > _IMPOSSIBLE}
        counts = None
        if penalised(sampling):
            with_prompt = sampling.repetition_penalty != 1.0
            prompt = detail.history.tokens()[: detail.history.prompt_length]
            counts = TokenCounts(prompt, real=self._real, with_prompt=with_prompt)
        return _Kept(
            bias_ids=_ids(soft),
            bias=np.array(list(soft.values()), dtype=np.float32),
            banned=_ids(bias.keys() - soft.keys()),
            ends=_ids(token for token in self._eos_ids | set(sampling.stop_token_ids) if 0 <= token < self._real),
            counts=counts,
        )


def _ids(tokens: Iterable[int]) -> Ints:
    return np.fromiter(tokens, dtype=np.int64)


class _Column:
    """Places in the flat logits, and numbers for each of them, gathered row by row."""

    def __init__(self) -> None:
        self._entries: list[tuple[NDArray[np.generic], ...]] = []

    def add(self, places: Ints, *amounts: Floats) -> None:
        if len(places):
            self._entries.append((places, *amounts))

    def joined(self) -> list[NDArray[np.generic]]:
        """The places and then the numbers, all rows together; nothing where there are none."""
        return [np.concatenate(parts) for parts in zip(*self._entries, strict=True)]


class _Plan:
    """The edits of one step, kind by kind. Within a kind no place comes twice, but for barring, where it does not matter."""

    def __init__(self) -> None:
        self.biased, self.penalised, self.barred = _Column(), _Column(), _Column()


def _penalise(values: Floats, penalties: Floats, amounts: Floats) -> Floats:
    """Repetition first: a penalty of 1 and an amount of 0 change nothing."""
    return np.where(values > 0, values / penalties, values * penalties) - amounts


def _edit(flat: Floats, column: _Column, change: Callable[..., Floats]) -> Ints:
    """Change the values at a column's places. Returns the places that held NaN or +Inf before."""
    if not (joined := column.joined()):
        return np.empty(0, dtype=np.int64)
    places, *amounts = joined
    values = flat[places]
    broken: Ints = places[~(values < np.inf)]
    with np.errstate(over="ignore", invalid="ignore"):
        # A tiny penalty can lift a value past what float32 holds; it stays the likeliest, and finite.
        flat[places] = np.minimum(change(values, *amounts), _LARGEST)
    return broken
