"""Quantised keys and values: bytes are those that were promised, errors stay within what the format allows, NaN stays NaN."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from kveik.kernels.kv_types import (
    BFLOAT16,
    FLOAT32,
    FP8_E4M3,
    FP8_E5M2,
    INT8,
    KV_TYPES,
    KvType,
    dequantise,
    parts,
    plain,
    quantise,
)
from tests import bounds

QUANTISED = [INT8, FP8_E4M3, FP8_E5M2]
by_type = pytest.mark.parametrize("kv_type", QUANTISED, ids=lambda one: one.name)

FRACTION_BITS = {"fp8_e4m3": 3, "fp8_e5m2": 2}
SMALLEST = {"fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-16}
"""Subnormal steps: values this near to 0 are rounded by half of it."""

rows = some.lists(some.lists(some.floats(-(2.0**125), 2.0**125, width=32), min_size=6, max_size=6), min_size=1, max_size=5)
ordinary = some.lists(some.lists(some.floats(-100, 100, width=32), min_size=6, max_size=6), min_size=1, max_size=5)


def read(x: Tensor, kv_type: KvType, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantise(*quantise(x, kv_type), kv_type, dtype)


@by_type
@given(numbers=some.one_of(ordinary, rows))
def test_what_is_read_is_what_was_written_up_to_half_a_step(kv_type: KvType, numbers: list[list[float]]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    stored, scales = quantise(x, kv_type)
    assert (stored.dtype, stored.shape) == (torch.uint8, x.shape)
    assert (scales.dtype, scales.shape) == (torch.bfloat16, x.shape[:1])
    scale = scales.double()[:, None]
    if kv_type is INT8:
        allowed = 0.5 * scale
    else:
        relative = x.double().abs() * 2.0 ** -(FRACTION_BITS[kv_type.name] + 1)
        allowed = torch.maximum(relative, 0.5 * SMALLEST[kv_type.name] * scale)
    # In float32: the inverse and its product on the way in, the value on the way out, which may be subnormal.
    found = dequantise(stored, scales, kv_type, torch.float32).double()
    rounding = bounds.FLOAT32 * (3 * x.double().abs() + found.abs()) + 2.0**-149
    assert bool(((found - x.double()).abs() <= allowed + rounding).all())


@by_type
@given(numbers=rows)
def test_a_scale_is_the_least_bfloat16_that_lets_the_largest_value_fit(kv_type: KvType, numbers: list[list[float]]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    _, scales = quantise(x, kv_type)
    for row, scale in zip(x, scales, strict=True):
        assert kv_type.largest is not None
        most, found = row.abs().max().item() / kv_type.largest, scale.item()
        if most == 0:
            assert found == 1
        elif most <= 2.0**-126:
            assert found == 2.0**-126
        else:
            # One float32 rounding of the quotient, then up to the next of bfloat16's 8 bits.
            assert most * (1 - 2**-23) <= found <= most * (1 + 2**-7)


@by_type
def test_the_largest_value_of_a_row_reaches_the_format_s_largest(kv_type: KvType) -> None:
    assert kv_type.largest is not None
    x = torch.tensor([[kv_type.largest, -kv_type.largest, 0.0, 1.0]]) * 4
    stored, scales = quantise(x, kv_type)
    assert scales.tolist() == [4.0]
    assert stored.view(kv_type.values).float()[0, :3].tolist() == [kv_type.largest, -kv_type.largest, 0.0]
    assert torch.equal(read(x, kv_type), x)


@by_type
def test_every_scale_and_every_stored_value_reads_as_their_product(kv_type: KvType) -> None:
    """All 256 bytes against torch's own meaning of them, under scales of every size that a finite row can have."""
    every = torch.arange(256, dtype=torch.uint8).expand(325, 256)
    scales = torch.arange(1, 0x7B00, 97, dtype=torch.int16).view(torch.bfloat16)
    meant = every.view(kv_type.values).double() * scales.double()[:, None]
    known = torch.isfinite(meant) & (meant.abs() < 2.0**127)
    right = meant.float()
    assert torch.equal(dequantise(every, scales, kv_type, torch.float32)[known], right[known])
    assert torch.equal(dequantise(every, scales, kv_type, torch.bfloat16)[known], right.bfloat16()[known])


@by_type
def test_a_row_with_a_nan_or_an_infinity_reads_as_nan_and_its_neighbours_do_not(kv_type: KvType) -> None:
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))
    clean = read(x, kv_type)
    for poison in (math.nan, math.inf, -math.inf):
        x[1, 2, 5] = poison
        found = read(x, kv_type)
        assert bool(found[1, 2].isnan().all()), poison
        found[1, 2] = clean[1, 2]
        assert torch.equal(found, clean), poison


@by_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros_and_tiny_numbers_stay_tiny(kv_type: KvType, dtype: torch.dtype) -> None:
    assert read(torch.zeros(3, 8), kv_type, dtype).tolist() == [[0.0] * 8] * 3
    x = torch.tensor([[1e-40, -1e-41, 0.0, 1e-45], [2e-37, -1e-38, 0.0, 1e-45]])
    assert (read(x, kv_type) - x).abs().max().item() <= 2.0**-125


@by_type
def test_a_token_s_bytes_depend_on_that_token_alone(kv_type: KvType) -> None:
    x = torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    stored, scales = quantise(x, kv_type)
    for token in range(64):
        one, scale = quantise(x[token : token + 1], kv_type)
        assert torch.equal(one[0], stored[token])
        assert torch.equal(scale[0], scales[token])


@by_type
def test_parts_of_a_record_are_views_of_its_bytes(kv_type: KvType) -> None:
    size, dim = 8, 4
    assert kv_type.record_bytes(size, dim) == size * dim + 2 * size
    # A layer in the middle of a storage, so that strides count.
    storage = torch.zeros(5, 3, 2, 2, kv_type.record_bytes(size, dim), dtype=torch.uint8)
    stored, scales = parts(storage[:, 1], size)
    assert (tuple(stored.shape), tuple(scales.shape)) == ((5, 2, 2, size, dim), (5, 2, 2, size))
    stored[3, 1, 0, 7] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    scales[3, 1, 0, 7] = -2.0
    record = storage[3, 1, 1, 0]
    assert record[28:32].tolist() == [1, 2, 3, 4]
    assert record[46:48].tolist() == [0x00, 0xC0]
    assert int(storage.count_nonzero()) == 5


@by_type
def test_whole_records_read_as_what_was_written_into_them(kv_type: KvType) -> None:
    x = torch.randn(5, 2, 3, 8, 16, generator=torch.Generator().manual_seed(3))
    storage = torch.zeros(5, 2, 3, kv_type.record_bytes(8, 16), dtype=torch.uint8)
    stored, scales = parts(storage, 8)
    stored[:], scales[:] = quantise(x, kv_type)
    assert torch.equal(plain(storage, 8, kv_type), read(x, kv_type))


def test_records_of_another_block_size_are_refused() -> None:
    with pytest.raises(AssertionError, match="block size"):
        parts(torch.zeros(3, 8 * (5 + 2), dtype=torch.uint8), 16)


def test_plain_types_have_no_scales() -> None:
    assert [one.record_bytes(16, 64) for one in (FLOAT32, BFLOAT16, INT8)] == [4096, 2048, 1024 + 32]
    assert [one.storage for one in KV_TYPES.values()] == [torch.float32, torch.bfloat16, *[torch.uint8] * 3]
    assert [one.number for one in KV_TYPES.values()] == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError):
        quantise(torch.zeros(1, 4), BFLOAT16)
