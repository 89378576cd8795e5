"""Plans and outcomes are values: they can be printed, costed, pickled and asked for their parts."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from kveik.schedule.plan import StepPlan
from kveik.schedule.reasons import Cause
from tests.schedule.making import desk
from tests.schedule.rows import Row, rows_of, tokens_of


def test_a_plan_holds_the_tokens_and_positions_of_every_row() -> None:
    one = desk()
    talking = one.ask([5] * 9 + [7], 4)
    one.step()
    reading = one.ask(list(range(100, 190)), 4)
    plan = one.plan()
    assert rows_of(plan) == (Row(talking.id, 10, 1, 1), Row(reading.id, 0, 64, 0))
    assert [tokens_of(plan, row) for row in range(2)] == [[9], list(range(100, 164))]
    assert plan.request_ids == (talking.request.id, reading.request.id)
    assert (plan.rows, plan.tokens, plan.catch_up_tokens) == (2, 65, 64)
    assert plan.pairs == 11 + 64 * 65 / 2
    assert not plan.empty
    assert StepPlan().empty


def test_a_plan_prints_its_rows_and_its_reasons() -> None:
    one = desk(max_num_seqs=1)
    one.ask(10, 4)
    waiting = one.ask(10, 4)
    text = repr(one.plan())
    assert "r0/0: 0+10 logits=1" in text
    assert f"sequence_id={waiting.id}, request_id='r1', cause=<Cause.ROWS" in text


def test_ids_are_the_same_tuple_as_long_as_the_rows_are_the_same() -> None:
    one = desk()
    one.ask(10, 8)
    one.step()
    first, second = one.step(), one.step()
    assert first.sequence_ids is second.sequence_ids
    one.ask(10, 8)
    assert one.step().sequence_ids is not first.sequence_ids


def test_a_plan_does_not_change_when_the_next_one_is_made() -> None:
    one = desk()
    one.ask(10, 8)
    one.step()
    before = one.step()
    starts, tokens, outputs = (array.tolist() for array in (before.starts, before.token_ids, before.sampling.outputs))
    one.step()
    assert (before.starts.tolist(), before.token_ids.tolist(), before.sampling.outputs.tolist()) == (starts, tokens, outputs)


def test_block_tables_of_an_earlier_plan_are_refused() -> None:
    one = desk()
    one.ask(10, 8)
    before = one.step()
    one.step()
    with pytest.raises(AssertionError, match="belong to a later plan"):
        before.tables.read()


def test_a_pickled_plan_keeps_what_the_tables_said() -> None:
    one = desk()
    one.ask(100, 8)
    plan = one.plan()
    there = pickle.loads(pickle.dumps(plan))
    here = [table[:, :4].copy() for table in plan.tables.read()]
    one.settle(plan)
    one.step()
    assert [table.tolist() for table in there.tables.read()] == [table.tolist() for table in here]
    assert there.token_ids.tolist() == plan.token_ids.tolist()
    assert there.sequence_ids == plan.sequence_ids


def test_a_pickled_history_ends_where_the_plan_was_made() -> None:
    one = desk()
    sequence = one.ask(10, 8, presence_penalty=1.0)
    plan = one.plan()
    there = pickle.loads(pickle.dumps(plan))
    one.settle(plan)
    assert there.sampling.details[0].history.tokens() == sequence.tokens[:10]
    assert plan.sampling.details[0].history.tokens() == sequence.tokens[:10]


def test_each_sequence_that_does_not_run_has_its_reason_with_numbers() -> None:
    one = desk(10, max_num_seqs=4, look_past=0, max_model_len=160)
    running = one.ask(70, 80)
    plan = one.plan()
    assert plan.reason(running.id, "r0") is None
    one.settle(plan)
    one.step()
    large, behind = one.ask(100, 4), one.ask(20, 4)
    plan = one.step()
    reason = plan.reason(large.id, large.request.id)
    assert reason is not None
    assert reason.cause is Cause.BLOCKS
    assert reason.needed > reason.available >= 0
    other = plan.reason(behind.id, behind.request.id)
    assert other is not None
    assert (other.cause, plan.unexamined) == (Cause.QUEUE_POSITION, 1)


def test_a_sequence_that_waits_for_a_prefix_in_flight_says_so() -> None:
    one = desk(long_prefill_token_threshold=16)
    one.ask([3] * 100, 4)
    second = one.ask([3] * 100, 4)
    one.step()
    reason = one.step().reason(second.id, second.request.id)
    assert reason is not None
    assert reason.cause is Cause.PREFIX_IN_FLIGHT


def test_a_prompt_without_a_token_left_for_it_says_so() -> None:
    one = desk(prefill_chunk_size=16)
    one.ask(100, 4)
    one.step()
    second = one.ask(40, 4)
    reason = one.step().reason(second.id, second.request.id)
    assert reason is not None
    assert (reason.cause, reason.needed, reason.available) == (Cause.BUDGET, 40, 0)


def test_a_preemption_names_its_cause() -> None:
    one = desk(10, max_model_len=160)
    for _ in range(2):
        one.ask(60, 80)
    plans = one.finish()
    causes = {one.cause for plan in plans for one in plan.preempted}
    assert causes == {Cause.BLOCKS}
    assert all(one.needed > 0 for plan in plans for one in plan.preempted)


def test_an_outcome_without_tokens_settles_a_chunk_of_a_prompt() -> None:
    one = desk(prefill_chunk_size=16)
    sequence = one.ask(40, 4)
    plan = one.plan()
    assert plan.logits.tolist() == [0]
    settled = one.settle(plan)
    assert (sequence.computed, np.sum(settled.kept)) == (16, 0)
