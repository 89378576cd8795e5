"""Running sequences in columns, beside a slow list of sequences."""

from __future__ import annotations

import random

import numpy as np

from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence
from kveik.schedule.running_batch import RunningBatch
from tests.seeds import over_seeds


def sequence(id: int, *, length: int = 4, outputs: int = 1, max_tokens: int = 100, stops: tuple[int, ...] = ()) -> Sequence:
    """A sequence of `length` tokens, of which the last `outputs` are output."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=id % 100 / 10)
    request = Request(id=str(id), prompt=tuple(range(1, 1 + length - outputs)), sampling=sampling)
    made = Sequence.start(id=id, request=request, choice=0, seed=id, arrived=0.0)
    made.tokens += [50 + id] * outputs
    made.last_token = 0.0 if outputs else None
    made.end_length, made.stop_ids, made.admission = made.prompt_length + max_tokens, frozenset(stops), id
    return made


def batch_of(*sequences: Sequence, capacity: int = 16) -> RunningBatch:
    batch = RunningBatch(8)
    for row, one in enumerate(sequences):
        enter(batch, one, row, capacity=capacity)
    return batch


def enter(batch: RunningBatch, one: Sequence, row: int, *, computed: int | None = None, capacity: int = 16) -> None:
    batch.add(one, row, one.length - 1 if computed is None else computed)
    batch.capacity[row] = capacity


def offsets(*given: int) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(np.array(given, dtype=np.int64))))


def advance(batch: RunningBatch, tokens: list[int], given: list[int], now: float) -> list[float]:
    """Each row computed what was pending and got its tokens, all but the newest of which are computed too."""
    count = len(given)
    computed = batch.lengths[:count] + np.maximum(np.array(given, dtype=np.int64) - 1, 0)
    return batch.advance(computed, np.array(tokens, dtype=np.int64), offsets(*given), now)


def test_a_sequence_that_leaves_makes_a_gap_that_is_closed_when_rows_are_arranged() -> None:
    sequences = [sequence(id) for id in range(5)]
    batch = batch_of(*sequences)
    batch.remove(sequences[1])
    batch.remove(sequences[4])
    exchanges = batch.arrange(batch.single().astype(np.int64))
    assert [one.id for one in batch] == [0, 3, 2]
    assert exchanges == [(1, 3)]
    assert (len(batch), sequences[3].row, sequences[1].row) == (3, 1, None)
    batch.check()


def test_rows_with_one_token_come_first_then_those_with_several_then_those_without() -> None:
    sequences = [sequence(id) for id in range(5)]
    batch = batch_of(*sequences)
    counts = np.array([3, 0, 1, 5, 1])
    batch.arrange(counts)
    assert counts[:2].tolist() == [1, 1]
    assert set(counts[2:4].tolist()) == {3, 5}
    assert [counts[one.row] for one in sequences] == [3, 0, 1, 5, 1]
    assert counts[4] == 0
    batch.check()


def test_progress_is_a_view_of_the_column() -> None:
    one = sequence(0, length=10)
    assert one.computed == 0
    batch = batch_of(one)
    assert one.computed == 9
    batch.computed[0] = 5
    assert one.computed == 5
    batch.remove(one)
    assert (one.computed, one.reached) == (0, 5)


def test_several_tokens_of_a_row_come_in_order_and_share_the_time_evenly() -> None:
    sequences = [sequence(0), sequence(1), sequence(2)]
    batch = batch_of(*sequences)
    seconds = advance(batch, [7, 8, 9, 10], [1, 3, 0], 3.0)
    assert [one.tokens[4:] for one in sequences] == [[7], [8, 9, 10], []]
    assert seconds == [3.0, 1.0, 1.0, 1.0]
    assert batch.newest(3).tolist() == [7, 10, 52]


def test_a_gap_gets_no_token_and_has_no_waiting_time() -> None:
    sequences = [sequence(id) for id in range(3)]
    batch = batch_of(*sequences)
    batch.remove(sequences[1])
    assert advance(batch, [7, 8, 9], [1, 1, 1], 1.5) == [1.5, 1.5]
    assert [one.tokens[-1] for one in sequences] == [7, 51, 9]


def test_those_that_need_a_block_are_due_and_a_gap_never_is() -> None:
    sequences = [sequence(0), sequence(1, outputs=0), sequence(2)]
    batch = batch_of(*sequences, capacity=3)
    assert batch.due() == [0, 2], "a prompt's chunks get their blocks as they are given out"
    batch.remove(sequences[0])
    assert batch.due() == [2]
    batch.capacity[2] = 16
    assert batch.due() == []


def test_sequences_with_more_to_compute_are_behind_in_order_of_admission() -> None:
    first, second, third = sequence(3, length=8), sequence(1, outputs=0), sequence(2)
    batch = batch_of(third)
    enter(batch, first, 1, computed=2)
    enter(batch, second, 2)
    assert batch.behind() == [second, first]


def test_a_row_that_reaches_its_length_or_any_stop_token_is_looked_at() -> None:
    sequences = [sequence(0, max_tokens=2), sequence(1, stops=(9,)), sequence(2)]
    batch = batch_of(*sequences)
    given = np.array([1, 1, 1])
    advance(batch, [1, 1, 9], [1, 1, 1], 1.0)
    assert batch.ending(given) == [0, 2]
    batch.remove(sequences[1])
    assert batch.ending(given) == [0], "the only one with that stop token has gone"


def test_tokens_behind_a_stop_token_are_cut() -> None:
    batch = batch_of(sequence(0, stops=(9,)), sequence(1, max_tokens=3), sequence(2))
    tokens, bounds = batch.until_end(np.array([7, 9, 8, 1, 2, 3, 4, 5]), offsets(3, 4, 1))
    assert (tokens.tolist(), bounds.tolist()) == ([7, 9, 1, 2, 5], [0, 2, 4, 5])


def test_sampling_columns_follow_their_sequences() -> None:
    sequences = [sequence(id) for id in range(4)]
    batch = batch_of(*sequences)
    batch.remove(sequences[0])
    batch.arrange(batch.single().astype(np.int64))
    rows = batch.sampling(3)
    by_row = sorted((one.row, one.sampling.temperature, one.seed) for one in sequences[1:])
    assert rows.temperature.tolist() == [temperature for _, temperature, _ in by_row]
    assert rows.seeds[:, 0].tolist() == [seed for _, _, seed in by_row]
    assert rows.outputs.tolist() == [1, 1, 1]


@over_seeds(20)
def test_the_columns_agree_with_the_sequences_whatever_happens(seed: int) -> None:
    chance, batch = random.Random(seed), RunningBatch(8)
    slow: list[Sequence] = []
    for step in range(120):
        for _ in range(chance.randrange(3)):
            if slow and chance.random() < 0.4:
                batch.remove(slow.pop(chance.randrange(len(slow))))
        rows = {one.row for one in slow}
        while len(slow) < 8 and chance.random() < 0.5:
            row = min(set(range(8)) - rows)
            made = sequence(100 * step + len(slow), length=chance.randrange(2, 20), stops=chance.choice(((), (3,), (4, 5))))
            enter(batch, made, row, capacity=1 << 20)
            slow.append(made)
            rows.add(row)
        counts = np.array([chance.choice((0, 1, 1, 4)) if one else 0 for one in batch.sequences], dtype=np.int64)
        batch.arrange(counts)
        assert {one.id for one in batch} == {one.id for one in slow}
        assert [one.row for one in batch] == list(range(len(slow)))
        given = [chance.choice((0, 1, 1, 2)) for _ in slow]
        expected = {one.id: one.length + given[one.row or 0] for one in slow}
        advance(batch, [chance.randrange(9) for _ in range(sum(given))], given, float(step))
        batch.computed[: len(slow)] = batch.lengths[: len(slow)] - 1
        batch.check()
        assert {one.id: one.length for one in slow} == expected
