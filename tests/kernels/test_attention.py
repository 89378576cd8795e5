"""The door's attention gives what the slow reference gives, on steps of every shape, and never reads what belongs to nobody."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from kveik.kernels import attention, torch_attention
from tests.kernels import reference
from tests.kernels.reference import IN_FLOAT32, TORCH_BFLOAT16, Right
from tests.kernels.worlds import LAYER, Shape, World, alone, world
from tests.seeds import over_seeds


def attended(made: World, soft_cap: float | None = None) -> torch.Tensor:
    attention.write(made.cache, made.keys, made.values, made.batch)
    return attention.attend(made.queries, made.cache, made.batch, scale=0.3, soft_cap=soft_cap)


def right(made: World, soft_cap: float | None = None) -> Right:
    """After `attended`."""
    arithmetic = TORCH_BFLOAT16 if made.queries.dtype == torch.bfloat16 else IN_FLOAT32
    return reference.attend(made.queries, made.cache, made.batch, scale=0.3, soft_cap=soft_cap, arithmetic=arithmetic)


def assert_equals_reference(made: World, soft_cap: float | None = None) -> None:
    found = attended(made, soft_cap)
    right(made, soft_cap).assert_near(found)


def test_a_mixed_step_equals_the_reference():
    for block_size, window in product((8, 16, 32, 64), (None, 1, 5, 8, 24)):
        shape = Shape(block_size=block_size, window=window)
        assert_equals_reference(world(shape, [1, 7, 8, 9, 40, 65, 12, 33, 70], [1, 1, 1, 1, 1, 1, 12, 7, 70], seed=1))


def random_world(seed: int) -> World:
    chance = random.Random(seed)
    shape = Shape(
        kv_heads=chance.choice([1, 2, 3, 6]),
        head_dim=chance.choice([2, 8, 16]),
        block_size=chance.choice([8, 16, 32, 64]),
        window=chance.choice([None, None, 1, 3, 9, 30]),
    )
    counts = [1] * chance.randrange(30) + [chance.randint(2, 40) for _ in range(chance.randint(0, 3))] or [5]
    seq_lens = [count + chance.choice([0, 1, chance.randrange(120)]) for count in counts]
    return world(shape, seq_lens, counts, seed)


@over_seeds(30)
def test_random_steps_equal_the_reference(seed):
    assert_equals_reference(random_world(seed), soft_cap=[None, None, 2.0][seed % 3])


@over_seeds(30)
def test_a_scale_off_by_a_thousandth_and_a_wrong_slot_are_beyond_the_bound(seed):
    made = random_world(seed)
    attended(made)
    answer = right(made)
    if made.batch.window != 1:
        with pytest.raises(AssertionError, match="beyond their bound"):
            answer.assert_near(attention.attend(made.queries, made.cache, made.batch, scale=0.3003, soft_cap=None))
    block, within = divmod(int(made.batch.slot_mapping[-1]), made.batch.block_size)
    made.cache[block, :, :, within] = made.cache[block, :, :, within].flip(-1)
    with pytest.raises(AssertionError, match="beyond their bound"):
        answer.assert_near(attention.attend(made.queries, made.cache, made.batch, scale=0.3, soft_cap=None))


def test_a_window_of_8_reads_the_8_newest_positions():
    """One query at a time, over those that it may see and no others."""
    for context, chunk in product((7, 8, 9, 40), (4, 64)):
        count = min(chunk, context)
        made = world(Shape(window=8, block_size=8), [context], [count], seed=3)
        found, answer = attended(made), right(made)
        for token, position in enumerate(range(context - count, context)):
            keys, values = reference.read(made.cache, made.batch.tables[0], max(0, position - 7), position + 1, 8)
            keys, values = keys.repeat_interleave(3, 1), values.repeat_interleave(3, 1)
            weights = (torch.einsum("hd,phd->hp", made.queries[token].double(), keys) * 0.3).softmax(-1)
            plainly = torch.einsum("hp,phd->hd", weights, values)
            Right(plainly, answer.allowed[token]).assert_near(found[token])


def test_a_long_prefill_in_many_tiles_equals_the_reference():
    shape, tile = Shape(heads=2, kv_heads=1, head_dim=4), torch_attention.TILE_QUERIES
    assert_equals_reference(world(shape, [tile * 2 + 77], [tile * 2 + 5], seed=4))


def test_a_long_prefill_with_a_window_in_many_tiles_equals_the_reference():
    shape = Shape(heads=2, kv_heads=1, head_dim=4, window=150)
    assert_equals_reference(world(shape, [torch_attention.TILE_QUERIES * 3], [torch_attention.TILE_QUERIES * 3 - 20], seed=5))


def test_a_bound_on_scores_cuts_smaller_tiles_and_changes_nothing(monkeypatch):
    made = world(Shape(), [90], [80], seed=6)
    whole = attended(made)
    monkeypatch.setattr(torch_attention, "TILE_SCORES", 6 * 90 * 7)
    cut = attended(replace(made, batch=replace(made.batch, memo={})))
    answer = right(made)
    answer.assert_near(whole)
    answer.assert_near(cut)
    answer.assert_alike(cut, whole)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_rows_give_the_same_alone_as_together(soft_cap):
    made = world(Shape(window=11), [3, 64, 20, 9, 30, 41], [1, 1, 1, 1, 30, 6], seed=7)
    together = attended(made, soft_cap)
    answer = right(made, soft_cap)
    answer.assert_near(together)
    for row in range(6):
        part = slice(int(made.batch.query_start_loc[row]), int(made.batch.query_start_loc[row + 1]))
        by_itself = attention.attend(made.queries[part], made.cache, alone(made, row), scale=0.3, soft_cap=soft_cap)
        answer.of(part).assert_near(by_itself)
        answer.of(part).assert_alike(by_itself, together[part])


def test_one_row_far_longer_than_the_others_does_not_lengthen_them():
    made = world(Shape(), [8 * 200, *[20] * 30], [1] * 31, seed=8)
    assert_equals_reference(made)
    (reads,) = [memo for key, memo in made.batch.memo.items() if key[0] == "read"]
    gathered = sum(group.gather.rows * group.gather.length for group in reads.decodes)
    assert gathered <= 1.3 * (8 * 200 + 30 * 24)


def test_writing_touches_only_the_slots_given():
    made = world(Shape(), [5, 30], [1, 9], seed=9)
    before = made.storage.clone()
    attention.write(made.cache, made.keys, made.values, made.batch)
    twin = before.clone()
    reference.write(twin[:, LAYER], made.keys, made.values, made.batch)
    torch.testing.assert_close(made.storage, twin, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(torch.isnan(before), torch.isnan(made.storage))


def test_storage_of_a_single_block_is_read_and_written():
    made = world(Shape(), [5], [5], seed=10)
    single = made.storage[1:].clone()
    batch = replace(made.batch, tables=torch.zeros_like(made.batch.tables), slot_mapping=torch.arange(5))
    attention.write(single[:, LAYER], made.keys, made.values, batch)
    found = attention.attend(made.queries, single[:, LAYER], batch, scale=0.3, soft_cap=None)
    assert torch.equal(found, attended(made))
    right(made).assert_near(found)


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_bfloat16_stays_near_float32(kv_heads):
    shape = Shape(heads=6, kv_heads=kv_heads, head_dim=16, dtype=torch.bfloat16)
    assert_equals_reference(world(shape, [50, 3, 20, 90, *[30] * 9, 60], [1] * 13 + [40], seed=11))


def test_a_cache_of_another_type_than_the_queries_is_cast():
    made = world(Shape(dtype=torch.bfloat16), [50, 30], [1, 12], seed=12)
    wide = replace(made, queries=made.queries.float(), keys=made.keys.float(), values=made.values.float())
    found = attended(wide)
    assert found.dtype == torch.float32
    right(wide).assert_near(found)
