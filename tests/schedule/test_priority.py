"""Lower priority numbers first, victims back in their places, and nobody waits for ever."""

from __future__ import annotations

from tests.schedule.making import Desk, desk
from tests.schedule.rows import preempted_in, rows_of


def busy_desk(**limits: object) -> Desk:
    """Four sequences of priority 10 hold every row."""
    one = desk(200, scheduling_policy="priority", max_num_seqs=4, max_model_len=600, **limits)
    for _ in range(4):
        one.ask(20, 500, priority=10)
    one.steps(3)
    return one


def test_a_better_priority_starts_within_one_step_when_every_row_is_taken() -> None:
    one = busy_desk()
    urgent = one.ask(20, 5, priority=0)
    plan = one.step()
    assert plan.admitted == (urgent.id,)
    assert preempted_in(plan) == (3,)
    assert urgent.output_count == 1


def test_several_urgent_ones_start_in_the_same_step() -> None:
    one = busy_desk()
    urgent = [one.ask(10, 5, priority=0) for _ in range(3)]
    plan = one.step()
    assert plan.admitted == tuple(sequence.id for sequence in urgent)
    assert preempted_in(plan) == (3, 2, 1)


def test_a_better_priority_starts_when_no_block_is_left() -> None:
    one = desk(40, scheduling_policy="priority", max_model_len=640)
    low = [one.ask(250, 300, priority=10) for _ in range(2)]
    one.steps(10)
    urgent = one.ask(250, 5, priority=0)
    plan = one.step()
    assert plan.admitted == (urgent.id,)
    assert preempted_in(plan) == (low[1].id,)
    one.finish()
    assert [sequence.output_count for sequence in (*low, urgent)] == [300, 300, 5]


def test_nobody_gives_way_in_vain() -> None:
    one = desk(40, scheduling_policy="priority", max_model_len=640)
    one.ask(400, 200, priority=0)
    low = one.ask(80, 100, priority=10)
    one.steps(9)
    # Even without the low one there is no room for this.
    one.ask(300, 5, priority=5)
    assert not any(plan.preempted for plan in one.steps(5))
    assert low.preemptions == 0


def test_an_urgent_prompt_does_not_wait_behind_a_long_one() -> None:
    one = desk(200, scheduling_policy="priority", max_model_len=2000, prefill_chunk_size=64)
    one.ask(1500, 5, priority=10)
    one.steps(2)
    urgent = one.ask(40, 5, priority=0)
    assert one.step().admitted == (urgent.id,)
    assert urgent.output_count == 1


def test_an_urgent_prompt_that_is_running_gets_its_tokens_first() -> None:
    one = desk(200, scheduling_policy="priority", max_model_len=2000, prefill_chunk_size=64)
    one.ask(1500, 5, priority=10)
    one.step()
    urgent = one.ask(150, 5, priority=0)
    mine = [{row.sequence_id: row.count for row in rows_of(plan)}.get(urgent.id) for plan in one.steps(3)]
    assert mine == [64, 64, 22]


def test_a_victim_resumes_ahead_of_later_equals() -> None:
    one = busy_desk()
    later = one.ask(20, 5, priority=10)
    urgent = one.ask(20, 5, priority=0)
    one.step()
    victim = one.scheduler.sequence(3)
    assert victim is not None
    assert victim.preemptions == 1
    while urgent.finish_reason is None:
        one.step()
    assert one.step().admitted == (victim.id,)
    assert later.admitted is None


def test_equal_priorities_never_take_each_other_s_place() -> None:
    one = busy_desk()
    for _ in range(4):
        one.ask(20, 5, priority=10)
    assert not any(plan.preempted for plan in one.steps(20))


def test_one_that_waited_for_another_s_blocks_does_not_take_a_later_equal_s_place() -> None:
    one = desk(100, scheduling_policy="priority", max_num_seqs=2, prefill_chunk_size=64)
    prompt = list(range(200))
    one.ask(prompt, 50)
    waiter, later = one.ask(prompt, 5), one.ask(8, 50)
    plans = one.steps(12)
    assert later.admitted is not None
    assert waiter.admitted is None
    assert not any(plan.preempted for plan in plans)


def flood(one: Desk, steps: int) -> None:
    """Two urgent ones arrive in every step, for ever."""
    for _ in range(steps):
        for _ in range(2):
            if one.scheduler.queue_capacity_left:
                one.ask(8, 4, priority=0)
        one.step()


def test_a_low_priority_finishes_in_bounded_time_under_an_endless_stream_of_high_ones() -> None:
    aging = 2.0
    one = desk(200, scheduling_policy="priority", max_num_seqs=2, max_waiting=2000, priority_aging_seconds=aging)
    flood(one, 5)
    low = one.ask(20, 8, priority=10)
    flood(one, int(10 * aging) + 1)
    # From now on nobody who arrives comes before it; those who came before need their time.
    ahead = one.scheduler.waiting
    flood(one, ahead * 2 + 20)
    assert low.finish_reason == "length"
    assert low.preemptions == 0


def test_without_ageing_it_would_wait_as_long_as_the_stream_lasts() -> None:
    one = desk(200, scheduling_policy="priority", max_num_seqs=2, max_waiting=2000, priority_aging_seconds=float("inf"))
    flood(one, 5)
    low = one.ask(20, 8, priority=10)
    flood(one, 300)
    assert low.admitted is None


def test_an_aged_sequence_is_not_displaced_by_a_fresh_urgent_one() -> None:
    one = desk(200, scheduling_policy="priority", max_num_seqs=1, priority_aging_seconds=1.0)
    low = one.ask(20, 100, priority=3)
    one.steps(4)
    urgent = one.ask(20, 4, priority=0)
    assert not one.step().preempted
    one.finish()
    assert (low.preemptions, urgent.finish_reason) == (0, "length")


def test_the_least_urgent_gives_way_when_blocks_run_out() -> None:
    one = desk(12, scheduling_policy="priority", max_model_len=160)
    low, high = one.ask(40, 100, priority=5), one.ask(40, 100, priority=0)
    plans = one.finish()
    assert {id_ for plan in plans for id_ in preempted_in(plan)} == {low.id}
    assert high.preemptions == 0


def test_under_first_come_the_priority_of_a_request_does_not_matter() -> None:
    one = desk(max_num_seqs=1)
    first, second = one.ask(8, 4, priority=10), one.ask(8, 4, priority=0)
    assert not any(plan.preempted for plan in one.finish())
    assert first.admitted is not None
    assert second.admitted is not None
    assert first.admitted < second.admitted
