"""Whoever is cancelled is gone at once, with blocks and tokens, and nobody else notices."""

from __future__ import annotations

from tests.schedule.making import WORD, desk
from tests.schedule.rows import rows_of


def test_a_cancel_in_the_middle_of_a_prompt_gives_no_token_and_the_blocks_back_at_once() -> None:
    one = desk(prefill_chunk_size=192, long_prefill_token_threshold=64)
    first, second, third = (one.ask(200, 4) for _ in range(3))
    one.step()
    held = one.scheduler.kv_cache.usage[0].held
    assert one.scheduler.abort(third.id, one.now)
    one.scheduler.check()
    assert one.scheduler.kv_cache.usage[0].held == held - 4
    assert (third.finish_reason, third.output) == ("abort", [])
    plans = one.finish()
    assert all(chunk.sequence_id != third.id for plan in plans for chunk in rows_of(plan))
    assert [(one_.output, one_.finish_reason) for one_ in (first, second)] == [([WORD] * 4, "length")] * 2


def test_a_token_for_somebody_who_has_left_meanwhile_is_dropped() -> None:
    one = desk()
    leaving, staying = one.ask(10), one.ask(10)
    for _ in range(2):
        plan = one.plan()
        if leaving.output_count == 1:
            assert one.scheduler.abort(leaving.id, one.now)
        one.settle(plan)
    assert leaving.output == [WORD]
    assert staying.output == [WORD, WORD]
    assert not one.scheduler.abort(leaving.id, one.now)


def test_somebody_who_has_not_run_yet_can_be_cancelled() -> None:
    one = desk(max_num_seqs=1)
    one.ask(10, 10)
    prompt = list(range(200))
    waiting = one.ask(prompt)
    one.step()
    assert one.scheduler.waiting == 1
    assert one.scheduler.abort(waiting.id, one.now)
    assert one.scheduler.waiting == 0
    assert not one.scheduler.abort(waiting.id, one.now)
    one.finish()


def test_somebody_who_waits_for_another_s_blocks_can_be_cancelled() -> None:
    one = desk(prefill_chunk_size=32)
    choices = one.ask_many(list(range(100)), 3)
    one.step()
    assert one.scheduler.waiting == 2
    assert one.scheduler.abort(choices[1].id, one.now)
    one.scheduler.check()
    one.finish()
    assert choices[2].cached_tokens == 99


def test_whoever_stands_behind_one_that_is_cancelled_is_admitted_at_once() -> None:
    one = desk(20, max_model_len=320, look_past=0)
    one.ask(150, 100)
    one.steps(3)
    big, small = one.ask(200, 10), one.ask(8, 2)
    one.steps(5)
    assert small.admitted is None
    one.scheduler.abort(big.id, one.now)
    assert one.step().admitted == (small.id,)
