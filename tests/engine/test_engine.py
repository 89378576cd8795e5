"""One step after the other, with a model that is a function."""

from __future__ import annotations

from collections import Counter

import pytest

from kveik.config import ScheduleConfig
from kveik.errors import Overloaded, PromptTooLong
from kveik.observe.events import (
    FirstToken,
    Preempted,
    PromptComputed,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestWaits,
    Stepped,
)
from kveik.schedule.plan import StepPlan
from tests.engine.fakes import FakeEngine, counting, request
from tests.schedule.rows import behind_of


def run(fake: FakeEngine, steps: int = 1000) -> dict[int, list[int]]:
    """Tokens by sequence id, until nobody has work."""
    tokens: dict[int, list[int]] = {}
    for _ in range(steps):
        if not fake.engine.has_work:
            return tokens
        for sequence, event in fake.engine.step().events:
            tokens.setdefault(sequence.id, []).extend(event.tokens)
        fake.scheduler.check()
    raise AssertionError("the engine does not finish")


def test_a_request_gets_its_tokens_and_leaves_nothing_behind() -> None:
    fake = FakeEngine()
    (sequence,) = fake.engine.add(request(range(200, 220), max_tokens=3))
    assert run(fake) == {sequence: [120, 121, 122]}
    fake.engine.add(request(range(30, 40)))
    fake.engine.step()
    assert fake.executor.ended == [sequence], "the next plan says what need not be kept any more"
    run(fake)
    assert fake.idle()


def test_every_choice_is_a_sequence_and_the_prompt_is_computed_once() -> None:
    fake = FakeEngine()
    ids = fake.engine.add(request(range(200, 230), max_tokens=4, n=3))
    tokens = run(fake)
    assert {tuple(tokens[one]) for one in ids} == {(130, 131, 132, 133)}
    prompt_tokens = sum(chunk.count for plan in fake.executor.plans for chunk in behind_of(plan))
    assert prompt_tokens == 30 + 1 + 1
    assert fake.idle()


def test_an_unseeded_request_gets_a_seed_that_the_engines_seed_decides() -> None:
    def seeds() -> list[int]:
        fake = FakeEngine()
        ids = [fake.engine.add(request(n=2)) for _ in range(3)]
        return [fake.scheduler.sequence(one).seed for pair in ids for one in pair]  # type: ignore[union-attr]  # they are alive

    first = seeds()
    assert first == seeds()
    assert first[0] == first[1], "the choice is told apart by its number, not by its seed"
    assert len(set(first)) == 3


def test_a_request_that_cannot_fit_is_refused_with_its_numbers_and_nothing_is_queued() -> None:
    fake = FakeEngine(max_model_len=64)
    with pytest.raises(PromptTooLong, match=r"64 tokens.*60 in the prompt, 8 in the completion"):
        fake.engine.add(request(range(60), max_tokens=8))
    assert not fake.engine.has_work


def test_a_queue_without_room_for_every_choice_takes_none_of_them() -> None:
    limits = ScheduleConfig(max_num_seqs=1, max_num_batched_tokens=64, prefill_chunk_size=32, max_waiting=3)
    fake = FakeEngine(limits=limits)
    fake.engine.add(request(n=2))
    with pytest.raises(Overloaded, match=r"takes 1 more sequence .*adds 2"):
        fake.engine.add(request(n=2))
    run(fake)
    assert fake.idle()


def test_an_aborted_sequence_gets_nothing_more_and_its_blocks_return_at_once() -> None:
    fake = FakeEngine()
    (first,) = fake.engine.add(request(range(100), max_tokens=8))
    (second,) = fake.engine.add(request(range(500, 540), max_tokens=8))
    fake.engine.step()
    held = fake.kv_cache.usage[0].held
    assert fake.engine.abort(first)
    assert fake.kv_cache.usage[0].held < held
    assert not fake.engine.abort(first), "the second time there is nothing to end"
    assert set(run(fake)) == {second}
    assert [event.reason for event in fake.of_kind(RequestFinished)] == ["abort", "length"]  # type: ignore[attr-defined]  # of that kind
    assert fake.idle()


def test_a_sequence_whose_logits_are_not_finite_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeEngine()
    ids = [fake.engine.add(request(range(start, start + 20)))[0] for start in (0, 100, 200)]
    fake.executor.fail_sequence = lambda sequence: sequence.id == ids[1] and sequence.output_count == 3
    tokens = run(fake)
    assert [len(tokens[one]) for one in ids] == [8, 3, 8]
    assert "logits not finite" in caplog.text, "the log tells it"
    reasons = Counter(event.reason for event in fake.of_kind(RequestFinished))  # type: ignore[attr-defined]  # of that kind
    assert reasons == {"length": 2, "error": 1}
    assert fake.idle()


def test_who_failed_is_told_whether_the_logits_or_the_step_was_at_fault() -> None:
    fake = FakeEngine()
    bad, good = (fake.engine.add(request(range(start, start + 20)))[0] for start in (0, 100))
    fake.executor.fail_sequence = lambda sequence: sequence.id == bad
    fake.executor.fail_step = lambda plan: len(fake.executor.plans) == 4
    errors: dict[int, object] = {}
    while fake.engine.has_work:
        for sequence, event in fake.engine.step().events:
            # An end with an error, and no other, says which.
            assert (event.error is None) == (event.finish_reason != "error")
            if event.error is not None:
                errors[sequence.id] = event.error.code
    assert errors == {bad: "non_finite_logits", good: "step_failed"}


