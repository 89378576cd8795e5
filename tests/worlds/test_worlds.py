"""Seeded worlds: random company, tiny pools, windows, aborts and failures, with every law checked in every step."""

from __future__ import annotations

import pytest

from tests.worlds.world import Guesses, Run, World

SEEDS_PER_TEST = 25


def run_worlds(first: int, count: int, sequences: int = 14, *, tiers: bool = False, guesses: bool = False) -> list[Run]:
    runs = []
    for seed in range(first, first + count):
        world = World.from_seed(seed, sequences)
        if guesses:
            world.with_guesses(seed)
        run = Run(world.with_tiers(seed) if tiers else world)
        try:
            run.run()
        except Exception as error:
            error.add_note(f"in the world of seed {seed}")
            raise
        runs.append(run)
    return runs


@pytest.mark.parametrize("first", range(0, 400, SEEDS_PER_TEST))
def test_in_every_world_all_laws_hold_and_everybody_finishes_with_the_right_answer(first: int) -> None:
    runs = run_worlds(first, SEEDS_PER_TEST)
    # A world in which nothing happens proves nothing.
    assert sum(run.preemptions for run in runs) > 0
    assert sum(run.scheduler.prefix_hits for run in runs) > 0


@pytest.mark.parametrize("first", range(0, 200, 2 * SEEDS_PER_TEST))
def test_with_tiers_that_are_slow_fail_and_forget_all_laws_hold_and_every_answer_is_right(first: int) -> None:
    runs = run_worlds(first, 2 * SEEDS_PER_TEST, sequences=20, tiers=True)
    tiers = [run.tiers for run in runs if run.tiers is not None]
    assert sum(one.landed for one in tiers) > 0
    assert sum(one.cancelled for one in tiers) > 0
    assert sum(one.found for one in tiers) > 0
    assert sum(sum(one.loaded_tokens.values()) for run in runs for one in run.everybody) > 0


@pytest.mark.parametrize("first", range(0, 200, 2 * SEEDS_PER_TEST))
@pytest.mark.parametrize("tiers", [False, True])
def test_with_guesses_right_wrong_too_long_and_random_every_answer_is_the_same(first: int, tiers: bool) -> None:
    runs = run_worlds(first, 2 * SEEDS_PER_TEST, sequences=20, tiers=tiers, guesses=True)
    proposers = [run.world.proposer for run in runs if isinstance(run.world.proposer, Guesses)]
    assert sum(one.right for one in proposers) > 100
    assert sum(one.wrong for one in proposers) > 100
    assert sum(run.several for run in runs) > 100, "rows that kept several tokens"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20_000, 30_000, 200))
def test_in_ten_thousand_worlds_with_rows_of_several_tokens_all_laws_hold(first: int) -> None:
    assert len(run_worlds(first, 200, tiers=first % 400 == 0, guesses=True)) == 200


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 14_000, 200))
def test_in_thousands_of_worlds_all_laws_hold(first: int) -> None:
    assert len(run_worlds(first, 200, sequences=24)) == 200


def test_who_needs_less_room_since_another_s_record_arrived_is_admitted_at_once() -> None:
    run_worlds(1540, 1, sequences=20, tiers=True)
