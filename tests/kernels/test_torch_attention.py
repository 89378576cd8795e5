"""Attention in torch over quantised storage: it computes over exactly the values that the stored bytes mean."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kveik.kernels import torch_attention
from kveik.kernels.kv_types import FP8_E4M3, FP8_E5M2, INT8, KvType, parts, plain, quantise
from tests.kernels import reference
from tests.kernels.reference import IN_FLOAT32, TORCH_BFLOAT16, Right
from tests.kernels.worlds import LAYER, LAYERS, Shape, World, alone, world
from tests.seeds import over_seeds

QUANTISED = [INT8, FP8_E4M3, FP8_E5M2]
by_type = pytest.mark.parametrize("kv_type", QUANTISED, ids=lambda one: one.name)


def quantised(made: World, kv_type: KvType) -> World:
    """The same world over records of bytes. What held NaN holds 0xFF: NaN as a scale, and as a value where there is one."""
    blocks, _, _, heads, size, dim = made.storage.shape
    width = kv_type.record_bytes(size, dim)
    storage = torch.full((blocks, LAYERS, 2, heads, width), 0xFF, dtype=torch.uint8)
    stored, scales = parts(storage, size)
    known = ~made.storage.isnan().any(-1)
    stored[known], scales[known] = quantise(made.storage[known], kv_type)
    return replace(made, storage=storage, batch=replace(made.batch, kv_type=kv_type, memo={}))


def attended(made: World, soft_cap: float | None = None) -> Tensor:
    torch_attention.write(made.cache, made.keys, made.values, made.batch)
    return torch_attention.attend(made.queries, made.cache, made.batch, scale=0.3, soft_cap=soft_cap)


def right(made: World, kv_type: KvType, soft_cap: float | None = None) -> Right:
    """The slow reference over the values that the storage means, after `attended`."""
    values, batch = plain(made.cache, made.batch.block_size, kv_type), replace(made.batch, kv_type=None)
    arithmetic = TORCH_BFLOAT16 if made.queries.dtype == torch.bfloat16 else IN_FLOAT32
    return reference.attend(made.queries, values, batch, scale=0.3, soft_cap=soft_cap, arithmetic=arithmetic)


def assert_equals_reference(made: World, kv_type: KvType, soft_cap: float | None = None) -> None:
    found = attended(made, soft_cap)
    right(made, kv_type, soft_cap).assert_near(found)


@by_type
@over_seeds(12)
def test_random_steps_equal_the_reference_over_what_is_stored(kv_type: KvType, seed: int) -> None:
    chance = random.Random(seed)
    shape = Shape(
        kv_heads=chance.choice([1, 2, 3, 6]),
        head_dim=chance.choice([8, 16, 64]),
        block_size=chance.choice([8, 16, 32, 64]),
        window=chance.choice([None, None, 1, 3, 9, 30]),
    )
    counts = [1] * chance.randrange(20) + [chance.randint(2, 40) for _ in range(chance.randint(0, 3))] or [5]
    seq_lens = [count + chance.choice([0, 1, chance.randrange(120)]) for count in counts]
    made = quantised(world(shape, seq_lens, counts, seed), kv_type)
    assert_equals_reference(made, kv_type, soft_cap=chance.choice([None, None, 2.0]))


@by_type
def test_a_step_is_near_the_one_over_plain_storage(kv_type: KvType) -> None:
    shape = Shape(heads=6, kv_heads=3, head_dim=64)
    made = world(shape, [50, 3, 20, 90, 60], [1, 1, 1, 1, 40], seed=2)
    close = attended(quantised(made, kv_type))
    exact = attended(made)
    error = (close - exact).norm() / exact.norm()
    # Half steps of 1/254 of a row's largest value, and of 1/16 and 1/8 of a value, in keys and in values.
    assert error < {"int8": 0.015, "fp8_e4m3": 0.06, "fp8_e5m2": 0.12}[kv_type.name]
    assert error > 1e-4, "nothing was quantised"


@by_type
def test_writing_touches_only_the_slots_given_and_writes_the_promised_bytes(kv_type: KvType) -> None:
    made = quantised(world(Shape(), [5, 30], [1, 9], seed=3), kv_type)
    twin = made.storage.clone()
    torch_attention.write(made.cache, made.keys, made.values, made.batch)
    stored, scales = parts(twin[:, LAYER], made.batch.block_size)
    for token, slot in enumerate(made.batch.slot_mapping.tolist()):
        block, within = divmod(slot, made.batch.block_size)
        for kind, written in enumerate((made.keys, made.values)):
            stored[block, kind, :, within], scales[block, kind, :, within] = quantise(written[token], kv_type)
    assert torch.equal(made.storage, twin)


@by_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_context_is_read_piece_by_piece_and_changes_nothing(
    kv_type: KvType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = quantised(world(Shape(head_dim=16, dtype=dtype), [200, 90], [1, 70], seed=4), kv_type)
    whole = attended(made)
    assert whole.dtype == dtype
    monkeypatch.setattr(torch_attention, "DEQUANTISED_VALUES", 8 * 16 * 3)
    assert torch.equal(attended(made), whole)
    assert_equals_reference(made, kv_type)


@by_type
def test_rows_give_the_same_alone_as_together(kv_type: KvType) -> None:
    made = quantised(world(Shape(window=11), [3, 64, 20, 9, 30, 41], [1, 1, 1, 1, 30, 6], seed=7), kv_type)
    together = attended(made)
    answer = right(made, kv_type)
    answer.assert_near(together)
    for row in range(6):
        part = slice(int(made.batch.query_start_loc[row]), int(made.batch.query_start_loc[row + 1]))
        own = torch_attention.attend(made.queries[part], made.cache, alone(made, row), scale=0.3, soft_cap=None)
        answer.of(part).assert_near(own)
        answer.of(part).assert_alike(own, together[part])


@by_type
def test_storage_of_a_single_block_is_read_and_written(kv_type: KvType) -> None:
    made = quantised(world(Shape(), [5], [5], seed=10), kv_type)
    single = made.storage[1:].clone()
    batch = replace(made.batch, tables=torch.zeros_like(made.batch.tables), slot_mapping=torch.arange(5), memo={})
    torch_attention.write(single[:, LAYER], made.keys, made.values, batch)
    found = torch_attention.attend(made.queries, single[:, LAYER], batch, scale=0.3, soft_cap=None)
    assert torch.equal(found, attended(made))
    right(made, kv_type).assert_near(found)


@by_type
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_key_that_is_no_number_spoils_its_own_row_and_no_other(kv_type: KvType, poison: float) -> None:
    made = quantised(world(Shape(), [12, 20, 9], [1, 1, 9], seed=11), kv_type)
    clean = attended(made)
    made.keys[1, 0, 3] = poison
    found = attended(made)
    # Heads 0 to 2 of row 1 read that key; the rest reads none of it.
    assert found[1, :3].isnan().all()
    found[1, :3] = clean[1, :3]
    assert torch.equal(found, clean)


def test_storage_of_another_block_size_is_refused() -> None:
    made = quantised(world(Shape(), [5], [1], seed=12), INT8)
    wrong = replace(made.batch, block_size=32, memo={})
    with pytest.raises(AssertionError, match="block size"):
        torch_attention.attend(made.queries, made.cache, wrong, scale=0.3, soft_cap=None)
