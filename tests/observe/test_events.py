import dataclasses
from typing import get_args

import pytest

from kveik import errors
from kveik.observe import events
from kveik.observe.events import REFUSED_REASONS, BlockCounts, Event, RequestAdmitted, RequestRefused
from kveik.request.sequence import FinishReason


def test_every_event_is_a_frozen_value():
    for kind in get_args(Event):
        assert dataclasses.is_dataclass(kind)
        assert kind.__dataclass_params__.frozen
        assert kind.__slots__ is not None


def test_reasons_to_finish_are_those_of_sequences():
    assert set(events.FINISHED_REASONS) == set(get_args(FinishReason))


@pytest.mark.parametrize(
    "error, reason",
    [
        (errors.BadValue("x"), "bad_value"),
        (errors.PromptTooLong(tokens=9, allowed=8), "prompt_too_long"),
        (errors.Overloaded("x"), "overloaded"),
        (errors.NotAuthorized("x"), "not_authorized"),
        (errors.ModelNotFound(("y",)), "model_not_found"),
        (errors.BodyTooLarge(allowed=1), "body_too_large"),
        (errors.Unsupported("x"), "unsupported"),
        (errors.DoesNotFit("x"), "does_not_fit"),
        (errors.Refused("x"), "other"),
    ],
)
def test_a_refusal_is_named_after_what_the_caller_was_told(error, reason):
    assert RequestRefused.because_of(error).reason == reason


def test_every_refusal_that_there_is_has_a_reason_of_the_closed_set():
    kinds = [errors.Refused]
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert RequestRefused.because_of(kind.__new__(kind)).reason in REFUSED_REASONS


def test_a_kind_of_a_known_refusal_counts_as_that_one():
    class TooHot(errors.BadValue):
        pass

    assert RequestRefused.because_of(TooHot("x")).reason == "bad_value"


def test_the_parts_of_a_prompt_and_of_a_pool_sum_up():
    admitted = RequestAdmitted("r", prompt_tokens=1000, cached_tokens=600, queue_seconds=0.0)
    assert admitted.pool_tokens == 600
    assert BlockCounts(free=1, cached=2, held=3).total == 6
