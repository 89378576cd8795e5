"""Sequences and blocks: sharing, copy-on-write, claims, windows, and what stays findable."""

from __future__ import annotations

import pytest

from kveik.cache.layout import BlockCopy
from kveik.errors import DoesNotFit
from tests.cache.making import admit, compute, enter, kv_cache, leave, serve

PROMPT = list(range(100, 110))
"""10 tokens: two whole blocks and a tail of two."""


def test_a_repeated_prompt_leaves_exactly_one_token_to_compute() -> None:
    for length in range(1, 20):
        cache, prompt = kv_cache(), list(range(100, 100 + length))
        assert serve(cache, 1, prompt).matched == 0
        assert serve(cache, 2, prompt).matched == length - 1


def test_whole_blocks_are_shared_and_the_rest_is_copied_into_a_fresh_block() -> None:
    cache = kv_cache()
    compute(cache, 1, PROMPT)
    first = cache.tables[0][0].tolist()
    admission = admit(cache, 2, PROMPT)
    second = cache.tables[0][admission.row].tolist()
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    assert admission.copies == (BlockCopy(0, first[2], second[2]),)
    assert cache.usage[0].held == 4


def test_a_prompt_that_differs_inside_a_block_copies_what_is_equal() -> None:
    cache = kv_cache()
    serve(cache, 1, [1, 2, 3, 4, 5, 6, 7, 8])
    admission = admit(cache, 2, [1, 2, 3, 4, 5, 6, 9, 9])
    assert admission.matched == 6
    assert len(admission.copies) == 1


def test_the_longest_of_several_tails_is_taken() -> None:
    cache = kv_cache()
    for number, tail in enumerate(([5, 1, 1], [5, 6, 1], [5, 9])):
        serve(cache, number, [1, 2, 3, 4, *tail])
    assert admit(cache, 9, [1, 2, 3, 4, 5, 6, 7]).matched == 6


def test_a_block_is_not_found_before_the_step_that_fills_it_has_finished() -> None:
    cache = kv_cache()
    admit(cache, 1, PROMPT)
    enter(cache, 2, PROMPT)
    assert cache.match(2, 9) is None
    cache.commit(1, 8)
    found = cache.match(2, 9)
    assert found is not None
    assert found.tokens == 8
    cache.commit(1, 10)
    found = cache.match(2, 9)
    assert found is not None
    assert found.tokens == 9


def test_what_was_generated_is_found_by_the_next_turn() -> None:
    cache = kv_cache()
    tokens = list(PROMPT)
    cache.open(1, tokens, request="r")
    cache.admit(1, None, 10, 0.0)
    cache.grow(1, 10, 0.0)
    cache.commit(1, 10)
    for token in (7, 8, 9, 10, 11):
        tokens.append(token)
        cache.grow(1, len(tokens), 0.0)
        cache.commit(1, len(tokens))
        cache.check()
    leave(cache, 1, 15)
    assert admit(cache, 2, [*PROMPT, 7, 8, 9, 10, 11, 50, 51]).matched == 15


def test_another_salt_finds_nothing() -> None:
    cache = kv_cache()
    serve(cache, 1, PROMPT, salt="a")
    assert admit(cache, 2, PROMPT, salt="b").matched == 0
    assert admit(cache, 3, PROMPT, salt="a").matched == 9


def test_a_limit_of_zero_takes_no_hit() -> None:
    cache = kv_cache()
    serve(cache, 1, PROMPT)
    enter(cache, 2, PROMPT)
    assert cache.match(2, 0) is None


def test_what_was_not_computed_is_not_found_after_an_abort() -> None:
    cache = kv_cache()
    admit(cache, 1, PROMPT)
    cache.commit(1, 6)
    leave(cache, 1, 6)
    assert admit(cache, 2, PROMPT).matched == 6


def test_copied_slots_count_as_written_only_after_a_step() -> None:
    # The copy is part of a plan; if that plan is never carried out, the fresh block holds nothing.
    cache = kv_cache()
    serve(cache, 1, [1, 2, 3, 4, 5, 6, 7])
    admission = admit(cache, 2, [1, 2, 3, 4, 5, 6, 9])
    assert admission.matched == 6
    target = admission.copies[0].target
    leave(cache, 2, 6)
    enter(cache, 3, [1, 2, 3, 4, 5, 6, 9])
    found = cache.match(3, 6)
    assert found is not None
    assert found.sources != (target,)


def test_values_that_are_not_finite_are_found_by_nobody() -> None:
    cache = kv_cache()
    compute(cache, 1, PROMPT)
    cache.invalidate(1)
    leave(cache, 1, 10)
    assert cache.usage[0].cached == 0
    assert admit(cache, 2, PROMPT).matched == 0


def test_the_tail_of_a_released_sequence_is_taken_before_its_head() -> None:
    cache = kv_cache(8)
    serve(cache, 1, list(range(32)))
    # Five fresh blocks push five blocks out: those at the end.
    serve(cache, 2, list(range(50, 70)))
    assert admit(cache, 3, list(range(32))).matched == 12


