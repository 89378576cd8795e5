"""The door's attention gives what the slow reference gives, on steps of every shape, and never reads what belongs to nobody."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kveik.kernels import attention, torch_attention
from tests.kernels import reference
from tests.kernels.reference import IN_FLOAT32, TORCH_BFLOAT16, Right
from tests.kernels.worlds import LAYER, Shape, World, alone, over_seeds, world


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


@pytest.mark.parametrize("window", [None, 1, 5, 8, 24])
def test_a_mixed_step_equals_the_reference(window):
    for block_size in (8, 16, 32, 64):
        shape = Shape(block_size=block_size, window=window)
        assert_equals_reference(world(shape, [1, 7, 8, 9, 40, 65, 12, 33, 70], [1, 1, 1, 1, 1, 1, 12, 7, 70], seed=1))


def test_random_steps_equal_the_reference():
    over_seeds(30, random_step)


def random_step(seed: int) -> None:
    chance = random.Random(seed)
    shape = Shape(
        kv_heads=chance.choice([1, 2, 3, 6]),
        head_dim=chance.choice([2, 8, 16]),
        block_size=chance.choice([8, 16, 32, 64]),
        window=chance.choice([None, None, 1, 3, 9, 30]),
    )
    counts = [1] * chance.randrange(30) + [chance.randint(2, 40) for _ in range(chance.randint(0, 3))] or [5]
    contexts = [count + chance.choice([0, 1, chance.randrange(120)]) for count in counts]
    assert_equals_reference(world(shape, contexts, counts, seed), soft_cap=chance.choice([None, None, 2.0]))


@pytest.mark.parametrize("context", [7, 8, 9, 40])
@pytest.mark.parametrize("chunk", [4, 64])
def test_a_window_of_8_reads_the_8_newest_positions(context, chunk):
    """The mask, written out: query i sees keys j with i - 8 < j <= i."""
    made = world(Shape(window=8, block_size=8), [context], [min(chunk, context)], seed=3)
    found = attended(made)
    keys, values = reference.read(made.cache, made.batch.tables[0], max(0, context - min(chunk, context) - 7), context, 8)
    positions = torch.arange(context - len(keys), context)
    queries = torch.arange(context - len(found), context)
    visible = (positions <= queries[:, None]) & (positions > queries[:, None] - 8)
    scores = torch.einsum("qhd,khd->hqk", made.queries.double(), keys.repeat_interleave(3, 1)) * 0.3
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    plainly = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(3, 1))
    replace(right(made), answer=plainly).assert_near(found)


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
    right(made).assert_near(whole)
    right(made).assert_near(cut)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_rows_give_the_same_alone_as_together(soft_cap):
    made = world(Shape(window=11), [3, 64, 20, 9, 30, 41], [1, 1, 1, 1, 30, 6], seed=7)
    together = attended(made, soft_cap)
    answer = right(made, soft_cap)
    answer.assert_near(together)
    for row in range(6):
        part = slice(int(made.batch.query_starts[row]), int(made.batch.query_starts[row + 1]))
        by_itself = attention.attend(made.queries[part], made.cache, alone(made, row), scale=0.3, soft_cap=soft_cap)
        answer.of(part).assert_near(by_itself)


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
    batch = replace(made.batch, tables=torch.zeros_like(made.batch.tables), slots=torch.arange(5))
    attention.write(single[:, LAYER], made.keys, made.values, batch)
    found = attention.attend(made.queries, single[:, LAYER], batch, scale=0.3, soft_cap=None)
    attended(made)
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
