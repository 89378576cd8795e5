"""Seconds of loading are learnt on made-up machines, and loading stops where it should."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from kveik.offload.cost import LoadCost, Prospect, Rates, best_split
from kveik.schedule.step_cost import StepCost
from tests.schedule.test_step_cost import CHUNK, MACHINES, predicted, serve
from tests.seeds import over_seeds


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_durations_that_are_none_are_not_learnt_from(seconds: float) -> None:
    rates = Rates((1.0, 2.0))
    rates.observe((1.0, 1.0), seconds)
    rates.observe((0.0, 0.0), 1.0)
    assert rates.rates == pytest.approx([1.0, 2.0])


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


def slow_best(prospect: Prospect, length: int, prefill: StepCost, tiers: Sequence[LoadCost]) -> tuple[float, int]:
    """Every cut by itself; the first of the quickest."""
    found = []
    for cut, tokens in enumerate(prospect.tokens.tolist()):
        sizes = [int(row[cut]) for row in prospect.sizes]
        loads = [tier.rates.seconds((1.0, size)) if size else 0.0 for tier, size in zip(tiers, sizes, strict=True)]
        found.append((max(loads) + predicted(prefill, length - tokens, tokens), cut))
    return min(found)


@over_seeds(30)
def test_loading_stops_where_trying_every_place_says_so(seed: int) -> None:
    chance = random.Random(seed)
    prefill = StepCost((10 ** chance.uniform(-3, -1), 10 ** chance.uniform(-5, -2), 10 ** chance.uniform(-10, -7)))
    tiers = [LoadCost((10 ** chance.uniform(-4, 0), 10 ** chance.uniform(-10, -7))) for _ in range(2)]
    prospect, length = drawn_prospect(chance, len(tiers))
    split = best_split(prospect, length, prefill, CHUNK, tiers, 0.0)
    seconds, cut = slow_best(prospect, length, prefill, tiers)
    assert split.seconds == pytest.approx(seconds)
    assert split.cut == cut
    assert split.tokens == prospect.tokens[split.cut]
    assert split.seconds <= split.recompute_seconds
    # Whoever waits that long and then has it was not better off with computing.
    assert split.timeout + split.compute_seconds == pytest.approx(split.recompute_seconds)
    assert split.timeout >= split.load_seconds - 1e-9


def test_nothing_is_loaded_where_computing_is_quicker() -> None:
    prospect = Prospect(np.array([0, 16]), np.array([[0, 1_000_000]]))
    split = best_split(prospect, 20, StepCost(), CHUNK, [LoadCost((10.0, 1e-9))], 0.0)
    assert (split.cut, split.load_seconds, split.timeout) == (0, 0.0, 0.0)


def test_tiers_load_side_by_side() -> None:
    prospect = Prospect(np.array([0, 1000]), np.array([[0, 1_000_000], [0, 1_000_000]]))
    split = best_split(prospect, 1001, StepCost(), CHUNK, [LoadCost((0.1, 1e-9)), LoadCost((0.2, 1e-9))], 0.0)
    assert split.load_seconds == pytest.approx(0.201)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@over_seeds(3)
def test_decisions_that_were_learnt_cost_little_more_than_the_best_ones(machine: Sequence[float], seed: int) -> None:
    """Tiers about as quick as computing, where a wrong decision is easiest; regret over all of them is below 3%."""
    chance, prefill, now = random.Random(seed), StepCost(), 0.0
    byte = machine[1] * 16 / 3_000_000
    truth = [(20 * machine[1], 0.5 * byte), (200 * machine[1], 0.9 * byte)]
    tiers, perfect = [LoadCost(), LoadCost()], [LoadCost(one) for one in truth]
    serve(prefill, machine, chance, 300)
    for _ in range(200):
        now += 1.0
        for tier, (load, each) in zip(tiers, truth, strict=True):
            size = 3_000_000 * chance.randrange(1, 300)
            tier.observe(size, (load + each * size) * chance.lognormvariate(0.0, 0.1), now)
    known, spent, best = StepCost(machine), 0.0, 0.0
    for _ in range(200):
        prospect, length = drawn_prospect(chance, len(tiers))
        split = best_split(prospect, length, prefill, CHUNK, tiers, now)
        only = Prospect(prospect.tokens[[split.cut]], prospect.sizes[:, [split.cut]])
        spent += best_split(only, length, known, CHUNK, perfect, 0.0).seconds
        best += best_split(prospect, length, known, CHUNK, perfect, 0.0).seconds
    assert spent < 1.03 * best