def test_a_step_that_fails_ends_its_sequences_and_nobody_elses(caplog: pytest.LogCaptureFixture) -> None:
    limits = ScheduleConfig(max_num_seqs=2, max_num_batched_tokens=64, prefill_chunk_size=32)
    fake = FakeEngine(limits=limits)
    ids = [fake.engine.add(request(range(start, start + 20)))[0] for start in (0, 100, 200)]
    failed: list[StepPlan] = []

    def fails(plan: StepPlan) -> bool:
        if len(fake.executor.plans) == 4:
            failed.append(plan)
        return len(fake.executor.plans) == 4

    fake.executor.fail_step = fails
    ends: dict[int, str] = {}
    while fake.engine.has_work:
        for sequence, event in fake.engine.step().events:
            if event.finish_reason:
                ends[sequence.id] = event.finish_reason
        fake.scheduler.check()
    assert ends == {ids[0]: "error", ids[1]: "error", ids[2]: "length"}
    assert "StepPlan([" in caplog.text, "the log has the plan"
    assert fake.idle()


def test_what_a_failed_step_would_have_written_is_never_found() -> None:
    fake = FakeEngine()
    fake.executor.fail_step = lambda plan: len(fake.executor.plans) == 1
    fake.engine.add(request(range(32)))
    run(fake)
    fake.engine.add(request(range(32)))
    run(fake)
    cached = [event.cached_tokens for event in fake.of_kind(RequestAdmitted)]  # type: ignore[attr-defined]  # of that kind
    assert cached == [0, 0]


def test_events_tell_a_request_once_however_often_it_is_preempted() -> None:
    fake = FakeEngine(blocks=12, max_model_len=96)
    ids = [fake.engine.add(request(range(start, start + 24), max_tokens=40))[0] for start in (0, 100, 200)]
    tokens = run(fake)
    assert all(tokens[one] == [100 + 24 + index for index in range(40)] for one in ids)
    assert len(fake.of_kind(Preempted)) > 0
    assert len(fake.of_kind(RequestArrived)) == len(fake.of_kind(RequestAdmitted)) == 3
    assert len(fake.of_kind(FirstToken)) == len(fake.of_kind(RequestFinished)) == 3
    assert sum(event.new_tokens for event in fake.of_kind(Stepped)) == 120  # type: ignore[attr-defined]  # of that kind
    assert sum(len(event.gaps) for event in fake.of_kind(Stepped)) == 117  # type: ignore[attr-defined]  # of that kind
    assert all(event.cached_tokens == 0 for event in fake.of_kind(RequestAdmitted))  # type: ignore[attr-defined]  # of that kind


def test_times_are_those_of_the_engines_clock() -> None:
    fake = FakeEngine(counting)
    fake.engine.add(request(range(40), max_tokens=3))
    run(fake)
    # 40 tokens in chunks of 32: the first token comes with the second step, at 10 ms each.
    assert [event.seconds for event in fake.of_kind(FirstToken)] == [pytest.approx(0.02)]  # type: ignore[attr-defined]  # of that kind
    assert [gap for event in fake.of_kind(Stepped) for gap in event.gaps] == [pytest.approx(0.01)] * 2  # type: ignore[attr-defined]  # of that kind


def test_of_a_prompt_that_is_given_up_only_what_steps_computed_counts_as_computed() -> None:
    fake = FakeEngine()
    for steps in (1, 3):
        (sequence,) = fake.engine.add(request(range(200), max_tokens=4))
        for _ in range(steps):
            fake.engine.step()
        fake.engine.abort(sequence)
    fake.engine.add(request(range(200), max_tokens=4))
    run(fake)
    told = [event for event in fake.events if isinstance(event, PromptComputed)]
    admitted = [event for event in fake.events if isinstance(event, RequestAdmitted)]
    assert [(one.computed_tokens, one.unreached_tokens) for one in told] == [(32, 168), (96, 72), (72, 0)]
    assert [one.cached_tokens for one in admitted] == [0, 32, 128]
    for one, other in zip(told, admitted, strict=True):
        assert one.request_id == other.request_id
        assert one.computed_tokens + one.unreached_tokens + other.cached_tokens == other.prompt_tokens


def test_a_request_that_waits_says_why_once() -> None:
    fake = FakeEngine(limits=ScheduleConfig(max_num_seqs=1, max_num_batched_tokens=64, prefill_chunk_size=32))
    fake.engine.add(request(range(20), max_tokens=8))
    (second,) = fake.engine.add(request(range(100, 120), max_tokens=2))
    waiting = fake.scheduler.sequence(second)
    assert waiting is not None
    run(fake)
    told = [event for event in fake.events if isinstance(event, RequestWaits)]
    assert [(one.request_id, one.cause) for one in told] == [(waiting.request.id, "rows")]