def test_a_reset_removes_all_content_and_running_sequences_keep_their_blocks() -> None:
    cache = kv_cache()
    serve(cache, 1, PROMPT)
    compute(cache, 2, list(range(8)))
    cache.reset()
    cache.check()
    assert cache.usage[0].cached == 0
    assert admit(cache, 3, PROMPT).matched == 0
    assert admit(cache, 4, list(range(8))).matched == 0


def test_without_caching_only_the_choices_of_one_request_share_and_nothing_outlives_them() -> None:
    cache = kv_cache(caching=False)
    compute(cache, 1, PROMPT, request="a")
    enter(cache, 2, PROMPT, request="a")
    leave(cache, 1, 10)
    # A choice still waits, so the prompt is kept for it.
    found = cache.match(2, 9)
    assert found is not None
    assert found.tokens == 9
    assert admit(cache, 3, PROMPT, request="b").matched == 0
    cache.admit(2, found, 10, 0.0)
    cache.commit(2, 10)
    leave(cache, 2, 10)
    leave(cache, 3, 9)
    assert cache.usage[0].cached == 0
    assert cache.usage[0].held == 0


def test_a_ledger_that_cannot_hold_one_whole_sequence_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="needs 8"):
        kv_cache(7)
    assert kv_cache(8).usage[0].total == 8
    # A windowed group needs less: (8 + 4 - 2) // 4 + 2 blocks.
    assert kv_cache([8, 4], windows=(None, 8), max_chunk=4).usage[1].total == 4
    with pytest.raises(DoesNotFit, match="group 1"):
        kv_cache([8, 3], windows=(None, 8), max_chunk=4)


def test_an_admission_leaves_every_running_sequence_its_next_block() -> None:
    cache = kv_cache(8)
    compute(cache, 1, list(range(8)))
    enter(cache, 2, list(range(50, 62)))
    # Two held, three wanted, and one in reserve for each of the two.
    assert cache.can_admit(2, None)
    compute(cache, 3, [200])
    enter(cache, 4, list(range(70, 82)))
    assert not cache.can_admit(4, None)
    assert cache.can_admit(4, None, without=[3])


def test_an_admission_counts_what_running_prompts_still_need() -> None:
    cache = kv_cache(16)
    enter(cache, 1, list(range(32)))
    cache.admit(1, None, 32, 0.0)
    cache.grow(1, 4, 0.0)
    enter(cache, 2, list(range(50, 74)))
    # One block is held, but eight are promised: 8 + 6 + 2 <= 16.
    assert cache.can_admit(2, None)
    enter(cache, 3, list(range(50, 75)))
    assert not cache.can_admit(3, None)


def test_matched_blocks_that_nobody_holds_are_not_counted_as_room() -> None:
    cache = kv_cache(8)
    serve(cache, 1, list(range(16)))
    compute(cache, 2, list(range(60, 68)))
    enter(cache, 3, [*range(16), 1, 2, 3, 4])
    found = cache.match(3, 19)
    assert found is not None
    assert found.full == 4
    # 2 held, 4 found, 1 fresh, 2 in reserve: one too many.
    assert not cache.can_admit(3, found)
    leave(cache, 2, 8)
    assert cache.can_admit(3, found)


def test_rows_bound_admission() -> None:
    cache = kv_cache(rows=1)
    compute(cache, 1, [1])
    enter(cache, 2, [2])
    assert not cache.can_admit(2, None)
    assert cache._tables.free_rows == 0


def test_reach_tells_how_far_a_sequence_can_grow() -> None:
    cache = kv_cache(8)
    compute(cache, 1, list(range(20)))
    assert cache.reach(1) == 32
    compute(cache, 2, [50])
    assert cache.reach(1) == 28
    assert cache.grow(1, 25, 0.0) == 28


# Claims.


def test_what_a_running_sequence_is_about_to_compute_is_waited_for_and_not_computed_twice() -> None:
    cache = kv_cache()
    admit(cache, 1, PROMPT)
    enter(cache, 2, PROMPT)
    claim = cache.blocker(2, None, 9)
    assert claim is not None
    cache.commit(1, 8)
    assert cache.claimed(claim)
    found = cache.match(2, 9)
    assert found is not None
    assert found.tokens == 8
    assert cache.blocker(2, found, 9) == claim
    cache.commit(1, 10)
    assert not cache.claimed(claim)
    found = cache.match(2, 9)
    assert found is not None
    assert found.tokens == 9
    assert cache.blocker(2, found, 9) is None


def test_claims_go_with_the_sequence_that_made_them() -> None:
    cache = kv_cache()
    admit(cache, 1, PROMPT)
    enter(cache, 2, PROMPT)
    claim = cache.blocker(2, None, 9)
    assert claim is not None
    leave(cache, 1, 0)
    assert not cache.claimed(claim)
    assert cache.blocker(2, None, 9) is None


