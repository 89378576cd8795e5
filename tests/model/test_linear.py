"""Every way of multiplying gives torch's own product, and what follows it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kveik.model.linear import PackedLinear, PlainLinear, make_linear

packs = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this machine")
WAYS = [(PlainLinear, torch.float32), pytest.param(PackedLinear, torch.bfloat16, marks=packs)]


@pytest.mark.parametrize(("way", "dtype"), WAYS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7, 64, 129])
def test_products_and_what_follows_them(way, dtype, biased, rows):
    chance = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance).to(dtype)

    weight, bias, x, other = normal(48, 32), normal(48) if biased else None, normal(rows, 32), normal(rows, 48)
    wide = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 6e-2}
    linear = way(weight, bias)
    assert linear.weight_bytes == 48 * 32 * dtype.itemsize
    torch.testing.assert_close(linear(x).float(), wide, **near)
    torch.testing.assert_close(linear.activated(x, "silu").float(), functional.silu(wide), **near)
    torch.testing.assert_close(linear.activated(x, "gelu_tanh").float(), functional.gelu(wide, approximate="tanh"), **near)
    torch.testing.assert_close(linear.times(x, other.clone()).float(), wide * other.float(), **near)
    torch.testing.assert_close(linear.plus(x, other.clone()).float(), wide + other.float(), **near)


def test_the_door_packs_what_the_machine_multiplies_natively():
    assert isinstance(make_linear(torch.zeros(4, 4), None, torch.float32), PlainLinear)
    packed = make_linear(torch.zeros(4, 4, dtype=torch.bfloat16), None, torch.bfloat16)
    assert isinstance(packed, PackedLinear) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
