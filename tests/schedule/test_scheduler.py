"""What a step computes: decodes first, prompts in chunks, admissions with room to spare, and how sequences end."""

from __future__ import annotations

import pytest

from kveik.errors import Overloaded, PromptTooLong
from kveik.request.sequence import Status
from kveik.schedule.plan import Finished
from tests.schedule.making import EOS, WORD, desk
from tests.schedule.rows import Row, decodes_of, preempted_in, rows_of

# Chunks and budget.


def test_a_prompt_is_computed_in_chunks_and_the_last_one_samples() -> None:
    one = desk(prefill_chunk_size=64)
    sequence = one.ask(150, max_tokens=2)
    assert [rows_of(plan) for plan in one.steps(4)] == [
        (Row(sequence.id, 0, 64, 0),),
        (Row(sequence.id, 64, 64, 0),),
        (Row(sequence.id, 128, 22, 1),),
        (Row(sequence.id, 150, 1, 1),),
    ]
    assert sequence.finish_reason == "length"
    assert sequence.output == [WORD, WORD]


def test_decodes_come_first_and_prompts_share_what_is_left_of_the_chunk() -> None:
    one = desk(prefill_chunk_size=64)
    talking = [one.ask(10, max_tokens=50) for _ in range(3)]
    one.step()
    long, short = one.ask(100), one.ask(20)
    plan = one.step()
    assert len(decodes_of(plan)) == 3
    assert rows_of(plan)[:3] == tuple(Row(sequence.id, 10, 1, 1) for sequence in talking)
    assert rows_of(plan)[3:] == (Row(long.id, 0, 64, 0),)
    assert rows_of(one.step())[3:] == (Row(long.id, 64, 36, 1), Row(short.id, 0, 20, 1))


def test_decodes_count_against_the_step_s_tokens() -> None:
    one = desk(max_num_seqs=8, max_num_batched_tokens=10, prefill_chunk_size=64)
    for _ in range(4):
        one.ask(2, max_tokens=50)
    one.steps(2)
    one.ask(100)
    plan = one.step()
    assert len(decodes_of(plan)) == 4
    assert rows_of(plan)[4].count == 6
    assert plan.tokens == 10


def test_a_cap_on_long_prompts_lets_short_ones_pass() -> None:
    one = desk(prefill_chunk_size=64, long_prefill_token_threshold=16)
    long, short = one.ask(100), one.ask(12)
    assert rows_of(one.step()) == (Row(long.id, 0, 16, 0), Row(short.id, 0, 12, 1))


def test_running_prompts_go_on_before_new_ones_are_admitted() -> None:
    one = desk(prefill_chunk_size=32)
    first = one.ask(100)
    one.step()
    second = one.ask(100)
    assert [rows_of(plan) for plan in one.steps(2)] == [(Row(first.id, 32, 32, 0),), (Row(first.id, 64, 32, 0),)]
    assert rows_of(one.step()) == (Row(first.id, 96, 4, 1), Row(second.id, 0, 28, 0))


def test_no_more_sequences_run_than_allowed() -> None:
    one = desk(max_num_seqs=2)
    for _ in range(5):
        one.ask(8, max_tokens=3)
    assert all(plan.rows <= 2 for plan in one.finish())


def test_a_plan_without_work_is_empty() -> None:
    one = desk()
    assert one.plan().empty
    assert not one.scheduler.has_work


# The end of a sequence.


def test_an_end_token_stops_and_is_the_last_token() -> None:
    one = desk(says=lambda _: EOS)
    sequence = one.ask(10)
    plan = one.plan()
    assert one.settle(plan).finished == {0: Finished(sequence.id, "stop")}
    assert sequence.stop_token == EOS
    assert sequence.output == [EOS]
    assert sequence.status is Status.FINISHED


def test_ignore_eos_goes_on_past_the_end_token_but_not_past_a_stop_token() -> None:
    one = desk(says=lambda _: EOS)
    sequence = one.ask(10, max_tokens=3, ignore_eos=True)
    one.finish()
    assert (sequence.finish_reason, sequence.output_count) == ("length", 3)
    sequence = one.ask(10, max_tokens=3, ignore_eos=True, stop_token_ids=(EOS,))
    one.finish()
    assert (sequence.finish_reason, sequence.output_count, sequence.stop_token) == ("stop", 1, EOS)


