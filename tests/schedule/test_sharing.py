"""Prompts in flight together are computed once, and prompts seen before are found."""

from __future__ import annotations

from tests.schedule.making import desk


def test_a_prompt_with_several_choices_is_computed_once() -> None:
    one = desk(prefill_chunk_size=64)
    choices = one.ask_many(list(range(150)), 4, max_tokens=3)
    one.finish()
    assert one.computed[choices[0].id] == 150 + 2
    assert [one.computed[choice.id] for choice in choices[1:]] == [1 + 2] * 3
    assert [choice.cached_tokens for choice in choices] == [0, 149, 149, 149]


def test_without_caching_the_choices_of_one_request_still_share() -> None:
    one = desk(caching=False)
    choices = one.ask_many(list(range(150)), 3)
    other = one.ask(list(range(150)))
    one.finish()
    assert [choice.cached_tokens for choice in choices] == [0, 149, 149]
    assert other.cached_tokens == 0


def test_two_users_with_one_system_prompt_arrive_together_and_it_is_computed_once() -> None:
    one = desk(prefill_chunk_size=64)
    system = list(range(128))
    first, second = one.ask([*system, 1000]), one.ask([*system, 2000])
    one.finish()
    assert (first.cached_tokens, second.cached_tokens) == (0, 128)


def test_whoever_waits_for_another_s_blocks_is_not_passed_over_and_lets_others_by() -> None:
    one = desk(prefill_chunk_size=64, look_past=0)
    prompt = list(range(200))
    first, waiter = one.ask(prompt), one.ask(prompt)
    # The chunk is full; a stranger comes in as soon as there is budget, ahead of the waiter.
    stranger = one.ask(8)
    one.steps(4)
    assert stranger.admitted == 3
    assert waiter.admitted is None
    assert waiter.passed_over == 0
    one.finish()
    assert (first.finish_reason, waiter.finish_reason, waiter.cached_tokens) == ("length", "length", 199)


def test_a_waiter_whose_model_is_aborted_computes_the_prompt_itself() -> None:
    one = desk(prefill_chunk_size=64)
    prompt = list(range(200))
    first, waiter = one.ask(prompt), one.ask(prompt)
    one.steps(2)
    one.scheduler.abort(first.id, one.now)
    one.finish()
    assert waiter.finish_reason == "length"
    assert waiter.cached_tokens == 128


def test_log_probabilities_of_a_prompt_are_computed_and_not_found() -> None:
    one = desk()
    prompt = list(range(40))
    one.ask(prompt)
    one.finish()
    asking = one.ask_many(prompt, 2, prompt_logprobs=1)
    one.finish()
    assert [choice.cached_tokens for choice in asking] == [0, 39]
    assert one.computed[asking[0].id] == 40 + 3
