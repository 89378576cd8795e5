"""Native attention on every instruction set and every type of stored keys and values: the reference's answer over what is
stored, the torch path's bytes, and nothing read that belongs to nobody."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from kveik.kernels import native, native_attention, torch_attention
from kveik.kernels.kv_types import FLOAT32, INT8, KV_TYPES, KvType, plain
from tests.kernels import reference
from tests.kernels.reference import IN_BFLOAT16, IN_BYTES, IN_FLOAT32, Arithmetic, Right
from tests.kernels.test_torch_attention import quantised
from tests.kernels.worlds import LAYER, Shape, World, alone, with_threads, world
from tests.seeds import over_seeds

pytestmark = pytest.mark.skipif(native.module is None, reason="installed without native kernels")

TYPES = list(KV_TYPES.values())
by_type = pytest.mark.parametrize("kv_type", TYPES, ids=lambda one: one.name)

GARBAGE = 1 << 30
"""A block that does not exist: following it ends the process."""


@pytest.fixture(params=native.isas() or [None])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this processor in turn."""
    before = native.isa()
    native.use(request.param)
    yield request.param
    assert before is not None
    native.use(before)


def stored_as(made: World, kv_type: KvType) -> World:
    """The same world, stored as the type says; entries of tables that a row does not hold lead nowhere."""
    tables = torch.where(made.batch.tables == 0, GARBAGE, made.batch.tables)
    made = replace(made, batch=replace(made.batch, tables=tables, memo={}))
    if kv_type.quantised:
        return quantised(made, kv_type)
    return replace(made, storage=made.storage.to(kv_type.values))


def attended(made: World, soft_cap: float | None = None, scale: float = 0.3) -> Tensor:
    native_attention.write(made.cache, made.keys, made.values, made.batch)
    return native_attention.attend(made.queries, made.cache, made.batch, scale=scale, soft_cap=soft_cap)


def arithmetic_of(kv_type: KvType, isa: str) -> Arithmetic:
    if kv_type is FLOAT32 or isa != "avx512_bf16":
        return IN_FLOAT32
    return IN_BYTES if kv_type is INT8 else IN_BFLOAT16


def right(made: World, kv_type: KvType, isa: str, soft_cap: float | None = None, scale: float = 0.3) -> Right:
    """The slow reference over the values that the storage means, after `attended`."""
    batch, arithmetic = replace(made.batch, kv_type=None, memo={}), arithmetic_of(kv_type, isa)
    cache = plain(made.cache, made.batch.block_size, kv_type) if kv_type.quantised else made.cache
    return reference.attend(made.queries, cache, batch, scale=scale, soft_cap=soft_cap, arithmetic=arithmetic)


@by_type
@over_seeds(12)
def test_random_steps_equal_the_reference_over_what_is_stored(kv_type: KvType, isa: str, seed: int) -> None:
    chance = random.Random(seed)
    kv_heads = chance.choice([1, 2, 3])
    shape = Shape(
        heads=kv_heads * chance.choice([1, 2, 3, 4, 6, 7]),
        kv_heads=kv_heads,
        head_dim=chance.choice([16, 64, 80, 96, 128, 256]),
        block_size=chance.choice([8, 16, 32, 64]),
        window=chance.choice([None, None, 1, 9, 30, 150]),
    )
    counts = [1] * chance.randrange(1, 8) + [chance.randint(2, 30) for _ in range(chance.randint(0, 2))]
    seq_lens = [count + chance.choice([0, 1, 15, 16, chance.randrange(300)]) for count in counts]
    made = stored_as(world(shape, seq_lens, counts, seed), kv_type)
    soft_cap, scale = chance.choice([None, None, 2.0]), 2 * shape.head_dim**-0.5
    found = attended(made, soft_cap, scale)
    right(made, kv_type, isa, soft_cap, scale).assert_near(found)


@by_type
def test_a_long_context_in_many_spans_equals_the_reference(kv_type: KvType, isa: str) -> None:
    # More than 32 spans of the smallest size, so that spans grow; and one of many whole ranges.
    shape = Shape(heads=4, kv_heads=2, head_dim=32, block_size=16)
    made = stored_as(world(shape, [5003, 1024, 129], [1, 1, 1], seed=1), kv_type)
    found = attended(made)
    right(made, kv_type, isa).assert_near(found)


@by_type
def test_ragged_chunks_over_several_tiles_equal_the_reference(kv_type: KvType, isa: str) -> None:
    for window in (None, 17, 128, 200):
        shape = Shape(heads=3, kv_heads=1, head_dim=16, block_size=16, window=window)
        made = stored_as(world(shape, [290, 150, 2, 400, 131], [1, 150, 2, 70, 3], seed=2), kv_type)
        found = attended(made)
        right(made, kv_type, isa).assert_near(found)


@by_type
@pytest.mark.parametrize(
    ("window", "cuts"), [(140, [0, 2, 100, 131, 300]), (None, [0, 2, 500, 530, 1020, 1100])], ids=["window", "spans"]
)
def test_a_query_is_the_same_to_the_bit_however_its_prompt_is_cut(
    kv_type: KvType, isa: str, window: int | None, cuts: list[int]
) -> None:
    """Chunks end where the scheduler likes; panels, tiles and spans must not show."""
    shape = Shape(heads=6, kv_heads=2, head_dim=32, block_size=16, window=window)
    made = stored_as(world(shape, [cuts[-1]], [cuts[-1]], seed=5), kv_type)
    whole = attended(made)
    for first, stop in pairwise(cuts):
        batch = replace(
            made.batch,
            slot_mapping=made.batch.slot_mapping[first:stop],
            query_start_loc=torch.tensor([0, stop - first], dtype=torch.int32),
            seq_lens=torch.tensor([stop], dtype=torch.int32),
            memo={},
        )
        part = native_attention.attend(made.queries[first:stop], made.cache, batch, scale=0.3, soft_cap=None)
        assert torch.equal(part, whole[first:stop])


