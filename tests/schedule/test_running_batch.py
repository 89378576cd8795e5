"""The running decodes in flat arrays, beside a slow list of sequences."""

from __future__ import annotations

import random

import numpy as np

from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence
from kveik.schedule.running_batch import RunningBatch
from tests.seeds import over_seeds

NOBODY: frozenset[int] = frozenset()


def decode(id: int, *, length: int = 4, capacity: int = 16, max_tokens: int = 100, stops: tuple[int, ...] = ()) -> Sequence:
    """A sequence of which all but the newest token is computed."""
    request = Request(id=str(id), prompt=tuple(range(1, length)), sampling=SamplingParams(max_tokens=max_tokens))
    sequence = Sequence.start(id=id, request=request, choice=0, seed=0, arrived=0.0)
    sequence.tokens.append(50 + id)
    sequence.computed, sequence.capacity, sequence.last_token = length - 1, capacity, 0.0
    sequence.end_length, sequence.stop_ids = length - 1 + max_tokens, frozenset(stops)
    return sequence


def roster_of(*sequences: Sequence) -> RunningBatch:
    running_batch = RunningBatch(8)
    for sequence in sequences:
        running_batch.add(sequence)
    return running_batch


def test_whoever_leaves_makes_a_gap_that_the_last_one_fills() -> None:
    running_batch = roster_of(*(decode(id) for id in range(5)))
    assert running_batch.close_gaps() == [0, 1, 2, 3, 4]
    running_batch.pop(1)
    running_batch.pop(4)
    assert [sequence.id for sequence in running_batch.values()] == [0, 2, 3]
    assert [None if one is None else one.id for one in running_batch.sequences] == [0, None, 2, 3, None]
    running_batch.check()
    assert running_batch.close_gaps() == [1]
    assert running_batch.decodes().ids == (0, 3, 2)
    assert running_batch.decodes().tokens.tolist() == [50, 53, 52]
    running_batch.check()


def test_the_ids_are_the_same_tuple_until_somebody_comes_or_goes() -> None:
    running_batch = roster_of(decode(0), decode(1))
    before = running_batch.decodes()
    running_batch.advance(np.array([7, 8]), NOBODY, 1.0)
    after = running_batch.decodes()
    assert after.ids is before.ids
    assert (before.starts.tolist(), before.tokens.tolist()) == ([3, 3], [50, 51]), "a plan changes no more"
    assert (after.starts.tolist(), after.tokens.tolist()) == ([4, 4], [7, 8])
    running_batch.add(decode(2))
    assert running_batch.decodes().ids == (0, 1, 2)


def test_a_gap_and_a_failed_row_get_no_token_and_have_no_waiting_time() -> None:
    sequences = [decode(id) for id in range(4)]
    running_batch = roster_of(*sequences)
    running_batch.pop(1)
    waited = running_batch.advance(np.array([7, 8, 9, 10]), frozenset({2}), 1.5)
    assert [one.tokens[-1] for one in sequences] == [7, 51, 52, 10]
    assert [one.computed for one in sequences] == [4, 3, 4, 4]
    assert [one.last_token for one in sequences] == [1.5, 0.0, 0.0, 1.5]
    assert waited.tolist() == [1.5, 1.5]


def test_those_who_need_a_block_are_due_and_a_gap_never_is() -> None:
    running_batch = roster_of(decode(0, capacity=3), decode(1, capacity=4), decode(2, capacity=3))
    running_batch.pop(0)
    assert running_batch.due() == [2]
    running_batch.give_room(2, 16)
    assert running_batch.due() == []


def test_whoever_reaches_its_length_or_says_anybodys_stop_token_is_looked_at() -> None:
    running_batch = roster_of(decode(0, max_tokens=2), decode(1, stops=(9,)), decode(2))
    tokens = np.array([1, 1, 9])
    running_batch.advance(tokens, NOBODY, 1.0)
    assert running_batch.ending(tokens) == [0, 2]
    running_batch.pop(1)
    assert running_batch.ending(tokens) == [0], "the only one with that stop token has gone"


def test_a_block_is_whole_when_its_last_position_is_computed() -> None:
    running_batch = roster_of(decode(0, length=16), decode(1, length=15), decode(2, length=8))
    running_batch.advance(np.array([1, 1, 1]), NOBODY, 1.0)
    assert running_batch.whole(3, 8) == [0, 2]
    assert running_batch.whole(1, 8) == [0], "only the first places were in the step"


@over_seeds(20)
def test_the_arrays_agree_with_the_sequences_whatever_happens(seed: int) -> None:
    chance, running_batch = random.Random(seed), RunningBatch(8)
    slow: list[Sequence] = []
    for step in range(120):
        for _ in range(chance.randrange(3)):
            if slow and chance.random() < 0.4:
                running_batch.pop(slow.pop(chance.randrange(len(slow))).id)
        running_batch.close_gaps()
        while len(slow) < 8 and chance.random() < 0.5:
            slow.append(decode(100 * step + len(slow), length=chance.randrange(2, 20), stops=chance.choice(((), (3,), (4, 5)))))
            running_batch.add(slow[-1])
        assert {sequence.id for sequence in running_batch.values()} == set(running_batch) == {sequence.id for sequence in slow}
        count = len(running_batch.decodes().ids)
        running_batch.advance(np.array([chance.randrange(9) for _ in range(count)], dtype=np.int64), NOBODY, float(step))
        running_batch.check()