def test_nobody_waits_for_another_tenant_s_or_another_prompt_s_blocks() -> None:
    cache = kv_cache()
    admit(cache, 1, PROMPT)
    enter(cache, 2, PROMPT, salt="s")
    enter(cache, 3, [*PROMPT[:3], 7, 7, 7])
    assert cache.blocker(2, None, 9) is None
    assert cache.blocker(3, None, 5) is None


def test_a_longer_prompt_waits_for_the_part_it_has_in_common() -> None:
    cache = kv_cache()
    admit(cache, 1, PROMPT)
    enter(cache, 2, [*PROMPT, 1, 2, 3, 4, 5])
    claim = cache.blocker(2, None, 14)
    assert claim is not None
    cache.commit(1, 8)
    assert not cache.claimed(claim)


def test_nobody_waits_for_a_token_that_it_must_compute_itself() -> None:
    cache = kv_cache()
    admit(cache, 1, PROMPT[:9])
    cache.commit(1, 8)
    enter(cache, 2, PROMPT[:9])
    found = cache.match(2, 8)
    assert found is not None
    assert found.tokens == 8
    assert cache.blocker(2, found, 8) is None


# Sliding windows.


def test_blocks_that_leave_the_window_are_given_back_and_stay_findable() -> None:
    cache = kv_cache([8, 8], windows=(None, 8))
    compute(cache, 1, list(range(20)))
    # A query at position 20 reads 13 … 20: blocks 3 and 4.
    assert cache.tables[1][0, :5].tolist() == [0, 0, 0, *cache.tables[1][0, 3:5].tolist()]
    assert cache.usage[0].held == 5
    assert cache.usage[1].held == 2
    assert cache.usage[1].cached == 3
    assert admit(cache, 2, list(range(20))).matched == 19


def test_a_hit_needs_only_the_window_in_a_windowed_group() -> None:
    cache = kv_cache([8, 4], windows=(None, 8), max_chunk=4)
    tokens = list(range(28))
    cache.open(1, tokens, request="r")
    cache.admit(1, None, 28, 0.0)
    for computed in range(4, 29, 4):
        cache.grow(1, computed, 0.0)
        cache.commit(1, computed)
        cache.check()
    leave(cache, 1, 28)
    # The windowed group has 4 blocks, so the first ones are long gone; the last ones suffice.
    admission = admit_with_chunks(cache, 2, [*range(28), 90, 91])
    assert admission == 28


def admit_with_chunks(cache, sequence_id: int, tokens: list[int]) -> int:  # type: ignore[no-untyped-def]  # KVCacheManager
    enter(cache, sequence_id, tokens)
    match = cache.match(sequence_id, len(tokens) - 1)
    assert cache.can_admit(sequence_id, match)
    matched = cache.admit(sequence_id, match, len(tokens), 0.0).matched
    cache.grow(sequence_id, len(tokens), 0.0)
    cache.check()
    return int(matched)


def test_a_hit_must_satisfy_every_group() -> None:
    cache = kv_cache([12, 5], windows=(None, 8), max_chunk=4)
    first, second, third = list(range(16)), list(range(50, 66)), list(range(70, 86))
    for number, tokens in enumerate((first, second, third)):
        cache.open(number, tokens, request="r")
        cache.admit(number, None, 16, 0.0)
        for computed in range(4, 17, 4):
            cache.grow(number, computed, 0.0)
            cache.commit(number, computed)
        leave(cache, number, 16)
    # The full group still has all of the first prompt; the windowed one has lost its last blocks to the others.
    enter(cache, 9, first)
    assert cache.match(9, 15) is None
    enter(cache, 10, third)
    found = cache.match(10, 15)
    assert found is not None
    assert found.tokens == 15


@pytest.mark.parametrize("length", [7, 8, 9, 40])
def test_around_the_window_s_edge_a_repeated_prompt_computes_one_token(length: int) -> None:
    cache = kv_cache([12, 12], windows=(None, 8), max_model_len=48, max_chunk=4)
    tokens = list(range(length))
    for number in range(2):
        cache.open(number, tokens, request="r")
        match = cache.match(number, length - 1)
        computed = cache.admit(number, match, length, 0.0).matched
        assert computed == (length - 1 if number else 0)
        while computed < length:
            computed = min(length, computed + 4)
            cache.grow(number, computed, 0.0)
            cache.commit(number, computed)
            cache.check()
            held = cache.usage[1].held
            assert held <= (8 + 4 - 2) // 4 + 2
        leave(cache, number, length)


# The check itself.


def test_the_check_notices_a_table_that_differs_from_the_blocks_held() -> None:
    cache = kv_cache()
    compute(cache, 1, PROMPT)
    cache.tables[0][0, 1] += 1
    with pytest.raises(AssertionError, match="table differs"):
        cache.check()


def test_a_sequence_that_still_holds_blocks_cannot_be_forgotten() -> None:
    cache = kv_cache()
    compute(cache, 1, PROMPT)
    with pytest.raises(AssertionError, match="still holds"):
        cache.close(1, 0.0)