@by_type
def test_writing_gives_the_bytes_of_the_torch_path_and_touches_no_others(kv_type: KvType, isa: str) -> None:
    made = stored_as(world(Shape(head_dim=48, block_size=16), [5, 30, 60], [1, 9, 33], seed=3), kv_type)
    # Subnormal in fp8, all zero, tiny and huge heads.
    made.keys[0, 0] *= torch.logspace(-6, 0, 48)
    made.keys[1, 0] = 0.0
    made.keys[2, 0] *= 1e-38
    made.values[3, 1] *= 1e38
    twin = made.storage.clone()
    torch_attention.write(twin[:, LAYER], made.keys, made.values, replace(made.batch, memo={}))
    native_attention.write(made.cache, made.keys, made.values, made.batch)
    assert torch.equal(made.storage.view(torch.uint8), twin.view(torch.uint8))


@by_type
def test_bfloat16_keys_and_values_are_written_as_float32_ones_are(kv_type: KvType, isa: str) -> None:
    made = stored_as(world(Shape(head_dim=48), [5, 30], [1, 9], seed=4), kv_type)
    narrow = replace(made, keys=made.keys.bfloat16(), values=made.values.bfloat16(), storage=made.storage.clone())
    wide = replace(made, keys=narrow.keys.float(), values=narrow.values.float())
    attended(wide)
    found = attended(replace(narrow, queries=made.queries.bfloat16()))
    assert found.dtype == torch.bfloat16
    assert torch.equal(wide.storage.view(torch.uint8), narrow.storage.view(torch.uint8))


@by_type
def test_a_row_is_the_same_to_the_bit_alone_and_among_others(kv_type: KvType, isa: str) -> None:
    shape = Shape(heads=6, kv_heads=2, head_dim=64, block_size=16, window=None)
    made = stored_as(world(shape, [3, 1000, 20, 9, 300, 41], [1, 1, 1, 1, 30, 6], seed=7), kv_type)
    together = [with_threads(threads, lambda: attended(made)) for threads in (1, 2, 3)]
    for row in range(6):
        part = slice(int(made.batch.query_start_loc[row]), int(made.batch.query_start_loc[row + 1]))
        by_itself = native_attention.attend(made.queries[part], made.cache, alone(made, row), scale=0.3, soft_cap=None)
        for threads, found in enumerate(together, 1):
            assert torch.equal(by_itself, found[part]), f"row {row}, {threads} threads"


@by_type
def test_a_few_queries_behind_long_contexts_are_the_same_to_the_bit_however_many_share_their_keys(
    kv_type: KvType, isa: str
) -> None:
    # Several rows, whose spans are of different number and size; queries on both sides of where a span begins.
    for window in (None, 700):
        shape = Shape(heads=6, kv_heads=2, head_dim=32, block_size=16, window=window)
        made = stored_as(world(shape, [900, 2600, 1030], [1, 2, 17], seed=9), kv_type)
        one, two, three = (with_threads(threads, partial(attended, made)) for threads in (1, 2, 3))
        right(made, kv_type, isa).assert_near(one)
        assert torch.equal(two, one)
        assert torch.equal(three, one)


@by_type
def test_what_is_no_number_is_seen_in_its_own_row_only(kv_type: KvType, isa: str) -> None:
    made = stored_as(world(Shape(head_dim=32, block_size=16), [40, 17, 30, 25], [1, 1, 1, 9], seed=8), kv_type)
    native_attention.write(made.cache, made.keys, made.values, made.batch)
    clean = native_attention.attend(made.queries, made.cache, made.batch, scale=0.3, soft_cap=None)
    others = [token for token in range(len(clean)) if token != 1]
    for part, broken in product(("queries", "keys", "values"), (torch.nan, torch.inf, -torch.inf)):
        numbers = getattr(made, part).clone()
        numbers[1, :, 5] = broken
        found = attended(replace(made, **{part: numbers}))
        assert not torch.isfinite(found[1]).all(), (part, broken)
        assert torch.equal(found[others], clean[others]), (part, broken)


def test_float32_storage_of_a_single_block_is_read_and_written(isa: str) -> None:
    made = stored_as(world(Shape(head_dim=16), [5], [5], seed=10), FLOAT32)
    single = made.storage[1:].clone()
    batch = replace(made.batch, tables=torch.zeros_like(made.batch.tables), slot_mapping=torch.arange(5), memo={})
    native_attention.write(single[:, LAYER], made.keys, made.values, batch)
    found = native_attention.attend(made.queries, single[:, LAYER], batch, scale=0.3, soft_cap=None)
    assert torch.equal(found, attended(made))


@pytest.mark.parametrize(
    ("head_dim", "block_size", "taken"), [(64, 16, True), (8, 16, False), (40, 16, False), (64, 4, False), (256, 64, True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_shapes_that_the_kernels_are_written_for_are_taken(
    dtype: torch.dtype, head_dim: int, block_size: int, taken: bool
) -> None:
    made = world(Shape(head_dim=head_dim, block_size=block_size, dtype=dtype), [5], [1], seed=11)
    assert native_attention.supports(made.cache, made.batch) == taken
