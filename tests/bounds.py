"""Forward error bounds: the distance that rounding may put between a result and the right one, from the numbers of the case.

Each rounding to nearest adds an error that is at most `unit` times what is rounded, and the errors are taken as independent, of
mean 0. Hoeffding's inequality (J. Am. Stat. Assoc. 58, 1963) then keeps their sum below CONFIDENCE times the root of the sum of
the squares of what each may be at most. This is the argument of N. J. Higham and T. Mary, "A new approach to probabilistic
rounding error analysis" (SIAM J. Sci. Comput. 41(5), 2019), applied to every element with that element's own numbers.

A sum of n terms has n roundings, of partial sums. The order of summation is the processor's and unrelated to the terms, so that
a partial sum is a sample of the terms without replacement: its mean square is at most S² + T², with S the sum and T² the sum of
the squares of the terms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOAT32 = torch.finfo(torch.float32).eps / 2
"""The unit roundoff: the most that one rounding to nearest moves a number, relative to it."""

BFLOAT16 = torch.finfo(torch.bfloat16).eps / 2

CONFIDENCE = 7.0
"""An element is beyond its bound by chance once in 2e10: 2 exp(-CONFIDENCE² / 2)."""

LIBRARY = 4
"""Units that an exponential or a tanh of a library may be off: 2 in the last place. The kernels' own are off by 3.4."""

STEEPEST = 1.13
"""The largest slope of silu (1.10) and of gelu (1.13), either of which passes an error of its argument on."""


def sum_square(count: int, total: Tensor, squares: Tensor, unit: float = FLOAT32) -> Tensor:
    """The square of a sum's error before CONFIDENCE: `count` additions, and products that are rounded once each."""
    return unit**2 * (count * (total.square() + squares) + squares)


def product_bound(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, numbers: float = 0.0) -> Tensor:
    """Of x Wᵀ + b summed in float32: x [rows, inputs], weight [outputs, inputs] -> float64 [rows, outputs].

    `numbers`: the unit to which the products' factors are rounded before, if they are.
    """
    x, weight = x.double(), weight.double()
    total, squares = x @ weight.T, x.square() @ weight.square().T
    if bias is not None:
        total, squares = total + bias.double(), squares + bias.double().square()
    return CONFIDENCE * (sum_square(x.shape[1] + 1, total, squares) + numbers**2 * squares).sqrt()


def rounded_bound(right: Tensor, before: Tensor, dtype: torch.dtype, times: int = 1) -> Tensor:
    """Of a result that is off by `before` and then rounded to `dtype` so many times: no chance in it, as roundings are few."""
    return before + times * torch.finfo(dtype).eps / 2 * (right.double().abs() + before)


def share_of(found: Tensor, right: Tensor, allowed: Tensor) -> Tensor:
    """How much of what is allowed each element takes; 0 where nothing is off."""
    off = (found.double() - right.double()).abs()
    return torch.where(off == 0, 0.0, off / allowed.double())


def assert_within(found: Tensor, right: Tensor, allowed: Tensor | float) -> None:
    """Compares in float64. The message tells the worst element."""
    found, right = found.double(), right.double()
    assert found.shape == right.shape, f"shape {tuple(found.shape)} instead of {tuple(right.shape)}"
    assert torch.isfinite(right).all()
    allowed = torch.as_tensor(allowed, dtype=torch.float64).expand_as(right)
    share = share_of(found, right, allowed).nan_to_num(math.inf)
    if (share > 1).any():
        at = int(share.argmax())
        raise AssertionError(
            f"{int((share > 1).sum())} of {share.numel()} elements are beyond their bound, the worst {found.flatten()[at]:.9g}"
            f" instead of {right.flatten()[at]:.9g}, where {allowed.flatten()[at]:.3g} is allowed"
        )


SUMS_PER_LAYER = 7
"""Of a decoder, one behind the other or side by side: query with key and value, scores, values, output, gate with up, down."""

LANES = 8
"""In which a sum of torch's runs at the least."""


def logits_error(layers: int, width: int) -> float:
    """The length of the difference between two float32 decoders' logits, relative to theirs.

    An estimate, where terms have either sign: a sum of `width` terms, the longest, is off by the root of that many units,
    normalisation and residuals hand the error on as it is, and those of all sums of both decoders are independent.
    """
    return math.sqrt(2 * SUMS_PER_LAYER * layers * width) * FLOAT32


def logits_bound(right: Tensor, layers: int, width: int) -> Tensor:
    """Of each logit, [tokens, 1]: its token's share of that length."""
    return CONFIDENCE * logits_error(layers, width) * right.double().square().mean(-1, keepdim=True).sqrt()


def assert_likeliest(chosen: Tensor, right: Tensor, allowed: Tensor) -> None:
    """Tokens [tokens] that are the likeliest by logits which are off by `allowed` [tokens, 1] at most."""
    behind = right.amax(-1, keepdim=True) - right.gather(-1, chosen[:, None])
    assert (behind <= 2 * allowed).all(), f"token {int(behind.argmax())} is behind the likeliest by {float(behind.max()):.3g}"


def log_norm_bound(values: Tensor) -> Tensor:
    """Of the logarithm of a sum of exponentials, and so of log-probabilities beside their own rounding: [rows, n] -> [rows, 1].

    An exponential's error is its argument's and its own. Terms are positive, and lanes hold an equal part of the sum each.
    """
    values = values.double()
    apart = values.amax(-1, keepdim=True) - values
    exponentials = (values.softmax(-1) * (apart + LIBRARY)).nan_to_num(0).sum(-1, keepdim=True)
    lanes = math.sqrt(values.shape[-1] / LANES**2 + LANES)
    return FLOAT32 * (exponentials + CONFIDENCE * lanes + LIBRARY)
