"""Products of 8-bit integers: exact in their integers, near the float32 product, and one row's trouble stays its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kveik.errors import Unsupported
from kveik.model.choice import no_kernels_because
from kveik.model.decoder import load_decoder
from kveik.model.w8a8 import W8A8Gated, W8A8Linear, check_w8a8, quantised_rows
from kveik.model.weights import open_model
from tests.bounds import FLOAT32, LIBRARY, assert_within
from tests.model.test_linear import assert_products
from tests.model.tiny import save_folder, save_gguf, tiny_model
from tests.model.worlds import PagedWorld

CAPABILITIES = torch.cpu.get_capabilities()
vnni = pytest.mark.skipif(
    not (CAPABILITIES.get("avx512_vnni") or CAPABILITIES.get("avx_vnni")), reason="this CPU multiplies no 8-bit integers itself"
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nearest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The slow model: each row to its nearest of 127 steps either way."""
    scales = x.double().abs().amax(1, keepdim=True) / 127
    return (x.double() / scales).round(), scales


def undecided(x: Tensor) -> Tensor:
    """A step where a value lies in the middle between two, as far as float32 can tell, and may go either way; else 0."""
    steps, scales = nearest(x)
    # The scale, the quotient and the sum with 128.5 are rounded: 127 units, twice, and 256.
    return scales * ((x.double() / scales - steps).abs() > 0.5 - 512 * FLOAT32)


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_their_nearest_steps(rows, dtype):
    """600 inputs: 218 rows a tile, so 300 rows take two."""
    x = (normal(rows, 600) * torch.logspace(-6, 6, max(rows, 1))[:rows, None]).to(dtype)
    quantised, scales = quantised_rows(x)
    steps, right = nearest(x)
    # The inverse of 127 and the product with it.
    assert_within(scales, right, 2.5 * FLOAT32 * right)
    assert ((quantised.double() - 128 - steps).abs() * right <= undecided(x)).all()


def test_rows_of_zeros_and_of_tiny_values_stay_finite():
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 5] = 1e-40, 3e-38
    quantised, scales = quantised_rows(x)
    assert torch.isfinite(scales).all()
    assert (quantised[0] == 128).all()
    torch.testing.assert_close((quantised.float() - 128) * scales, x, rtol=0.01, atol=1e-38)


@vnni
@pytest.mark.parametrize("rows", [1, 8, 129])
def test_integers_are_multiplied_exactly(rows):
    """The largest sums there are: older processors' instructions would saturate, and the zero point must come out whole."""
    x, weight = torch.full((rows, 512), 127.0), torch.full((48, 512), 127.0)
    x[:, ::3] = -127
    weight[1::2] = -127
    x[-1] = torch.randint(-127, 128, (512,), generator=torch.Generator().manual_seed(1)).float()
    x[-1, 0] = 127
    assert torch.equal(W8A8Linear(weight.clone(), None)(x), x @ weight.T)


@vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7, 64, 129])
def test_products_and_what_follows_them(rows, biased, dtype):
    weight, bias = normal(48, 32), normal(48, seed=1) if biased else None
    x, other = normal(rows, 32, seed=2).to(dtype), normal(rows, 48, seed=3).to(dtype)
    steps, scales = nearest(x)
    whole, weight_scales = nearest(weight)
    product = (steps @ whole.T) * scales * weight_scales.T
    wide = product if bias is None else product + bias.double()
    # The sum of integers is exact. Two scales with two roundings each, their two products, and the bias's sum.
    before = 8 * FLOAT32 * (product.abs() + wide.abs())
    before += undecided(x) @ (whole * weight_scales).abs().T + (steps * scales).abs() @ undecided(weight).T
    linear = W8A8Linear(weight.clone(), bias)
    assert linear.weight_bytes == 48 * 32
    assert_products(linear, x, other, wide, before)


@vnni
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up_are_one_product(activation):
    weight, bias, x = normal(96, 32), normal(96, seed=1), normal(9, 32, seed=2)
    gated = W8A8Gated(weight.clone(), bias, activation)
    gate, up = (W8A8Linear(part.clone(), half) for part, half in zip(weight.chunk(2), bias.chunk(2), strict=True))
    right = gate.activated(x, activation) * up(x)
    # The same products: the rest is an activation, which the library may compute in vectors or one by one, and a product.
    assert_within(gated(x), right, 2 * LIBRARY * FLOAT32 * (gate(x) * up(x)).abs())
    assert gated.weight_bytes == gate.weight_bytes + up.weight_bytes


@vnni
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(poison):
    x, linear = normal(5, 64), W8A8Linear(normal(48, 64, seed=1), None)
    clean = linear(x)
    x[2, 7] = poison
    found = linear(x)
    others = [0, 1, 3, 4]
    assert not torch.isfinite(found[2]).any()
    assert torch.equal(found[others], clean[others])


@vnni
@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-biased", "qwen2", "qwen3", "gemma3"])
def test_models_of_both_formats_come_near_the_exact_ones(tmp_path, family):
    model = tiny_model(family)
    paths = save_folder(model, tmp_path / "folder"), save_gguf(model, tmp_path / "m.gguf")
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    exact, folder, file = (
        torch.cat(PagedWorld(load_decoder(open_model(path), torch.float32, way), 1, 40, 8).step([(0, tokens)]))
        for path, way in ((paths[0], "bf16"), (paths[0], "w8a8"), (paths[1], "w8a8"))
    )
    assert not torch.equal(folder, exact)
    assert (folder - exact).norm() / exact.norm() < 0.06
    # The two formats' weights differ by a rounding at most, which may move an integer by one.
    assert (folder - file).norm() / exact.norm() < 0.02


@vnni
def test_weights_take_a_byte_each_and_are_told(tmp_path):
    file = open_model(save_folder(tiny_model("llama"), tmp_path / "m"))
    exact, small = load_decoder(file, torch.float32, "bf16"), load_decoder(file, torch.float32, "w8a8")
    assert no_kernels_because(file) is not None
    assert str(no_kernels_because(file)) in small.described, "the log says why the native kernels are not used"
    table = 97 * 48 * 4
    assert small.weight_bytes == (exact.weight_bytes - table) // 4 + table
    assert "int8" in small.described
    assert "float32" in exact.described


def test_a_processor_without_the_instructions_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_vnni": False})
    with pytest.raises(Unsupported, match=r"avx512_vnni or avx_vnni.*--quantization bf16"):
        check_w8a8()
