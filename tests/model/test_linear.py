"""Every way of multiplying gives torch's own product, and what follows it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kveik.model.linear import Linear, PackedLinear, PlainLinear, make_linear
from tests.bounds import FLOAT32, LIBRARY, STEEPEST, assert_within, product_bound, rounded_bound

packs = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this machine")
WAYS = [(PlainLinear, torch.float32), pytest.param(PackedLinear, torch.bfloat16, marks=packs)]


def assert_products(linear: Linear, x: Tensor, other: Tensor, wide: Tensor, before: Tensor) -> None:
    """The product and what follows it. `wide`: float64, off by `before`; results are rounded to the type of x once or twice."""

    def near(found: Tensor, right: Tensor, error: Tensor) -> None:
        assert found.dtype == x.dtype
        assert_within(found, right, rounded_bound(right, error, x.dtype))

    once = rounded_bound(wide, before, x.dtype)
    near(linear(x), wide, before)
    # Half of a tanh's error, or a sigmoid's, and the roundings around it.
    activated = STEEPEST * once + 2 * LIBRARY * FLOAT32 * wide.abs()
    near(linear.activated(x, "silu"), functional.silu(wide), activated)
    near(linear.activated(x, "gelu_tanh"), functional.gelu(wide, approximate="tanh"), activated)
    near(linear.times(x, other.clone()), wide * other.double(), once * other.double().abs())
    near(linear.plus(x, other.clone()), wide + other.double(), once)


@pytest.mark.parametrize(("way", "dtype"), WAYS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7, 64, 129])
def test_products_and_what_follows_them(way, dtype, biased, rows):
    chance = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance).to(dtype)

    weight, bias, x, other = normal(48, 32), normal(48) if biased else None, normal(rows, 32), normal(rows, 48)
    wide = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    linear = way(weight, bias)
    assert linear.weight_bytes == 48 * 32 * dtype.itemsize
    assert_products(linear, x, other, wide, product_bound(x, weight, bias))


def test_the_door_packs_what_the_machine_multiplies_natively():
    assert isinstance(make_linear(torch.zeros(4, 4), None, torch.float32), PlainLinear)
    packed = make_linear(torch.zeros(4, 4, dtype=torch.bfloat16), None, torch.bfloat16)
    assert isinstance(packed, PackedLinear) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
