"""Plans row by row, and outcomes from a function: for tests that look at one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kveik.sample.verify import accepted
from kveik.schedule.plan import StepOutcome, StepPlan


class Row(NamedTuple):
    """One row of a plan."""

    sequence_id: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nothing calls on a row
    logits: int

    @property
    def samples(self) -> bool:
        return self.logits > 0


def rows_of(plan: StepPlan) -> tuple[Row, ...]:
    """Rows that compute a newest output token first, then the others by sequence."""
    return (*decodes_of(plan), *behind_of(plan))


def _rows(plan: StepPlan) -> list[tuple[Row, bool]]:
    columns = (plan.sequence_ids, plan.starts.tolist(), plan.counts.tolist(), plan.logits.tolist())
    return list(zip([Row(*row) for row in zip(*columns, strict=True)], plan.decoding.tolist(), strict=True))


def decodes_of(plan: StepPlan) -> tuple[Row, ...]:
    """Rows that compute a newest output token, with or without guesses."""
    return tuple(row for row, decodes in _rows(plan) if decodes)


def behind_of(plan: StepPlan) -> tuple[Row, ...]:
    """Rows that catch up, by sequence."""
    return tuple(sorted(row for row, decodes in _rows(plan) if not decodes))


def preempted_in(plan: StepPlan) -> tuple[int, ...]:
    """Sequence ids, in order."""
    return tuple(one.sequence_id for one in plan.preempted)


def tokens_of(plan: StepPlan, row: int) -> list[int]:
    """The tokens that a row computes."""
    ends = np.cumsum(plan.counts)
    return plan.token_ids[ends[row] - plan.counts[row] : ends[row]].tolist()


def outcome_of(
    plan: StepPlan, choose: Callable[[int, int], int], fails: Callable[[int], bool] = lambda row: False
) -> StepOutcome:
    """`choose`: the token for a row and its n-th logits. `fails`: whether a row's logits are not finite."""
    starts = np.concatenate(([0], np.cumsum(plan.logits)))
    places = [(row, ahead) for row, count in enumerate(plan.logits.tolist()) for ahead in range(count)]
    tokens = np.array([choose(row, ahead) for row, ahead in places], dtype=np.int64)
    failed = {place for place, (row, ahead) in enumerate(places) if ahead == 0 and fails(row)}
    counts, broken = accepted(tokens, starts, plan.guesses, failed)
    kept = [place for place, (row, ahead) in enumerate(places) if ahead < counts[row]]
    return StepOutcome(tokens[kept], np.concatenate(([0], np.cumsum(counts))), broken)
