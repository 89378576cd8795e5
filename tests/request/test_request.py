"""What a caller may ask for: every range has its ends, and a refusal names the parameter and the number."""

from __future__ import annotations

import dataclasses
import math

import pytest

from kveik.errors import BadValue
from kveik.request.request import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    Request,
    SamplingParams,
)


def sampling(**values: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, **values})  # type: ignore[arg-type]  # wrong kinds are the point of some tests


def request(**values: object) -> Request:
    return Request(**{"id": "r", "prompt": (1,), "sampling": sampling(), **values})  # type: ignore[arg-type]  # as in `sampling` above


ENDS = [
    ("max_tokens", 1, None),
    ("temperature", 0, 100),
    ("top_k", 0, None),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("seed", -(1 << 63), (1 << 64) - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("n", 1, MAX_CHOICES),
]


@pytest.mark.parametrize(("name", "low", "high"), ENDS)
def test_the_ends_of_a_range_are_inside_and_what_lies_past_them_is_not(name: str, low: int, high: int | None) -> None:
    sampling(**{name: low})
    outside = [low - 1]
    if high is not None:
        sampling(**{name: high})
        outside.append(high + 1)
    for value in outside:
        with pytest.raises(BadValue, match=f"{name} is {value}; it must be between") as refused:
            sampling(**{name: value})
        assert refused.value.param == name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["temperature", "min_p", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_no_parameter_takes_a_number_that_is_not_finite(name: str, value: float) -> None:
    with pytest.raises(BadValue, match=name):
        sampling(**{name: value})


@pytest.mark.parametrize("value", [0.0, -0.1, 1.001])
def test_top_p_keeps_something_and_at_most_everything(value: float) -> None:
    with pytest.raises(BadValue, match="it must be above 0 and at most 1"):
        sampling(top_p=value)
    assert sampling(top_p=1.0).top_p == 1.0


def test_a_repetition_penalty_of_zero_divides_by_nothing_and_is_refused() -> None:
    with pytest.raises(BadValue, match="repetition_penalty is 0; it must be above 0"):
        sampling(repetition_penalty=0)


def test_more_tokens_at_least_than_at_most_is_refused() -> None:
    assert sampling(min_tokens=16).min_tokens == 16
    with pytest.raises(BadValue, match=r"min_tokens is 17; it must be at most max_tokens, 16"):
        sampling(min_tokens=17)


def test_stop_strings_are_bounded_in_number_and_length() -> None:
    sampling(stop=("x" * MAX_STOP_CHARACTERS,) * MAX_STOPS)
    for stop in (("x",) * (MAX_STOPS + 1), ("",), ("x" * (MAX_STOP_CHARACTERS + 1),)):
        with pytest.raises(BadValue) as refused:
            sampling(stop=stop)
        assert refused.value.param == "stop"


def test_logit_bias_is_bounded_in_number_and_size() -> None:
    sampling(logit_bias=tuple((token, -100.0) for token in range(MAX_LOGIT_BIAS)))
    for bias in (((1, 100.5),), ((1, math.nan),), tuple((token, 1.0) for token in range(MAX_LOGIT_BIAS + 1))):
        with pytest.raises(BadValue) as refused:
            sampling(logit_bias=bias)
        assert refused.value.param == "logit_bias"


def test_only_a_temperature_of_zero_is_greedy() -> None:
    assert sampling(temperature=0).greedy
    assert not sampling(temperature=0.01).greedy


def test_a_prompt_of_no_tokens_is_refused() -> None:
    with pytest.raises(BadValue, match="it has 0 tokens"):
        request(prompt=())


@pytest.mark.parametrize("salt", ["", "x" * (MAX_SALT_CHARACTERS + 1)])
def test_a_salt_is_absent_or_has_characters(salt: str) -> None:
    assert request(cache_salt=None).cache_salt is None
    with pytest.raises(BadValue, match="cache_salt has"):
        request(cache_salt=salt)


def test_what_was_asked_cannot_be_changed() -> None:
    for value in (sampling(), request()):
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 2)
