"""Plans and outcomes are values: they can be printed, compared and asked for their parts."""

from __future__ import annotations

import numpy as np

from kveik.request.request import TokenLogprob
from kveik.schedule.plan import Chunk, Decodes, Sampled, StepOutcome, StepPlan


def decodes(*starts: int) -> Decodes:
    return Decodes(tuple(range(len(starts))), np.array(starts), np.array([7] * len(starts)))


def test_a_plan_names_every_chunk_decodes_first() -> None:
    plan = StepPlan(decodes(40, 17), (Chunk(5, 0, 64, False), Chunk(6, 64, 3, True)), admitted=(5,))
    assert plan.chunks == (Chunk(0, 40, 1, True), Chunk(1, 17, 1, True), Chunk(5, 0, 64, False), Chunk(6, 64, 3, True))
    assert (plan.decodes, plan.rows, plan.tokens, plan.prefill_tokens) == (2, 4, 69, 67)
    assert plan.sampling_ids == (0, 1, 6)
    assert not plan.empty
    assert StepPlan().empty
    assert "Chunk(sequence_id=1, start=17, count=1, samples=True)" in repr(plan)
    assert "decodes=2" in repr(plan)
    assert "admitted=(5,)" in repr(plan)


def test_plans_are_equal_when_all_their_parts_are() -> None:
    assert StepPlan(decodes(40)) == StepPlan(decodes(40))
    assert hash(StepPlan(decodes(40))) == hash(StepPlan(decodes(40)))
    assert StepPlan(decodes(40)) != StepPlan(decodes(41))
    assert StepPlan(decodes(40)) != StepPlan(decodes(40), preempted=(3,))
    assert decodes(40) != (40,)


def test_whoever_samples_is_the_same_tuple_where_only_decodes_do() -> None:
    decoding = decodes(40, 17)
    assert StepPlan(decoding, (Chunk(5, 0, 64, False),)).sampling_ids is decoding.ids


def test_an_outcome_keeps_single_values_by_place() -> None:
    logprob = TokenLogprob(3, -0.5)
    outcome = StepOutcome.of([Sampled(10, 3, logprob), Sampled(11, 0, failed=True), Sampled(12, 4)])
    assert outcome.tokens.tolist() == [3, 0, 4]
    assert outcome.failed == {1}
    assert outcome.logprobs == {0: logprob}