def test_stop_tokens_do_not_count_before_the_least_number_of_tokens() -> None:
    one = desk(says=lambda _: EOS)
    sequence = one.ask(10, max_tokens=8, min_tokens=3)
    one.finish()
    assert (sequence.finish_reason, sequence.output_count) == ("stop", 3)


def test_a_stop_token_that_is_also_the_last_allowed_one_is_a_stop() -> None:
    one = desk(says=lambda _: EOS)
    sequence = one.ask(10, max_tokens=1)
    one.finish()
    assert sequence.finish_reason == "stop"


def test_a_failed_sequence_ends_alone_and_leaves_nothing_to_be_found() -> None:
    one = desk()
    bad, good = one.ask(list(range(40))), one.ask(list(range(100, 140)))
    plan = one.plan()
    settled = one.settle(plan, failed=[bad.id])
    assert list(settled.finished.values()) == [Finished(bad.id, "error")]
    assert bad.output == []
    one.finish()
    assert good.finish_reason == "length"
    again, fine = one.ask(list(range(40))), one.ask(list(range(100, 140)))
    one.step()
    assert (again.cached_tokens, fine.cached_tokens) == (0, 39)


def test_times_are_taken_at_the_first_and_the_last_token() -> None:
    one = desk()
    one.steps(3)
    sequence = one.ask(100, max_tokens=3)
    one.finish()
    assert (sequence.arrived, sequence.admitted, sequence.first_token, sequence.last_token) == (3, 3, 4, 6)


def test_a_sequence_can_be_asked_for_until_the_next_plan() -> None:
    one = desk()
    sequence = one.ask(10, max_tokens=1)
    assert one.scheduler.sequence(sequence.id) is sequence
    one.step()
    assert one.scheduler.sequence(sequence.id) is sequence
    one.plan()
    assert one.scheduler.sequence(sequence.id) is None


# What can never run is refused, and what is accepted always runs.


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "accepted"),
    [(799, 1, True), (800, 1, False), (801, 1, False), (912, 1, False), (700, 200, False), (700, 100, True)],
)
def test_a_request_beyond_the_context_is_refused_at_once_and_any_other_runs(
    prompt: int, max_tokens: int, accepted: bool
) -> None:
    one = desk(50, max_model_len=800, prefill_chunk_size=512)
    if not accepted:
        with pytest.raises(PromptTooLong, match=f"800 tokens.*{prompt} in the prompt, {max_tokens} in the completion"):
            one.ask(prompt, max_tokens)
        assert not one.scheduler.has_work
        return
    big, small = one.ask(prompt, max_tokens), one.ask(20, 5)
    plans = one.finish()
    assert (big.finish_reason, big.output_count) == ("length", max_tokens)
    assert (small.finish_reason, small.output_count) == ("length", 5)
    assert not any(plan.empty for plan in plans)


def test_a_small_request_runs_after_a_big_one_is_cancelled() -> None:
    one = desk(50, max_model_len=800)
    running = one.ask(400, 200)
    one.steps(7)
    big = one.ask(700, 100)
    small = one.ask(100, 5)
    one.step()
    assert one.scheduler.abort(big.id, one.now)
    one.steps(6)
    assert small.finish_reason == "length"
    one.finish()
    assert running.output_count == 200


def test_a_full_queue_refuses_and_a_preempted_sequence_returns_all_the_same() -> None:
    one = desk(16, max_waiting=1, max_num_seqs=2)
    first = one.ask(100, 100)
    one.step()
    second = one.ask(60, 100)
    one.steps(3)
    third = one.ask(8)
    with pytest.raises(Overloaded, match="--max-waiting"):
        one.ask(8)
    assert one.scheduler.queue_capacity_left == 0
    one.finish()
    assert second.preemptions > 0
    assert [sequence.finish_reason for sequence in (first, second, third)] == ["length"] * 3


