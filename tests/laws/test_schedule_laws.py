"""Laws 5, 6 and 10 over the scheduler; `tests/worlds` checks them in every step of every world as well."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kveik.request.sequence import Status
from tests.schedule.making import Desk, desk
from tests.schedule.rows import decodes_of, preempted_in
from tests.seeds import over_seeds


def crowd(one: Desk, chance: random.Random, count: int, longest: int) -> None:
    """Prompts with shared beginnings, and answers of all lengths."""
    for _ in range(count):
        shared = chance.choice((0, 10, 40))
        prompt = [1] * shared + [chance.randrange(100) for _ in range(chance.randrange(1, longest - shared - 40))]
        one.ask(prompt, chance.randrange(1, 40), priority=chance.randrange(3))


@given(
    seed=some.integers(0, 10_000),
    blocks=some.integers(10, 40),
    rows=some.integers(1, 12),
    chunk=some.integers(1, 80),
    tokens=some.integers(12, 100),
    policy=some.sampled_from(("fcfs", "priority")),
)
@settings(max_examples=60, deadline=None)
def test_every_decode_gets_its_token_and_no_step_exceeds_its_tokens(
    seed: int, blocks: int, rows: int, chunk: int, tokens: int, policy: str
) -> None:
    """Law 5."""
    one = desk(
        blocks,
        max_model_len=160,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        prefill_chunk_size=chunk,
        scheduling_policy=policy,
    )
    crowd(one, random.Random(seed), 12, 120)
    everybody = [one.scheduler.sequence(id_) for id_ in range(12)]
    while one.scheduler.has_work:
        due = {one_.id for one_ in everybody if one_ and one_.status is Status.RUNNING and one_.decoding}
        plan = one.step()
        served = {chunk_.sequence_id for chunk_ in decodes_of(plan)}
        assert served - set(plan.admitted) == due - set(preempted_in(plan))
        assert plan.tokens <= tokens
        assert plan.catch_up_tokens <= min(chunk, tokens - len(decodes_of(plan)))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@over_seeds(15)
def test_whoever_is_admitted_finishes_within_bounded_steps_in_the_smallest_pool(seed: int, policy: str) -> None:
    """Law 6: the pool holds one longest sequence and not a block more, and everybody wants to be the longest."""
    chance = random.Random(seed)
    one = desk(10, max_model_len=160, scheduling_policy=policy, prefill_chunk_size=chance.choice((5, 16, 64)))
    everybody = [one.ask(chance.randrange(1, 80), 80, priority=chance.randrange(3)) for _ in range(12)]
    plans = one.finish(most=12 * 250)
    assert all(sequence.output_count == 80 for sequence in everybody)
    assert sum(len(plan.preempted) for plan in plans) > 0
    assert not any(plan.empty for plan in plans)


@over_seeds(15)
def test_prompt_tokens_are_computed_or_found_and_counted_once(seed: int) -> None:
    """Law 10, with preemptions: hits and computed prompt tokens add up at admission."""
    chance = random.Random(seed)
    one = desk(chance.choice((10, 14, 60)), max_model_len=160)
    crowd(one, chance, 20, 120)
    everybody = [one.scheduler.sequence(id_) for id_ in range(20)]
    one.finish()
    hits = 0
    for sequence in everybody:
        assert sequence is not None
        assert sequence.cached_tokens is not None
        assert 0 <= sequence.cached_tokens < sequence.prompt_length
        hits += sequence.cached_tokens
        if not sequence.preemptions:
            assert one.computed[sequence.id] + sequence.cached_tokens == sequence.length - 1
    assert one.scheduler.prefix_queries == sum(sequence.prompt_length for sequence in everybody if sequence)
    assert one.scheduler.prefix_hits == hits
    assert hits > 0
