"""Prompt tokens are counted once per sequence, at its first admission."""

from __future__ import annotations

from tests.schedule.making import desk


def test_preempted_sequences_that_find_their_own_blocks_are_no_hits() -> None:
    one = desk(14, max_model_len=200, max_num_seqs=6)
    for _ in range(20):
        one.ask(40, 100)
    plans = one.finish()
    assert sum(len(plan.preempted) for plan in plans) > 10
    assert one.scheduler.prefix_queries == 20 * 40
    assert one.scheduler.prefix_hits == 0


def test_a_sequence_that_waits_long_is_counted_once() -> None:
    one = desk(20, max_model_len=320)
    prompt = list(range(200))
    blocking = one.ask(250, 60)
    one.steps(5)
    waiting = one.ask(prompt, 2)
    one.steps(50)
    assert waiting.admitted is None
    assert one.scheduler.prefix_queries == blocking.prompt_length
    one.finish()
    assert one.scheduler.prefix_queries == 250 + 200


def test_found_tokens_are_always_fewer_than_the_prompt_s() -> None:
    one = desk()
    for _ in range(3):
        one.ask(list(range(64)))
        one.finish()
    assert one.scheduler.prefix_queries == 3 * 64
    assert one.scheduler.prefix_hits == 2 * 63


def test_counters_stand_still_while_nothing_happens() -> None:
    one = desk()
    one.ask(20)
    one.finish()
    before = (one.scheduler.prefix_queries, one.scheduler.prefix_hits)
    for _ in range(60):
        assert one.plan().empty
    assert (one.scheduler.prefix_queries, one.scheduler.prefix_hits) == before
