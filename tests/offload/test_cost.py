"""Durations are learnt on made-up machines, and loading stops where it should."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from kveik.offload.cost import Costs, LoadCost, PrefillCost, Prospect, Rates, best_split, pairs
from tests.seeds import over_seeds

CHUNK = 512
MACHINES = {
    "a slow one": (0.02, 2e-3, 4e-7),
    "an accelerator": (5e-3, 2e-5, 1e-10),
    "mostly attention": (1e-3, 1e-4, 5e-8),
    "steps for nothing": (1e-9, 5e-4, 1e-8),
    "a thousand times slower": (5.0, 5e-1, 1e-5),
}


def true_seconds(machine: Sequence[float], tokens: int, context: int) -> float:
    step, token, pair = machine
    return step * -(-tokens // CHUNK) + token * tokens + pair * pairs(tokens, context)


def serve(cost: PrefillCost, machine: Sequence[float], chance: random.Random, steps: int, *, outliers: float = 0.0) -> None:
    """Steps of a server: mostly whole chunks, at any context, with noise of a tenth; some take 50 times as long."""
    for _ in range(steps):
        tokens = chance.choice((CHUNK, CHUNK, CHUNK, chance.randrange(1, CHUNK)))
        context = CHUNK * chance.randrange(16)
        seconds = true_seconds(machine, tokens, context) * chance.lognormvariate(0.0, 0.1)
        cost.observe(tokens, pairs(tokens, context), seconds * (50.0 if chance.random() < outliers else 1.0))


def worst_error(cost: PrefillCost, machine: Sequence[float]) -> float:
    cases = [(100, 0), (512, 0), (2000, 0), (8000, 0), (512, 8000), (2000, 6000)]
    return max(abs(cost.seconds(*case) / true_seconds(machine, *case) - 1.0) for case in cases)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@over_seeds(4)
def test_prefill_seconds_are_learnt_whatever_the_machine_in_spite_of_outliers(machine: Sequence[float], seed: int) -> None:
    cost = PrefillCost(CHUNK)
    serve(cost, machine, random.Random(seed), 300, outliers=0.03)
    assert worst_error(cost, machine) < 0.25


def test_after_three_steps_the_scale_is_right_already() -> None:
    for machine in MACHINES.values():
        cost = PrefillCost(CHUNK)
        serve(cost, machine, random.Random(0), 3)
        assert 0.3 < cost.seconds(2000, 2000) / true_seconds(machine, 2000, 2000) < 3.0


def test_a_machine_that_becomes_slower_or_quicker_is_followed() -> None:
    alone = MACHINES["a slow one"]
    crowded = [5.0 * rate for rate in alone]
    cost, chance = PrefillCost(CHUNK), random.Random(5)
    for machine in (alone, crowded, alone):
        serve(cost, machine, chance, 300)
        assert worst_error(cost, machine) < 0.5


def test_one_step_that_took_a_minute_changes_little() -> None:
    machine = MACHINES["a slow one"]
    cost = PrefillCost(CHUNK)
    serve(cost, machine, random.Random(1), 200)
    before = cost.seconds(4000, 0)
    cost.observe(CHUNK, pairs(CHUNK, 0), 60.0)
    assert cost.seconds(4000, 0) < 1.15 * before


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_durations_that_are_none_are_not_learnt_from(seconds: float) -> None:
    rates = Rates((1.0, 2.0))
    rates.observe((1.0, 1.0), seconds)
    rates.observe((0.0, 0.0), 1.0)
    assert rates.rates == pytest.approx([1.0, 2.0])


def test_what_only_one_size_was_seen_of_stays_finite_for_ever() -> None:
    cost = PrefillCost(CHUNK)
    for _ in range(20_000):
        cost.observe(CHUNK, pairs(CHUNK, 0), 0.25)
    assert cost.seconds(CHUNK, 0) == pytest.approx(0.25, rel=0.02)
    assert all(math.isfinite(rate) and rate > 0 for rate in cost.rates.rates)


def test_a_load_has_its_latency_and_its_bandwidth() -> None:
    cost, chance = LoadCost(), random.Random(2)
    for number in range(200):
        size = chance.choice((10_000, 1_000_000, 100_000_000))
        cost.observe(size, (0.02 + size / 2e8) * chance.lognormvariate(0.0, 0.1), float(number))
    few, many = cost.seconds_each(np.array([10_000, 200_000_000]), 200.0)
    assert few == pytest.approx(0.02, rel=0.2)
    assert many == pytest.approx(1.02, rel=0.2)


def test_what_waits_already_is_waited_for_and_nothing_takes_no_time() -> None:
    cost = LoadCost((0.0010, 1e-6))
    cost.queued(5_000_000)
    assert cost.seconds_each(np.array([0, 1_000_000]), 0.0).tolist() == pytest.approx([0.0, 6.001])
    cost.queued(-5_000_000)
    assert cost.seconds_each(np.array([1_000_000]), 0.0)[0] == pytest.approx(1.001)


def test_a_tier_that_was_slow_is_tried_again_after_a_while_and_a_quick_one_stays_known() -> None:
    slow, quick, size = LoadCost(), LoadCost(), np.array([100_000_000])
    for number in range(50):
        slow.late(100_000_000, 5.0, float(number))
        quick.observe(100_000_000, 0.01, float(number))
    assert slow.seconds_each(size, 50.0)[0] > 3.0
    assert slow.seconds_each(size, 3050.0)[0] < 0.15
    assert quick.seconds_each(size, 3050.0)[0] == pytest.approx(0.01, rel=0.1)


def test_a_load_that_was_given_up_early_teaches_nothing() -> None:
    cost = LoadCost((1.0, 1e-9))
    cost.late(1000, 0.1, 1.0)
    assert cost.rates.count == 0


def drawn_prospect(chance: random.Random, tiers: int, block: int = 16) -> tuple[Prospect, int]:
    cuts = chance.randrange(1, 40)
    places = sorted(chance.sample(range(1, 400), cuts - 1))
    tokens = np.array([block * place for place in [0, *places]], dtype=np.int64)
    steps = np.array([[chance.choice((0, 3_000_000)) if cut else 0 for cut in range(cuts)] for _ in range(tiers)])
    return Prospect(tokens, steps.cumsum(axis=1)), int(tokens[-1]) + chance.randrange(1, 3000)


def slow_best(prospect: Prospect, length: int, prefill: PrefillCost, tiers: Sequence[LoadCost]) -> tuple[float, int]:
    """Every cut by itself; the first of the quickest."""
    found = []
    for cut, tokens in enumerate(prospect.tokens.tolist()):
        sizes = [int(row[cut]) for row in prospect.sizes]
        loads = [tier.rates.seconds((1.0, size)) if size else 0.0 for tier, size in zip(tiers, sizes, strict=True)]
        found.append((max(loads) + prefill.seconds(length - tokens, tokens), cut))
    return min(found)


@over_seeds(30)
def test_loading_stops_where_trying_every_place_says_so(seed: int) -> None:
    chance = random.Random(seed)
    prefill = PrefillCost(CHUNK, (10 ** chance.uniform(-3, -1), 10 ** chance.uniform(-5, -2), 10 ** chance.uniform(-10, -7)))
    tiers = [LoadCost((10 ** chance.uniform(-4, 0), 10 ** chance.uniform(-10, -7))) for _ in range(2)]
    prospect, length = drawn_prospect(chance, len(tiers))
    split = best_split(prospect, length, prefill, tiers, 0.0)
    seconds, cut = slow_best(prospect, length, prefill, tiers)
    assert split.seconds == pytest.approx(seconds)
    assert split.cut == cut
    assert split.tokens == prospect.tokens[split.cut]
    assert split.seconds <= split.recompute_seconds
    # Whoever waits that long and then has it was not better off with computing.
    assert split.patience + split.compute_seconds == pytest.approx(split.recompute_seconds)
    assert split.patience >= split.load_seconds - 1e-9


def test_nothing_is_loaded_where_computing_is_quicker() -> None:
    prospect = Prospect(np.array([0, 16]), np.array([[0, 1_000_000]]))
    split = best_split(prospect, 20, PrefillCost(CHUNK), [LoadCost((10.0, 1e-9))], 0.0)
    assert (split.cut, split.load_seconds, split.patience) == (0, 0.0, 0.0)


def test_tiers_load_side_by_side() -> None:
    prospect = Prospect(np.array([0, 1000]), np.array([[0, 1_000_000], [0, 1_000_000]]))
    split = best_split(prospect, 1001, PrefillCost(CHUNK), [LoadCost((0.1, 1e-9)), LoadCost((0.2, 1e-9))], 0.0)
    assert split.load_seconds == pytest.approx(0.201)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@over_seeds(3)
def test_decisions_that_were_learnt_cost_little_more_than_the_best_ones(machine: Sequence[float], seed: int) -> None:
    """Tiers about as quick as computing, where a wrong decision is easiest; regret over all of them is below 3%."""
    chance, prefill, now = random.Random(seed), PrefillCost(CHUNK), 0.0
    byte = machine[1] * 16 / 3_000_000
    truth = [(20 * machine[1], 0.5 * byte), (200 * machine[1], 0.9 * byte)]
    tiers, perfect = [LoadCost(), LoadCost()], [LoadCost(one) for one in truth]
    serve(prefill, machine, chance, 300)
    for _ in range(200):
        now += 1.0
        for tier, (load, each) in zip(tiers, truth, strict=True):
            size = 3_000_000 * chance.randrange(1, 300)
            tier.observe(size, (load + each * size) * chance.lognormvariate(0.0, 0.1), now)
    known, spent, best = PrefillCost(CHUNK, machine), 0.0, 0.0
    for _ in range(200):
        prospect, length = drawn_prospect(chance, len(tiers))
        split = best_split(prospect, length, prefill, tiers, now)
        only = Prospect(prospect.tokens[[split.cut]], prospect.sizes[:, [split.cut]])
        spent += best_split(only, length, known, perfect, 0.0).seconds
        best += best_split(prospect, length, known, perfect, 0.0).seconds
    assert spent < 1.03 * best


def test_what_was_learnt_outlives_a_restart_and_what_is_malformed_does_not() -> None:
    costs = Costs(PrefillCost(CHUNK), {"disk": LoadCost()})
    serve(costs.prefill, MACHINES["a slow one"], random.Random(0), 100)
    again = Costs(PrefillCost(CHUNK), {"disk": LoadCost(), "remote": LoadCost()})
    again.restore(costs.learnt())
    assert again.prefill.seconds(700, 300) == pytest.approx(costs.prefill.seconds(700, 300))
    with pytest.raises(ValueError, match="rates"):
        again.restore({"seconds of computing": np.ones(7)})
    with pytest.raises(ValueError, match="rates"):
        again.restore({"seconds of computing": np.array([1.0, np.nan, 1.0])})
