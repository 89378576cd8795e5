"""Index arrays of a step: small cases written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kveik.kernels.lookup import Records, gather_of, group_by_length, records_of, write_rows


def test_records_are_read_from_the_strides_of_a_layers_view():
    storage = torch.zeros(5, 3, 2, 4, 8, 16)
    assert records_of(storage[:, 1], 8) == Records(kv_heads=4, head_dim=16, block_size=8, block_records=3 * 2 * 4)


def test_a_block_that_is_not_contiguous_is_refused():
    with pytest.raises(AssertionError):
        records_of(torch.zeros(5, 3, 2, 4, 16, 8)[:, 1].transpose(3, 4), 8)


def test_keys_are_written_head_by_head():
    records = Records(kv_heads=2, head_dim=4, block_size=8, block_records=12)
    # slot 3 of block 5: the key of head 0 is row 3 of record 60, that of head 1 is row 3 of record 61.
    assert write_rows(torch.tensor([5 * 8 + 3]), records).tolist() == [[60 * 8 + 3, 61 * 8 + 3]]


def test_a_short_row_is_filled_with_its_own_last_block_and_marked():
    records = Records(kv_heads=1, head_dim=4, block_size=8, block_records=2)
    tables = np.array([[3, 4], [7, 0]])
    gather = gather_of(tables, np.array([0, 0]), np.array([16, 5]), records)
    assert gather.records.tolist() == [6, 8, 14, 14, 7, 9, 15, 15]
    assert gather.length == 16
    assert gather.outside is not None
    assert gather.outside.tolist() == [*range(16 + 5, 32), *range(32 + 16 + 5, 64)]


def test_a_row_whose_window_starts_later_begins_at_that_block():
    records = Records(kv_heads=1, head_dim=4, block_size=8, block_records=2)
    gather = gather_of(np.array([[0, 0, 9, 5]]), np.array([20]), np.array([32]), records)
    assert gather.records.tolist() == [18, 10, 19, 11]
    assert gather.mask is not None
    assert gather.mask.tolist() == [[True] * 4 + [False] * 12]


def test_equal_full_rows_have_nothing_outside():
    records = Records(kv_heads=2, head_dim=4, block_size=8, block_records=4)
    gather = gather_of(np.array([[1, 2], [3, 4]]), np.array([0, 0]), np.array([16, 16]), records)
    assert gather.outside is None
    assert gather.mask is None


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([], []),
        ([5], [[0]]),
        ([5, 5, 5], [[0, 1, 2]]),
        ([1000, 2, 2, 2], [[0], [1, 2, 3]]),
        ([2, 1000, 990, 3], [[1, 2], [0, 3]]),
    ],
)
def test_rows_are_grouped_by_length(lengths, groups):
    assert group_by_length(lengths, slack=0.25, free=8) == groups


@pytest.mark.parametrize("seed", range(20))
def test_groups_hold_every_row_once_and_fill_little(seed):
    lengths = np.random.default_rng(seed).integers(1, 300, size=64).tolist()
    groups = group_by_length(lengths, slack=0.25, free=64)
    assert sorted(row for group in groups for row in group) == list(range(64))
    for group in groups:
        real = sum(lengths[row] for row in group)
        assert max(lengths[row] for row in group) * len(group) - real <= max(64, 0.25 * real)
