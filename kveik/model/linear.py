"""Products with weights: one small class per way of multiplying, behind `make_linear`.

Each also does what follows a product in a decoder (activation, times, plus) inside the product where the library can, so that
the result is rounded once and read once less.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["silu", "gelu_tanh"]


class Linear(Protocol):
    """y = x Wᵀ + b, for x [rows, inputs] -> [rows, outputs]."""

    weight_bytes: int

    def __call__(self, x: Tensor) -> Tensor: ...

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(y)"""
        ...

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """y * factor, factor [rows, outputs]; which may be written to."""
        ...

    def plus(self, x: Tensor, onto: Tensor) -> Tensor:
        """y + onto, onto [rows, outputs]; which may be written to."""
        ...


class Gated(Protocol):
    """activation(gate(x)) * up(x), for x [rows, inputs] -> [rows, outputs]."""

    weight_bytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


class GatedPair:
    """Two products, what joins them inside the second."""

    def __init__(self, gate: Linear, up: Linear, activation: Activation) -> None:
        self.gate = gate
        self.up = up
        self.activation = activation
        self.weight_bytes = gate.weight_bytes + up.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.up.times(x, self.gate.activated(x, self.activation))


def make_linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """weight: [outputs, inputs], which may be let go afterwards; bias: [outputs]. Both already in `dtype`."""
    assert weight.dtype == dtype
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


class PlainLinear:
    """torch's own product: float32, and any type on machines where oneDNN does not multiply bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.weight_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        y = self(x)
        return functional.silu(y, inplace=True) if activation == "silu" else functional.gelu(y, approximate="tanh")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return self(x).mul_(factor)

    def plus(self, x: Tensor, onto: Tensor) -> Tensor:
        return self(x).add_(onto)


PACK_ROWS = 32
"""Rows that oneDNN is told to expect when it chooses the packed layout; it chooses the same one for 1, 32 and 512."""

ONEDNN_ACTIVATIONS: dict[Activation, tuple[str, str]] = {"silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh")}


class PackedLinear:
    """oneDNN's product with the weight reordered ahead into its own layout: 1.1 to 3 times a plain one in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self.bias = bias
        self.weight_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        name, algorithm = ONEDNN_ACTIVATIONS[activation]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, name, [], algorithm)
        return y

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.packed, self.bias, "mul")
        return y

    def plus(self, x: Tensor, onto: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, onto, self.packed, self.bias, "add")
        return y
