"""Settings of the scheduler and fields of a request that are refused at the door."""

from __future__ import annotations

import pytest

from kveik.config import ScheduleConfig
from kveik.errors import BadValue
from kveik.request.request import Request, SamplingParams


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_ageing_must_be_a_positive_time(value: float) -> None:
    with pytest.raises(BadValue, match="priority-aging-seconds"):
        ScheduleConfig(priority_aging_seconds=value)


@pytest.mark.parametrize("priority", [10**400, -(10**10)])
def test_a_priority_beyond_any_use_is_refused(priority: int) -> None:
    with pytest.raises(BadValue, match="priority"):
        Request(id="r", prompt=(1,), sampling=SamplingParams(max_tokens=1), priority=priority)
