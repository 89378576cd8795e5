"""Durations of steps are learnt on made-up machines, from every step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from kveik.schedule.step_cost import DECODES_TOGETHER, StepCost
from tests.seeds import over_seeds

CHUNK = 512
MACHINES = {
    "a slow one": (0.02, 2e-3, 4e-7),
    "an accelerator": (5e-3, 2e-5, 1e-10),
    "mostly attention": (1e-3, 1e-4, 5e-8),
    "steps for nothing": (1e-9, 5e-4, 1e-8),
    "a thousand times slower": (5.0, 5e-1, 1e-5),
}


def pairs(tokens: int, context: int) -> int:
    """Pairs of a new token and one that it reads: `tokens` new ones after `context` others."""
    return tokens * context + tokens * (tokens + 1) // 2


def predicted(cost: StepCost, tokens: int, context: int) -> float:
    return float(cost.prefill_seconds(np.array([tokens]), np.array([context]), CHUNK)[0])


def true_seconds(machine: Sequence[float], tokens: int, context: int) -> float:
    step, token, pair = machine
    return step * -(-tokens // CHUNK) + token * tokens + pair * pairs(tokens, context)


def serve(cost: StepCost, machine: Sequence[float], chance: random.Random, steps: int, *, outliers: float = 0.0) -> None:
    """Steps of a server: mostly whole chunks, at any context, with noise of a tenth; some take 50 times as long."""
    for _ in range(steps):
        tokens = chance.choice((CHUNK, CHUNK, CHUNK, chance.randrange(1, CHUNK)))
        context = CHUNK * chance.randrange(16)
        seconds = true_seconds(machine, tokens, context) * chance.lognormvariate(0.0, 0.1)
        cost.observe(1, tokens, pairs(tokens, context), seconds * (50.0 if chance.random() < outliers else 1.0))


def worst_error(cost: StepCost, machine: Sequence[float]) -> float:
    cases = [(100, 0), (512, 0), (2000, 0), (8000, 0), (512, 8000), (2000, 6000)]
    return max(abs(predicted(cost, *case) / true_seconds(machine, *case) - 1.0) for case in cases)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@over_seeds(4)
def test_prefill_seconds_are_learnt_whatever_the_machine_in_spite_of_outliers(machine: Sequence[float], seed: int) -> None:
    cost = StepCost()
    serve(cost, machine, random.Random(seed), 300, outliers=0.03)
    assert worst_error(cost, machine) < 0.25


def test_after_three_steps_the_scale_is_right_already() -> None:
    for machine in MACHINES.values():
        cost = StepCost()
        serve(cost, machine, random.Random(0), 3)
        assert 0.3 < predicted(cost, 2000, 2000) / true_seconds(machine, 2000, 2000) < 3.0


def test_a_machine_that_becomes_slower_or_quicker_is_followed() -> None:
    alone = MACHINES["a slow one"]
    crowded = [5.0 * rate for rate in alone]
    cost, chance = StepCost(), random.Random(5)
    for machine in (alone, crowded, alone):
        serve(cost, machine, chance, 300)
        assert worst_error(cost, machine) < 0.5


def test_one_step_that_took_a_minute_changes_little() -> None:
    machine = MACHINES["a slow one"]
    cost = StepCost()
    serve(cost, machine, random.Random(1), 200)
    before = predicted(cost, 4000, 0)
    cost.observe(1, CHUNK, pairs(CHUNK, 0), 60.0)
    assert predicted(cost, 4000, 0) < 1.15 * before


def test_what_only_one_size_was_seen_of_stays_finite_for_ever() -> None:
    cost = StepCost()
    for _ in range(20_000):
        cost.observe(1, CHUNK, pairs(CHUNK, 0), 0.25)
    assert predicted(cost, CHUNK, 0) == pytest.approx(0.25, rel=0.02)
    assert all(math.isfinite(rate) and rate > 0 for rate in cost.prefills.rates)


def decode(cost: StepCost, steps: int, chance: random.Random) -> None:
    """Steps of decodes alone, on a machine that reads weights for 30 ms and 2 µs for each token of context."""
    for _ in range(steps):
        rows, context = chance.randrange(1, 65), chance.randrange(10, 4000)
        cost.observe(rows, rows, rows * context, decode_seconds(rows, rows * context) * chance.lognormvariate(0.0, 0.1))


def decode_seconds(rows: int, read: int) -> float:
    return 0.03 + 4e-4 * rows + 2e-6 * read


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_a_day_of_decodes_teaches_their_seconds_and_unteaches_nothing_of_prefills(machine: Sequence[float]) -> None:
    cost, chance = StepCost(), random.Random(3)
    serve(cost, machine, chance, 300)
    decode(cost, 5000, chance)
    assert worst_error(cost, machine) < 0.25
    for rows, context in ((1, 100), (8, 1000), (64, 1000), (32, 3000)):
        assert cost.seconds(rows, rows, rows * context) == pytest.approx(decode_seconds(rows, rows * context), rel=0.2)


def test_one_step_is_predicted_as_a_prefill_where_a_row_has_more_than_one_token() -> None:
    cost = StepCost((1.0, 0.1, 1e-9))
    decode(cost, 100, random.Random(0))
    assert cost.seconds(3, 12, 0) == pytest.approx(2.2)
    assert cost.seconds(3, 3, 0) < 0.1


def test_decodes_are_observed_together() -> None:
    cost = StepCost()
    for _ in range(DECODES_TOGETHER - 1):
        cost.observe(2, 2, 20, 0.01)
    assert cost.decodes.count == 0
    cost.observe(2, 2, 20, 0.01)
    assert cost.decodes.count == 1


def test_what_was_learnt_outlives_a_restart_and_what_is_malformed_does_not() -> None:
    cost, again = StepCost(), StepCost()
    serve(cost, MACHINES["a slow one"], random.Random(0), 100)
    again.restore(cost.learnt())
    assert predicted(again, 700, 300) == pytest.approx(predicted(cost, 700, 300))
    with pytest.raises(ValueError, match="rates"):
        again.restore({"seconds of prefill steps": np.ones(7)})
    with pytest.raises(ValueError, match="rates"):
        again.restore({"seconds of decode steps": np.array([1.0, np.nan, 1.0])})