# Preemption.


def test_the_newest_gives_way_and_finds_its_blocks_again() -> None:
    one = desk(8, max_model_len=128)
    old, new = one.ask(60, 25), one.ask(30, 90)
    plans = one.finish()
    victims = [id_ for plan in plans for id_ in preempted_in(plan)]
    assert victims == [new.id]
    assert (old.preemptions, new.preemptions) == (0, 1)
    assert (old.output_count, new.output_count) == (25, 90)
    # Only the tail block, which the other one needed, is computed again.
    assert one.computed[new.id] == new.length - 1 + 16
    assert new.cached_tokens == 0


def test_the_newest_is_whoever_was_admitted_last_not_who_arrived_last() -> None:
    one = desk(20, max_model_len=320)
    one.ask(150, 30)
    one.steps(3)
    early, passing = one.ask(140, 120), one.ask(8, 250)
    one.finish()
    assert early.admitted is not None
    assert passing.admitted is not None
    assert passing.admitted < early.admitted
    assert early.preemptions > 0
    assert passing.preemptions == 0


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    one = desk(12, max_model_len=160, max_num_seqs=4)
    for _ in range(8):
        one.ask(24, 100)
    plans = one.finish()
    assert any(plan.preempted for plan in plans)
    assert not any(plan.preempted and plan.admitted for plan in plans)


def test_whoever_was_admitted_is_not_preempted_in_the_next_block_s_steps() -> None:
    one = desk(12, max_model_len=160, max_num_seqs=4)
    for _ in range(8):
        one.ask(24, 100)
    admitted: dict[int, int] = {}
    for step, plan in enumerate(one.finish()):
        admitted.update(dict.fromkeys(plan.admitted, step))
        for victim in preempted_in(plan):
            assert step - admitted[victim] >= 16


def test_a_running_prompt_takes_what_blocks_there_are_before_anybody_gives_way() -> None:
    one = desk(23, max_model_len=320, long_prefill_token_threshold=5)
    talking = [one.ask(8, 200) for _ in range(3)]
    one.steps(12)
    reading = one.ask(200, 5)
    plans = one.finish()
    mine = [(plan, chunk) for plan in plans for chunk in rows_of(plan) if chunk.sequence_id == reading.id]
    shortened = [plan for plan, chunk in mine if chunk.count < 5 and not chunk.samples and not chunk.start % 5]
    assert len(shortened) == 1
    assert not shortened[0].preempted
    assert [sequence.output_count for sequence in (*talking, reading)] == [200, 200, 200, 5]


# Admission, and those that may pass.


def test_a_small_request_passes_one_that_does_not_fit_but_not_for_ever() -> None:
    one = desk(20, max_model_len=320, max_num_seqs=4, look_past=1, look_past_limit=3)
    one.ask(150, 100)
    one.steps(3)
    big = one.ask(200, 10)
    small = [one.ask(8, 2) for _ in range(6)]
    one.steps(20)
    passed = [sequence.finish_reason for sequence in small]
    assert passed == ["length"] * 3 + [None] * 3
    assert big.passed_over == 3
    one.finish()
    assert big.finish_reason == "length"
    assert all(sequence.admitted is not None and big.admitted is not None for sequence in small)
    assert all(sequence.admitted >= big.admitted for sequence in small[3:] if sequence.admitted and big.admitted)


def test_without_look_past_nobody_passes() -> None:
    one = desk(20, max_model_len=320, look_past=0)
    one.ask(150, 100)
    one.steps(3)
    big, small = one.ask(200, 10), one.ask(8, 2)
    one.steps(5)
    assert small.admitted is None
    one.finish()
    assert big.admitted is not None
    assert small.admitted is not None
    assert small.admitted >= big.admitted


def test_only_as_many_are_tried_behind_the_first_as_allowed() -> None:
    one = desk(20, max_model_len=320, look_past=2)
    one.ask(150, 100)
    one.steps(3)
    for _ in range(3):
        one.ask(200, 10)
    small = one.ask(8, 2)
    one.steps(3)
    assert small.admitted is None
