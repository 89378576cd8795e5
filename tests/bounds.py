"""Forward error bounds: how far rounding may move a result, from the numbers of the case at hand.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 2002: lemma 3.1 for gamma, section 3.1 for
sums and dot products, whose bounds hold for every order of summation and with fused multiplications. The typical size, with the
root of the number of roundings in place of the number: section 2.8, and Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOAT32 = torch.finfo(torch.float32).eps / 2
"""The unit roundoff: the most that one rounding to nearest moves a number, relative to it."""

BFLOAT16 = torch.finfo(torch.bfloat16).eps / 2

LIBRARY = 4
"""Roundings that an exponential, a tanh or an activation of a library counts as: 2 units in the last place."""

STEEPEST = 1.13
"""The largest slope of silu (1.10) and of gelu (1.13), either of which passes an error of its argument on."""


def gamma(roundings: float, unit: float = FLOAT32, *, typical: bool = False) -> float:
    """The relative error of a product of so many factors (1 + d), |d| <= unit; typical: where roundings are independent."""
    error = (math.sqrt(roundings) if typical else roundings) * unit
    assert error < 1, "the bound says nothing about sums as long as this one"
    return error / (1 - error)


def product_bound(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of x Wᵀ + b summed in float32: x [rows, inputs], weight [outputs, inputs] -> float64 [rows, outputs]."""
    sizes = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        sizes = sizes + bias.double().abs()
    return gamma(x.shape[1] + 1) * sizes


def rounded_bound(right: Tensor, before: Tensor, dtype: torch.dtype, times: int = 1) -> Tensor:
    """Of a result that is off by `before` and then rounded to `dtype` so many times."""
    return before + gamma(times, torch.finfo(dtype).eps / 2) * (right.double().abs() + before)


def assert_within(found: Tensor, right: Tensor, allowed: Tensor | float) -> None:
    """Compare in float64; the message tells the worst element."""
    found, right = found.double(), right.double()
    assert found.shape == right.shape, f"shape {tuple(found.shape)} instead of {tuple(right.shape)}"
    assert torch.isfinite(right).all()
    allowed = torch.as_tensor(allowed, dtype=torch.float64).expand_as(right)
    over = ~((found - right).abs() <= allowed)
    if over.any():
        share = ((found - right).abs() / allowed.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num(math.inf)
        at = int(share.argmax())
        raise AssertionError(
            f"{int(over.sum())} of {over.numel()} elements beyond their bound, the worst {found.flatten()[at]:.9g} instead of"
            f" {right.flatten()[at]:.9g}, where {allowed.flatten()[at]:.3g} is allowed"
        )
